"""Checkpoints: one main file, and what belongs to it.

``workers`` writes and reads those of workers that move independently, with side files; ``remote``
those of a run whose optimizer is on another rank. ``writer`` is one save of all workers, ``reader``
what a run goes on from, ``side_files`` and ``manifest`` what lies beside the main file and in it,
``position`` where a worker is in its data, ``atomic_io`` how a file is written as a whole, and
``other_checkpoint`` which one can be used in place of a damaged one.
"""
