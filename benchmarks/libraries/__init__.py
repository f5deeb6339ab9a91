"""Other libraries beside this one: the training that all of them share, and an adapter for each.

``library.py`` says what an adapter offers, ``training.py`` is the training, ``links.py`` makes the
network between the workers, and ``counters.py`` reads bytes and memory from Linux.
"""
