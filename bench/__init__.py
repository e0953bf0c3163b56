"""Comparisons with llama.cpp programs built by the caller; run as ``python -m bench.X``."""
