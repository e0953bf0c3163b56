"""Threads of the core end with what they were for: elsewhere others would wait for their cores.

libgomp lets waiting threads spin only as long as there are no more of them, of all callers, than
cores. With those of a model's opening still there, ``edgeh2o serve`` had a third of its speed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from edgeh2o import LLM, SamplingParams, _core
from tests.tiny_models import TinyModelFactory

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts its threads")


def _count() -> int:
    """Threads of this process that are not Python's."""
    return psutil.Process().num_threads() - threading.active_count()


def _falls_to(n: int) -> bool:
    """Whether there are as few; threads that were told to end do so when they are scheduled."""
    give_up = time.monotonic() + 20
    while _count() > n and time.monotonic() < give_up:
        time.sleep(0.01)
    return _count() == n


@pytest.fixture(scope="module")
def n_before() -> int:
    """Without those that other tests of this process have left behind."""
    _core.release_threads()
    counts = [_count()]
    while len(counts) < 20 or counts[-20] != counts[-1]:  # they end when they are scheduled
        time.sleep(0.01)
        counts.append(_count())
    return counts[-1]


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory, n_before: int) -> Iterator[LLM]:
    with LLM(tiny_model(tensor_type="Q4_0", n_layers=2), threads=3) as llm:
        assert _falls_to(n_before)
        yield llm


def test_a_generation_leaves_none(llm: LLM, n_before: int) -> None:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    found = []

    def answer() -> None:
        for _ in llm.stream([3] * 40, sampling):
            found.append(_count())

    for _ in range(2):
        answer()
        assert _falls_to(n_before)
        worker = threading.Thread(target=answer)
        worker.start()
        worker.join()
        assert _falls_to(n_before)
    assert found == [n_before + 2] * len(found)  # while there is something to do


def test_a_profile_leaves_none(llm: LLM, n_before: int) -> None:
    llm.start_runner(64).prefill(np.full(40, 3, np.int32), is_last=True)
    assert _count() == n_before + 2  # what a caller of its own reads is the caller's
    assert llm.profile_budgets(np.arange(2048, dtype=np.int32) % 200 + 3)
    assert _falls_to(n_before)


def test_one_that_is_left_early_leaves_none(llm: LLM, n_before: int) -> None:
    stream = llm.stream([3] * 40, SamplingParams(max_tokens=9, ignore_eos=True))
    next(iter(stream))
    assert _count() == n_before + 2
    stream.close()
    assert _falls_to(n_before)
