"""Checkpoints: an ordinary main file, and what resumes a run, in it or in a folder beside it.

``checkpoints`` has the hooks, the same for every strategy. They are given the parts that differ:
what is saved and how the ranks agree, of workers with parameters of their own (``local_state``) or
with the optimizer on another rank (``remote_state``), and how the main file is written
(``main_file``): by one rank, or by all that hold shards of the model (``shard_folder``).
``writer`` writes one save, ``reader`` chooses and reads one; ``side_files`` holds the files and the
manifest in the main file, ``position`` where a rank is in its loops and data, and ``atomic_io`` how
one file is written, by the operations of a ``disk``.
"""
