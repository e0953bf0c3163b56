"""The sizes, types and limits of the sessions of a plan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edgeh2o import _core, isa
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.config import PrefillConfig, RuntimeConfig
from edgeh2o.engine.plan import RunPlan
from edgeh2o.runners.base import SessionShape
from tests.engine.fakes import CONFIG, make_plan


@pytest.mark.parametrize(
    ("context", "batch_size"), [(100, 1024), (1024, 1024), (1025, 2048), (5000, 4096)]
)
def test_batch_is_no_larger_than_the_context_in_whole_chunks(context: int, batch_size: int) -> None:
    assert make_plan(threads=3).shape(context) == SessionShape(
        max_context=context,
        batch_size=batch_size,
        chunk_size=1024,
        cache_type="f16",
        precision=isa.attention_precision("auto"),
        threads=3,
        checked_rows=16,
    )


@pytest.mark.parametrize(
    ("attention", "prefill", "percent"),
    [
        (HeadwiseConfig(), PrefillConfig(), 1.0),  # nothing, or what prompts taught
        (HeadwiseConfig(budget=256), PrefillConfig(), math.inf),
        (HeadwiseConfig(budget=256), PrefillConfig(max_error=3.0), 3.0),
        (HeadwiseConfig(), PrefillConfig(max_error=0), 0.0),
        (H2OConfig(), PrefillConfig(), math.inf),
    ],
)
def test_a_budget_by_hand_is_not_guarded(
    attention: SparseAttentionConfig, prefill: PrefillConfig, percent: float
) -> None:
    plan = RunPlan.of(CONFIG, attention, prefill, RuntimeConfig())
    assert plan.shape(64).error_limit == pytest.approx((percent / 100) ** 2)


def test_a_stricter_promise_allows_less_error() -> None:
    known = HeadwiseConfig(budgets=(256,), source="package")
    default, strict, unsaid = (
        HeadwiseConfig(max_loss=loss).default_max_error(known) for loss in (0.5, 0.125, None)
    )
    assert default == unsaid == 4.5
    assert default == 2 * (strict or 0)
    learnt = HeadwiseConfig(budgets=(256,), source="profile (2 prompts)", prompts=2)
    assert HeadwiseConfig().default_max_error(learnt) == 1.0


def test_the_precision_of_a_session_is_the_one_asked_for() -> None:
    assert make_plan(attention_precision="f32").shape(64).precision == "f32"


def test_keys_with_biases_are_counted_in_the_precision_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_core, "best_attention_precision", lambda: "bf16")
    biased = replace(CONFIG, has_key_bias=True)
    precisions = [
        RunPlan.of(config, DenseConfig(), PrefillConfig(), RuntimeConfig()).shape(64).precision
        for config in (CONFIG, biased)
    ]
    assert precisions == ["bf16", "f32"]


def test_an_open_chunk_size_is_that_of_the_attention() -> None:
    shape = make_plan(HeadwiseConfig()).shape(5000)
    assert shape.chunk_size == HeadwiseConfig.preferred_chunk_size == 256
