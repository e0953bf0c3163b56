"""A budget table and models of a few heads, for tests of settings."""

from __future__ import annotations

from dataclasses import dataclass

from edgeh2o.attention.budget_table import BudgetTable

LEVELS = (4, 8, 16)


def make_table(errors: list[list[float]], *, mean_past: float = 64.0) -> BudgetTable:
    return BudgetTable(
        model="tiny",
        fingerprint="f" * 32,
        n_layers=len(errors),
        n_kv_heads=1,
        chunk_size=256,
        length=4096,
        mean_past=mean_past,
        levels=LEVELS,
        errors=tuple(map(tuple, errors)),
        losses={8: 2.0, 16: 0.5, 32: 0.1},
    )


TABLE = make_table([[1.0, 0.5, 0.25], [0.01, 0.001, 0.0], [9.0, 8.0, 7.0]])

SMOLLM2 = "033526a135499773639407b17479d51b"


@dataclass(frozen=True)
class Model:
    """What budgets are chosen for, with a KV head in every layer."""

    n_layers: int = 3
    n_kv_heads: int = 1
    fingerprint: str = ""
    n_heads: int = 2
    splits_groups: bool = False
    index_top_k: int = 0
    has_distance_bias: bool = False
    is_recurrent: bool = False
    has_like_layers: bool = True
    decodes_by_rule: bool = True

    @property
    def n_slots(self) -> int:
        return self.n_layers * self.n_kv_heads


class UnequalModel(Model):
    n_slots = 2
