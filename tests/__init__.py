"""Tests of edgeh2o; the folders mirror the source tree."""
