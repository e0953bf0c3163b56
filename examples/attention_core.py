"""The attention of one layer alone, for other runtimes: q, k, v in, the output out.

    python examples/attention_core.py

Reads 2,048 tokens by plain H2O and densely, and says how far apart they are and what a chunk read.
"""

from __future__ import annotations

import numpy as np

from edgeh2o import ChunkedAttention, dense_policy, h2o_policy

N_TOKENS, N_HEADS, N_KV_HEADS, HEAD_DIM = 2048, 8, 2, 64


def main() -> int:
    """Command line entry; returns the exit code."""
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal((N_TOKENS, heads, HEAD_DIM), np.float32)
        for heads in (N_HEADS, N_KV_HEADS, N_KV_HEADS)
    )
    k[:4] *= 4  # a few keys that everything attends to, as in real models
    outputs = []
    for policy in (dense_policy(), h2o_policy(local=128, heavy=128)):
        attention = ChunkedAttention(
            policy,
            n_heads=N_HEADS,
            n_kv_heads=N_KV_HEADS,
            head_dim=HEAD_DIM,
            chunk_size=256,
            batch_size=1024,
            max_context=N_TOKENS + 1,
        )
        for begin in range(0, N_TOKENS, 1024):  # logical batches, in turn
            end = begin + 1024
            is_last = end == N_TOKENS
            out = attention.run(0, q[begin:end], k[begin:end], v[begin:end], is_last=is_last)
        outputs.append(out)  # [1024, N_HEADS, HEAD_DIM] of the last batch
        token = attention.decode(0, q[:1], k[:1], v[:1])  # one more token
        assert token.shape == (1, N_HEADS, HEAD_DIM)
    dense, sparse = outputs
    error = np.linalg.norm(sparse - dense) / np.linalg.norm(dense)
    positions = policy.memory_set(0, 0)
    print(f"error of the last batch: {error:.3f}")
    print(
        f"the last chunk read {len(positions)} of {N_TOKENS - 256} earlier keys: {positions[:6]}..."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
