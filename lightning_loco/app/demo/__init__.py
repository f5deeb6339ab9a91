"""The default model and data of the command line: a byte-level GPT on text of this machine."""
