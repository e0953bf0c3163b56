"""NVIDIA GPUs: which there are, and the kernels for them in this package."""
