"""Writes models in other formats."""
