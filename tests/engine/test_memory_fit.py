"""The memory check: numbers, the largest context that fits, and a warning."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edgeh2o.engine.memory_fit import RESERVE_BYTES, check_load, fit_context, limit_to_memory
from edgeh2o.errors import ResourceError
from edgeh2o.host import memory
from edgeh2o.runners.base import SessionShape
from tests.engine.fakes import make_plan


def test_warning_beyond_the_trained_length(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(UserWarning, match="a context of 9000 is longer than the 8192 positions"):
        check_load(make_plan(context_size=9000), _file())
    for size in (8192, None):
        check_load(make_plan(context_size=size), _file())
    assert not recwarn.list


def _estimate(attention: object, shape: SessionShape) -> dict[str, int]:
    return {"kv_cache": 1000 * shape.max_context, "activations": 50_000_000}


def _file(weight_bytes: int = 0, mapped_bytes: int = 0) -> Any:
    return SimpleNamespace(
        estimate_session_bytes=_estimate, n_weight_bytes=weight_bytes, n_mapped_bytes=mapped_bytes
    )


def _require_fit(context: int, weight_bytes: int = 0) -> None:
    check_load(make_plan(context_size=context), _file(weight_bytes))


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
    monkeypatch.setattr(memory, "binding_limit", str)
    with pytest.raises(ResourceError, match="no context fits: free memory"):
        _require_fit(4096)


def _on_device(left: int | None, weight_bytes: int = 0) -> Any:
    """A model on a GPU, whose sessions take 4 bytes of the host per position."""

    def estimate(attention: object, shape: SessionShape) -> dict[str, int]:
        return {**_estimate(attention, shape), "staging": 4 * shape.max_context}

    return SimpleNamespace(
        estimate_session_bytes=estimate,
        n_weight_bytes=weight_bytes,
        n_mapped_bytes=0,
        device_memory_left=lambda: left,
    )


def test_a_context_that_nobody_named_is_what_a_gpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the host was looked at, and the first prompt refused for the 4,096 of any prompt."""
    plan = replace(make_plan(context_size=None), has_device_memory=True)
    room = 50_000_000 + 1000 * 1600
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**30)
    assert check_load(plan, _on_device(room)).most_context == 1536
    assert check_load(plan, _on_device(room + 7_000_000, 7_000_000)).most_context == 1536
    assert check_load(plan, _on_device(None)) == plan  # one that shares the host's memory
    assert check_load(plan, _on_device(room + 1000 * 4096)) == plan
    assert limit_to_memory(plan, _on_device(room + 1000 * 4096)).most_context == 5632
    assert limit_to_memory(plan, _on_device(room + 1000 * 8192)) == plan
    # The least of both.
    monkeypatch.setattr(memory, "available_bytes", lambda: RESERVE_BYTES + 4 * 1300)
    assert check_load(plan, _on_device(room)).most_context == 1280


def test_a_session_is_as_long_as_a_gpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(make_plan(context_size=None), has_device_memory=True)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**30)
    model = _on_device(50_000_000 + 1000 * 5000)
    assert fit_context(plan, model, 8192, 1000) == 4864
    assert fit_context(plan, model, 8192, 6000) == 6000  # which its start refuses
    assert fit_context(plan, model, 4096, 1000) == 4096
    assert fit_context(plan, model, 8192, 1000, freed_bytes=1) == 8192


def test_a_context_that_nobody_named_is_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with room for 1,536 positions was refused for the 4,096 of any prompt."""
    room = 50_000_000 + 1000 * 1600
    monkeypatch.setattr(memory, "available_bytes", lambda: room + RESERVE_BYTES)
    plan = make_plan(context_size=None)
    assert check_load(plan, _file()).most_context == 1536
    draft = SimpleNamespace(
        estimate_session_bytes=lambda context: 500 * context, n_weight_bytes=0, n_mapped_bytes=0
    )
    assert check_load(plan, _file(), draft).most_context == 1024
    draft.n_weight_bytes = 500_000
    assert check_load(plan, _file(), draft).most_context == 512
    with pytest.raises(ResourceError, match=r"a context of 4096 positions .* no context fits"):
        check_load(plan, _file(weight_bytes=1_500_000))
    with pytest.raises(ResourceError, match="the largest context that fits is -c 1536"):
        check_load(make_plan(context_size=4096), _file())
    room += 1000 * 4096
    assert check_load(plan, _file()) == plan
