"""Tests of the declared model families."""
