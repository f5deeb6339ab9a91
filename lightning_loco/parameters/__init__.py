"""A model as flat vectors: layout, packing, the worker's replica and the consensus."""
