"""What the command line trains by default: a byte-level GPT on text that is already here."""
