"""Tests of the project structure: layer ladder, symbols of the ISA libraries."""
