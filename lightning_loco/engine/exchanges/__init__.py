"""How messages move between workers: all-reduce, neighbours, compressed."""
