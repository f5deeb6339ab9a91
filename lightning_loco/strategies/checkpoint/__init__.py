"""Checkpoints: an ordinary main file, and a folder with the state of each worker beside it.

``workers`` implements saving and resuming for workers with an engine each, ``remote`` for a run
whose optimizer is on another rank. ``writer`` writes one save, ``reader`` chooses and reads one;
``side_files`` holds the files and the manifest in the main file, ``position`` where a rank is in
its loops and data, and ``atomic_io`` how one file is written. ``sharded`` does the work of
``workers`` for ranks that hold shards, and ``shard_folder`` writes and reads these.
"""
