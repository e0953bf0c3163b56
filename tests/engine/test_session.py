"""Context sizes, the memory check, and the reuse of a session."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeh2o import _core, isa
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.config import PrefillConfig, RuntimeConfig
from edgeh2o.engine.memory_fit import RECHECK_RESERVE_BYTES, RESERVE_BYTES
from edgeh2o.engine.plan import RunPlan
from edgeh2o.engine.session import Session
from edgeh2o.errors import ResourceError, UsageError
from edgeh2o.host import memory
from edgeh2o.runners.base import SessionShape
from tests.engine.fakes import CONFIG, FakeModel, ScriptedRunner


def _plan(
    attention: SparseAttentionConfig | None = None, *, trained: int = 8192, **runtime: Any
) -> RunPlan:
    config = replace(CONFIG, context_length=trained)
    return RunPlan.of(config, attention or DenseConfig(), PrefillConfig(), RuntimeConfig(**runtime))


@pytest.mark.parametrize(
    ("n_prompt_tokens", "max_tokens", "requested", "trained", "expected"),
    [
        (10, 100, None, 8192, 4096),
        (10, 100, None, 2048, 2048),
        (5000, 100, None, 8192, 5120),
        (5000, 120, None, 8192, 5120),
        (5000, 121, None, 8192, 5376),
        (5000, -1, None, 8192, 6144),
        (8192, -1, None, 8192, 8192),
        (8000, 5000, None, 8192, 8192),
        (10, -1, 0, 8192, 8192),
        (10, -1, 100, 8192, 100),
        (10, -1, 9000, 8192, 9000),
        (100, 50, 100, 8192, 100),
    ],
)
def test_choose_context(
    n_prompt_tokens: int, max_tokens: int, requested: int | None, trained: int, expected: int
) -> None:
    plan = _plan(trained=trained, context_size=requested)
    assert plan.choose_context(n_prompt_tokens, max_tokens) == expected


@pytest.mark.parametrize(
    ("n_prompt_tokens", "requested", "max_tokens", "message"),
    [
        (101, 100, 10, "101 tokens and the context holds 100; use -c 111 or more"),
        (101, 100, -1, "use -c 1125 or more"),
        (8190, 100, -1, "use -c 8192 or more"),
        (8193, None, 10, "holds 8192; shorten it, or use -c 8203 to read it all the same, beyond"),
        (8193, 0, -1, "shorten it, or use -c 9217 .* beyond the 8192 positions that the model"),
        (9001, 9000, 10, "context holds 9000; shorten it, or use -c 9011"),
    ],
)
def test_prompt_longer_than_the_context(
    n_prompt_tokens: int, requested: int | None, max_tokens: int, message: str
) -> None:
    """The context that is named leaves room for the answer."""
    with pytest.raises(UsageError, match=message):
        _plan(context_size=requested).choose_context(n_prompt_tokens, max_tokens)


def test_warning_beyond_the_trained_length(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(UserWarning, match="a context of 9000 is longer than the 8192 positions"):
        _plan(context_size=9000).check_load(_file())
    for size in (8192, None):
        _plan(context_size=size).check_load(_file())
    assert not recwarn.list


@pytest.mark.parametrize(
    ("context", "batch_size"), [(100, 1024), (1024, 1024), (1025, 2048), (5000, 4096)]
)
def test_batch_is_no_larger_than_the_context_in_whole_chunks(context: int, batch_size: int) -> None:
    assert _plan(threads=3).shape(context) == SessionShape(
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
    assert _plan(attention_precision="f32").shape(64).precision == "f32"


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
    shape = _plan(HeadwiseConfig()).shape(5000)
    assert shape.chunk_size == HeadwiseConfig.preferred_chunk_size == 256


def _estimate(attention: object, shape: SessionShape) -> dict[str, int]:
    return {"kv_cache": 1000 * shape.max_context, "activations": 50_000_000}


def _file(weight_bytes: int = 0, mapped_bytes: int = 0) -> Any:
    return SimpleNamespace(
        estimate_session_bytes=_estimate, n_weight_bytes=weight_bytes, n_mapped_bytes=mapped_bytes
    )


def _require_fit(context: int, weight_bytes: int = 0) -> None:
    _plan(context_size=context).check_load(_file(weight_bytes))


def test_memory_check_passes_up_to_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 1000 * 4096 + 50_000_000 + 7 + RESERVE_BYTES
    monkeypatch.setattr(memory, "available_bytes", lambda: needed)
    _require_fit(4096, 7)
    with pytest.raises(ResourceError):
        _require_fit(4096, 8)


def test_refusal_gives_numbers_and_the_largest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    available = 150_000_000 + RESERVE_BYTES
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    with pytest.raises(ResourceError) as caught:
        _require_fit(1_000_000, 20_000_000)
    message = str(caught.value)
    assert message.startswith("a context of 1000000 positions needs 1020 MiB (kv cache 954 MiB, ")
    assert "activations 47.7 MiB, weights 19.1 MiB" in message
    assert "143 MiB are available" in message
    largest = int(message.rsplit("-c ", 1)[1])
    assert largest % 256 == 0
    room = 150_000_000 - 20_000_000 - 50_000_000
    assert largest * 1000 <= room < (largest + 256) * 1000
    with pytest.warns(UserWarning, match="is longer than the 8192 positions"):
        _require_fit(largest, 20_000_000)


def test_refusal_when_no_context_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(ResourceError, match="no context fits: free memory"):
        _require_fit(4096)


def _session(model: Any, **runtime: Any) -> Session:
    prompts: Any = SimpleNamespace(model=model)
    session = Session(
        prompts, _plan(**runtime), path=Path("tiny.gguf"), seed=None, on_progress=None
    )
    session.take_weights(model, 0.0)
    return session


def test_session_is_reused_when_the_context_suffices() -> None:
    model = FakeModel()
    session = _session(model)
    first = session.prepare(100, 10)
    first.prefill(np.zeros(100, dtype=np.int32), is_last=True)
    assert session.prepare(4000, 96) is first
    assert first.position == 0
    assert [shape.max_context for shape in model.started] == [4096]


def test_session_grows_when_a_prompt_needs_more() -> None:
    model = FakeModel()
    session = _session(model)
    first = session.prepare(100, 10)
    second = session.prepare(5000, 10)
    assert second is not first
    assert session.prepare(100, 10) is second
    assert [shape.max_context for shape in model.started] == [4096, 5120]


def test_a_short_prompt_takes_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take the memory of the whole context at once, and the time to clear it."""
    small: list[int] = []

    def note(runner: ScriptedRunner) -> None:
        small.append(runner.max_context)

    monkeypatch.setattr(ScriptedRunner, "use_small_pages", note, raising=False)
    for n_prompt, context in ((10, 4096), (2047, 4096), (2048, 4096), (5000, 5120), (5000, 16384)):
        _session(FakeModel(), context_size=context, trained=16384).prepare(n_prompt, 10)
    assert small == [4096, 4096, 16384]


def test_session_that_cannot_fit_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: RECHECK_RESERVE_BYTES + 500_000)
    model = FakeModel()
    with pytest.raises(ResourceError, match="the largest context that fits is -c 4352"):
        _session(model, context_size=8192).prepare(10, 10)
    assert model.started == []
