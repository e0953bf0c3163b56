"""Developer tools, run as `python -m tools.NAME`."""
