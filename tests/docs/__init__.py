"""Tests that docs/ and the README say what the program does."""
