"""Decoupled learners and the syncer that merges what they push."""
