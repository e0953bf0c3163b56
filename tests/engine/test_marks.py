"""Prompts go back to marks: their logits are those of a runner that did nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.config import PrefillConfig
from edgeh2o.engine import context_size
from edgeh2o.export.onnx import export_model
from edgeh2o.llm import LLM
from edgeh2o.sampling_config import SamplingParams
from tests.tiny_models import TinyModelFactory

ATTENTIONS = {
    "dense": DenseConfig(),
    "h2o": H2OConfig(local=3, heavy=4, tail=5),
    "headwise": HeadwiseConfig(budget=10, local=4, sinks=1, landmark_size=8, tail=4),
}
CHUNK = 8


class RecordedRunner:
    """A runner that notes the calls whose tokens it still holds, and the latest logits."""

    def __init__(self, start: Callable[[], Any], old: RecordedRunner | None) -> None:
        self.__dict__.update(start=start, runner=start(), old=old, calls=[], logits=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.runner, name, value)

    def prefill(self, tokens: NDArray[np.int32], **options: Any) -> Any:
        logits = self.runner.prefill(tokens, **options)
        self._note(tokens.tolist(), options["is_last"], logits)
        return logits

    def decode(self, token: int) -> Any:
        logits = self.runner.decode(token)
        self._note([token], None, logits)
        return logits

    def _note(self, tokens: list[int], is_last: bool | None, logits: Any) -> None:
        self.calls.append((tokens, is_last))
        self.__dict__["logits"] = None if logits is None else logits.copy()

    def rewind(self, position: int) -> None:
        self.runner.rewind(position)
        while sum(len(tokens) for tokens, _ in self.calls) > position:
            self.calls.pop()

    def reset(self) -> None:
        self.runner.reset()
        self.calls.clear()

    def load_state(self, state: bytes, token_ids: list[int], marks: list[bytes]) -> None:
        self.runner.load_state(state, token_ids, marks)
        self.calls[:] = self.old.calls if self.old else []

    def replay(self) -> NDArray[np.float32]:
        """The logits after the same calls, made by a runner that did nothing else."""
        fresh = self.start()
        for tokens, is_last in self.calls:
            if is_last is None:
                logits = fresh.decode(tokens[0])
            else:
                array = np.array(tokens, np.int32)
                logits = fresh.prefill(array, is_last=is_last, stays_open=True)
        return logits


class Interrupter:
    """Raises KeyboardInterrupt at the ``n_left``-th report of a prefill."""

    n_left = 0

    def __call__(self, stage: str, *_: int) -> None:
        if stage == "prefill" and self.n_left:
            self.n_left -= 1
            if not self.n_left:
                raise KeyboardInterrupt


@contextmanager
def _recorded(path: Path, batch_size: int, **options: Any) -> Iterator[tuple[LLM, Interrupter]]:
    interrupter = Interrupter()
    prefill = PrefillConfig(batch_size=batch_size, chunk_size=CHUNK)
    with LLM(path, prefill=prefill, threads=1, on_progress=interrupter, **options) as llm:
        start = llm.model.start_session

        def record(*args: Any) -> Any:
            return RecordedRunner(partial(start, *args), llm._session.runner)

        llm.model.start_session = record  # type: ignore[method-assign]
        yield llm, interrupter


def _read(llm: LLM, tokens: list[int], n_answer: int) -> int:
    """Reads a prompt and checks its logits; returns how many tokens were cached."""
    greedy = SamplingParams(temperature=0, max_tokens=n_answer, ignore_eos=True)
    result = llm.generate(tokens, greedy, keep_cache=True)
    runner: Any = llm._session.runner
    assert list(runner.token_ids)[: len(tokens)] == tokens
    if runner.logits is not None and (n_answer > 1 or result.stats.cached_tokens < len(tokens)):
        np.testing.assert_array_equal(runner.logits, runner.replay())
    return result.stats.cached_tokens


EDITS = st.lists(
    st.tuples(
        st.just(1.0) | st.floats(0, 1),  # where the prompt departs
        st.integers(0, 70),  # how many tokens follow
        st.integers(0, 3),  # tokens of the answer
        st.just(0) | st.integers(0, 12),  # the report that is interrupted, 0: none
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("batch_size", [CHUNK, 3 * CHUNK, 16 * CHUNK])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_edited_prompts(
    tiny_model: TinyModelFactory,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    batch_size: int,
) -> None:
    monkeypatch.setattr(context_size, "MIN_DEFAULT_CONTEXT", 64)
    monkeypatch.setattr(context_size, "CONTEXT_STEP", 16)

    @settings(max_examples=25, deadline=None)
    @given(edits=EDITS)
    def check(edits: list[tuple[float, int, int, int]]) -> None:
        llm.forget()
        tokens = [1 + i % 300 for i in range(60)]
        for n, (share, n_more, n_answer, n_reports) in enumerate(edits):
            more = [1 + (7 * i + n) % 300 for i in range(n_more)]
            tokens = ([*tokens[: int(share * len(tokens))], *more] or [1])[:230]
            interrupter.n_left = n_reports
            try:
                _read(llm, tokens, n_answer)
            except KeyboardInterrupt:
                continue
            interrupter.n_left = 0

    path = tiny_model(tensor_type="Q4_0")
    with _recorded(path, batch_size, attention=ATTENTIONS[attention]) as (llm, interrupter):
        check()


def _check_departures(llm: LLM) -> None:
    tokens = [1 + i % 300 for i in range(100)]
    assert _read(llm, tokens, 3) == 0
    # Marks at 16, 32, 48 and 64; the next ones are farther apart.
    assert _read(llm, [*tokens[:60], 5, 6, 7], 3) == 48
    assert _read(llm, tokens[:48], 2) == 32
    assert _read(llm, tokens[:40], 2) == 32
    assert _read(llm, tokens[:15], 2) == 0


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_prompt_that_departs_goes_back_to_the_last_mark(
    tiny_model: TinyModelFactory, attention: str
) -> None:
    path = tiny_model(tensor_type="Q4_0")
    with _recorded(path, 2 * CHUNK, attention=ATTENTIONS[attention]) as (llm, _):
        _check_departures(llm)


def test_an_onnx_model_goes_back_to_marks(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    export_model(tiny_model(), tmp_path / "onnx")
    attention = ATTENTIONS["headwise"]
    with _recorded(tmp_path / "onnx", 2 * CHUNK, attention=attention) as (llm, interrupter):
        _check_departures(llm)
        interrupter.n_left = 7
        tokens = list(range(100, 180))
        with pytest.raises(KeyboardInterrupt):
            _read(llm, tokens, 1)
        interrupter.n_left = 0
        assert _read(llm, tokens, 1) > 0


def test_a_prompt_that_is_kept_is_read_in_smaller_batches(tiny_model: TinyModelFactory) -> None:
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    tokens = [1 + i % 300 for i in range(2000)]
    for batch, keep_cache, sizes in (
        ({}, False, [2000]),
        ({}, True, [1024, 976]),
        ({"batch_size": 1536}, True, [1536, 464]),
    ):
        prefill = PrefillConfig(chunk_size=256, **batch)
        with LLM(tiny_model(), prefill=prefill, attention="dense") as llm:
            llm.model.start_session = partial(_record, llm.model.start_session)  # type: ignore[method-assign]
            result = llm.generate(tokens, one, keep_cache=keep_cache)
            runner: Any = llm._session.runner
            assert [len(call) for call, _ in runner.calls] == sizes
            assert result.stats.batch_size >= sizes[0]


def _record(start: Callable[..., Any], *args: Any) -> Any:
    return RecordedRunner(partial(start, *args), None)


def test_an_interrupted_beginning_is_saved_and_gone_on_from(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    path = tiny_model(tensor_type="Q4_0")
    tokens = [1 + i % 300 for i in range(100)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    options: dict[str, Any] = {"attention": ATTENTIONS["headwise"], "context_size": 128}
    with _recorded(path, 2 * CHUNK, **options) as (llm, interrupter):
        interrupter.n_left = 9
        with pytest.raises(KeyboardInterrupt):
            llm.generate(tokens, greedy, keep_cache=True)
        assert llm.has_open_prompt
        llm.save_session(tmp_path / "s")
    with _recorded(path, 2 * CHUNK, **options) as (llm, interrupter):
        whole = llm.generate(tokens, greedy, keep_cache=True, logprobs=True)
        llm.load_session(tmp_path / "s")
        rest = llm.generate(tokens, greedy, keep_cache=True, logprobs=True)
        assert 0 < rest.stats.cached_tokens < 100
        assert (rest.token_ids, rest.logprobs) == (whole.token_ids, whole.logprobs)
        llm.forget()
        interrupter.n_left = 2  # in the first batch
        with pytest.raises(KeyboardInterrupt):
            llm.generate(tokens, greedy, keep_cache=True)
        assert not llm.has_open_prompt
