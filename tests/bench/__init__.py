"""Tests of the comparison scripts on recorded output; nothing is timed."""
