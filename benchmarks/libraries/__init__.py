"""Other libraries beside this one: the same training loop, and one small adapter for each.

``table.py`` lists them, ``library.py`` says what an adapter offers, ``training.py`` is the loop
that all of them share. ``running.py`` starts the workers, ``worker.py`` is one, ``links.py`` makes
the network between them, ``counters.py`` reads bytes and memory from Linux, and ``summary.py`` and
``picture.py`` show what came of it.
"""
