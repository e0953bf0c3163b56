"""Sessions on the host device: contexts, caches, saved prompts, refusals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, SamplingParams, UsageError
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.attention.quest import QuestConfig
from edgeh2o.attention.rocketkv import RocketKvConfig
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model
from edgeh2o.runners.base import RunnerState
from tests.cuda.host_library import SMALL
from tests.cuda.models.greedy import LOGIT_TOLERANCE, SHAPE, greedy
from tests.model.model_pair import (
    random_tokens,
    relative_error,
)
from tests.tiny_models import TinyModelFactory

pytestmark = pytest.mark.usefixtures("host_device")


def test_a_long_context_in_several_ranges(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**SMALL)
    # The first has one range of 128 keys, and from its fifth token on two.
    for cache_type, n_tokens, n_decoded in (("f16", 124, 8), ("f32", 20, 4), ("f32/f16", 20, 4)):
        prompt = random_tokens(n_tokens)
        expected, tokens = greedy(path, prompt, n_decoded, device=False, cache_type=cache_type)
        logits, same = greedy(path, prompt, n_decoded, device=True, cache_type=cache_type)
        assert same == tokens
        assert relative_error(logits, expected) < LOGIT_TOLERANCE


@pytest.mark.parametrize("cache_type", ["q8_0", "q8_0/f16"])
def test_caches_in_8_bits(tiny_model: TinyModelFactory, cache_type: str) -> None:
    """Of prompts and tokens; a saved prompt goes on, on either device."""
    path, prompt = tiny_model(**{**SMALL, "head_dim": 32}), random_tokens(40)
    runners = []
    for device in (None, open_device(0)):
        with open_model(path, device) as file:
            model = file.load()
        sizes = replace(SHAPE, cache_type=cache_type)
        runners.append([model.start_session(DenseConfig(), sizes) for _ in range(2)])
    logits = []
    for runner, _ in runners:
        first = np.array(runner.prefill(prompt, is_last=True))
        logits.append(np.stack([first, *(np.array(runner.decode(token)) for token in (7, 8))]))
    # A value at the middle between two steps may be rounded either way.
    assert relative_error(logits[1], logits[0]) < 2e-3
    for (saved, _), (_, restored) in (runners, runners[::-1]):
        RunnerState.of(saved).restore(restored)
        for rows, copy in zip(saved.cached_rows(), restored.cached_rows(), strict=True):
            copy[:] = rows
        answers = [np.array(each.decode(9)) for each in (saved, restored)]
        assert relative_error(answers[1], answers[0]) < 2e-3


def test_logits_of_every_row(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**SMALL)
    tokens = random_tokens(40)
    rows = []
    for device in (None, open_device(0)):
        with open_model(path, device) as file:
            runner = file.load().start_session(DenseConfig(), SHAPE)
        runner.prefill(tokens, is_last=True)
        rows.append(np.array(runner.row_logits(3, 37)))
        assert runner.pairs_computed == 40 * 41 // 2
    assert relative_error(rows[1], rows[0]) < LOGIT_TOLERANCE


def test_two_models_share_a_device(tiny_model: TinyModelFactory) -> None:
    """Each has a stream of its own; threads of both call at once."""
    path, prompt = tiny_model(**SMALL), random_tokens(20)
    _, expected = greedy(path, prompt, 3, device=False)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(greedy, path, prompt, 3, device=True) for _ in range(2)]
        assert [run.result(timeout=120)[1] for run in runs] == [expected] * 2


def test_a_prompt_moves_to_another_session(tiny_model: TinyModelFactory) -> None:
    """Rows go to the host and back, as saved sessions and longer contexts need it."""
    path = tiny_model(**SMALL)
    tokens = random_tokens(40)
    with open_model(path, open_device(0)) as file:
        model = file.load()
    first, second = (model.start_session(DenseConfig(), SHAPE) for _ in range(2))
    first.prefill(tokens, is_last=True, stays_open=True)
    expected = np.array(first.decode(7))
    first.rewind(40)
    RunnerState.of(first).restore(second)
    for rows, copy in zip(first.cached_rows(), second.cached_rows(), strict=True):
        copy[:] = rows
    np.testing.assert_array_equal(second.decode(7), expected)
    first.rewind(first.find_mark(40))
    np.testing.assert_array_equal(first.decode(7), expected)


def test_llm_answers_as_the_cpu_does(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**SMALL, tensor_type="Q8_0")
    answers = []
    for device in ("cpu", "cuda"):
        with LLM(path, device=device, attention="dense", context_size=128) as llm:
            result = llm.generate(
                "the cat was on the", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            )
            answers.append(result.text)
            assert result.stats.device.startswith("cpu" if device == "cpu" else "cuda:0 (")
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "rule",
    [QuestConfig(), RocketKvConfig(), HeadwiseConfig(budget=256, decode_attention="headwise")],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:a context of")
def test_generated_tokens_that_read_a_part_are_refused(
    tiny_model: TinyModelFactory, rule: SparseAttentionConfig
) -> None:
    with pytest.raises(UsageError, match=r"generated tokens read a part.*use --device cpu"):
        LLM(tiny_model(**SMALL), device="cuda", attention=rule, context_size=4096)


def test_h2o_goes_on_from_a_saved_session(tiny_model: TinyModelFactory) -> None:
    with open_model(tiny_model(**SMALL), open_device(0)) as file:
        model = file.load()
    tokens = random_tokens(180)
    shape = replace(SHAPE, batch_size=64)
    config = H2OConfig(local=12, heavy=4)
    sessions = [model.start_session(config, shape) for _ in range(2)]
    first, second = sessions
    for begin in (0, 64):
        first.prefill(tokens[begin : begin + 64], is_last=False)
    RunnerState.of(first).restore(second)
    for rows, copy in zip(first.cached_rows(), second.cached_rows(), strict=True):
        copy[:] = rows
    answers = [np.array(each.prefill(tokens[128:], is_last=True)) for each in sessions]
    np.testing.assert_array_equal(answers[1], answers[0])


@pytest.mark.parametrize(("writer", "reader"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_sessions_move_between_cpu_and_gpu(
    tiny_model: TinyModelFactory, tmp_path: Path, writer: str, reader: str
) -> None:
    """Although prompts are read in other chunks there: a session goes on in those of its file."""
    path = tiny_model(**SMALL, context_length=1024)
    tokens = random_tokens(600)
    one = SamplingParams(temperature=0, max_tokens=1)
    chunks = {"cpu": 256, "cuda": 1024}
    attention = HeadwiseConfig(budget=64)
    with LLM(path, attention=attention, device=writer) as llm:
        stats = llm.generate(tokens, one, keep_cache=True).stats
        assert stats.chunk_size == chunks[writer]
        llm.save_session(tmp_path / "session")
    with LLM(path, attention=attention, device=reader) as llm:
        llm.load_session(tmp_path / "session")
        stats = llm.generate(np.append(tokens, tokens[:9]), one, keep_cache=True).stats
        assert (stats.chunk_size, stats.cached_tokens) == (chunks[writer], 600)
        assert llm.generate(tokens[:9], one).stats.chunk_size == chunks[reader]
