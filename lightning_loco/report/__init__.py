"""The page of a run: its record as JSON, drawn as a page of HTML, and as a trace for Perfetto.

Nothing here needs PyTorch: ``lightning-loco report`` draws pages where it is not installed.
"""
