"""The Python side of every_other.cc: a file of edgeh2o/attention/."""

from __future__ import annotations

from dataclasses import dataclass

from edgeh2o._core import SparsePolicy, make_policy
from edgeh2o.attention.base import AttentionModel, SparseAttentionConfig
from edgeh2o.attention.registry import register_sparse_attention
from edgeh2o.option_fields import check_int, option


@register_sparse_attention("every_other")
@dataclass(frozen=True, slots=True)
class EveryOtherConfig(SparseAttentionConfig):
    """A chunk reads every ``step``-th position before it."""

    step: int = option(2, "--every-other-step", help="distance of the positions that are read")

    def __post_init__(self) -> None:
        check_int(self, "step", 1)

    def make_policy(self, model: AttentionModel) -> SparsePolicy:
        return make_policy("every_other", step=self.step)
