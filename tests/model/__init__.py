"""Tests of the C++ decoder against the NumPy reference."""
