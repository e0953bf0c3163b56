"""Launches of the kernels for GPUs, with the bytes or operations that each must take."""

from .attention import attention, attention_by_tiles, latent_attention
from .case import LARGE, SMALL, Case, Sizes
from .products import products
from .rows import recurrent, row_kernels

# Makers of cases: each puts its operands on the device and takes them off after its last case.
ALL_CASES = (products, attention, attention_by_tiles, latent_attention, row_kernels, recurrent)

__all__ = ["ALL_CASES", "LARGE", "SMALL", "Case", "Sizes"]
