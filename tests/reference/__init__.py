"""NumPy float64 oracles. They import nothing of edgeh2o."""
