"""Tests of the generation loop and what surrounds it."""
