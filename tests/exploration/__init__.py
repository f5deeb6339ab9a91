"""Runs the real state machines in one process, in orders of events that are drawn from a seed."""
