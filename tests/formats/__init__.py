"""Tests of the model file readers."""
