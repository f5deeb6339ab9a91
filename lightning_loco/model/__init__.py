"""A model as flat vectors: layout and packing, the worker's replica, the consensus, checks."""
