"""Small parts for every layer: clock, background threads, checks of values, fault points."""
