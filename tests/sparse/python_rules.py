"""How tests drive a rule in Python: the shapes of a layer and the policy of a rule."""

from __future__ import annotations

from edgeh2o import _core
from tests.ops.attention_case import Shape

S = 32
N_TOKENS = 9 * S + 13
SHAPE = Shape(n_kv_heads=4, group=3, head_dim=16)
CLOSE = {"rtol": 0.0, "atol": 2e-5}


def make_policy(rule: object, *, column_sums: str = "joint") -> _core.SparsePolicy:
    return _core.python_policy(rule, column_sums=column_sums, max_memory=100, max_synthetic=32)
