"""Small parts for several layers: clock, threads, checks and text of values, fault points."""
