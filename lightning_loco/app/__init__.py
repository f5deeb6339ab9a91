"""What train.py is made of: the command line, early checks, a run, its demo model and data."""
