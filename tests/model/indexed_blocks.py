"""Sizes of the tiny models whose indexers choose blocks of tokens."""

from __future__ import annotations

from tests.model.model_pair import CHUNK_SIZE

# Tokens that are read, tokens of a block, the width of an index key, and that of the keys and
# values of a token in two KV heads.
TOP_K, BLOCK, KEY_DIM, ROW_DIM = 24, 4, 32, 2 * 2 * 16
N_TOKENS = 3 * CHUNK_SIZE + 17
