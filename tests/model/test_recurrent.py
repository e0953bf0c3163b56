"""Models with recurrent layers, from calls of the core to the flags of the program.

test_golden.py and test_architectures.py hold what they compute against llama.cpp and the reference;
test_marks.py and test_session_state.py have them among their models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, HeadwiseConfig, PrefillConfig, SamplingParams, _core
from edgeh2o.cli.main import main
from tests.model.model_pair import CHUNK_SIZE, MAX_CONTEXT, ModelPair, load_pair, random_tokens
from tests.model.recurrent_models import MODELS
from tests.tiny_models import TinyModelFactory

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
TEXT = "the art of the thing is that it is there and was on the hen " * 12


@pytest.fixture(params=MODELS)
def options(request: pytest.FixtureRequest) -> dict[str, object]:
    return MODELS[request.param]


@pytest.fixture
def pair(tiny_model: TinyModelFactory, options: dict[str, object]) -> ModelPair:
    return load_pair(tiny_model, **options)


@pytest.fixture(scope="module")
def path(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(**MODELS["lfm2"])


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, prefill=PrefillConfig(batch_size=64, chunk_size=32), context_size=512) as llm:
        yield llm


def read(session: _core.Sequence, tokens: np.ndarray, lengths: list[int]) -> np.ndarray:
    """The last logits of a prompt in calls of these lengths."""
    logits = None
    for part in np.split(tokens, np.cumsum(lengths)[:-1]):
        is_last = session.position + len(part) == len(tokens)
        logits = session.prefill(part, is_last=is_last, stays_open=True)
    assert logits is not None
    return logits


def test_calls_of_any_length_leave_the_same_state(pair: ModelPair) -> None:
    """Bit by bit where chunks of attention begin at the same positions."""
    tokens = random_tokens(4 * CHUNK_SIZE)
    whole = pair.session(_core.dense_policy(), all_rows=False)
    expected = read(whole, tokens, [len(tokens)])
    for lengths in ([CHUNK_SIZE] * 4, [CHUNK_SIZE, 3 * CHUNK_SIZE]):
        session = pair.session(_core.dense_policy(), all_rows=False)
        np.testing.assert_array_equal(read(session, tokens, lengths), expected)
        assert session.save_state()[16:] == whole.save_state()[16:]
    for lengths in ([1, 2, len(tokens) - 3], [len(tokens) - 2, 1, 1]):
        session = pair.session(_core.dense_policy(), cache_type="f32", all_rows=False)
        exact = pair.session(_core.dense_policy(), cache_type="f32", all_rows=False)
        logits = read(session, tokens, lengths)
        np.testing.assert_allclose(logits, read(exact, tokens, [len(tokens)]), atol=2e-4)


# Attention in the last layer would round otherwise.
@pytest.mark.parametrize("name", ["lfm2moe", "qwen3next", "nemotron_h"])
def test_rows_that_nobody_reads_change_nothing(tiny_model: TinyModelFactory, name: str) -> None:
    pair = load_pair(tiny_model, **MODELS[name])
    tokens = random_tokens(3 * CHUNK_SIZE + 5)
    states = []
    for all_rows in (True, False):
        session = pair.session(_core.dense_policy(), all_rows=all_rows)
        logits = read(session, tokens, [CHUNK_SIZE, 1, len(tokens) - CHUNK_SIZE - 1])
        states.append((logits, session.save_state(), session.decode(7)))
    np.testing.assert_array_equal(states[0][0], states[1][0])
    np.testing.assert_array_equal(states[0][2], states[1][2])
    assert states[0][1] == states[1][1]


# Products of other types are the same in all models, and files of F32 take seconds to make.
@pytest.mark.parametrize(
    ("name", "tensor_type"),
    [*((name, "Q4_0") for name in MODELS), ("lfm2", "F32"), ("mamba2", "F32")],
)
def test_threads_change_nothing(tiny_model: TinyModelFactory, name: str, tensor_type: str) -> None:
    options = MODELS[name]
    pair = load_pair(tiny_model, **options, tensor_type=tensor_type, model_dim=640)
    tokens, results = random_tokens(200), []
    for threads in (1, 3):
        sizes = {"max_context": MAX_CONTEXT, "batch_size": 128, "chunk_size": CHUNK_SIZE}
        is_indexed = options["architecture"] == "qwen4exp"
        policy = _core.dense_policy() if is_indexed else _core.h2o_policy(12, 4)
        session = _core.Sequence(pair.core, policy, **sizes, threads=threads)
        results.append((read(session, tokens, [128, 72]), session.decode(5), session.save_state()))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_several_sequences_in_a_call(pair: ModelPair) -> None:
    tokens = [random_tokens(90, seed=seed) for seed in range(2)]
    sizes = {"max_context": MAX_CONTEXT, "batch_size": 128, "chunk_size": CHUNK_SIZE}
    alone = [_core.Sequence(pair.core, _core.dense_policy(), **sizes) for _ in tokens]
    for session, own in zip(alone, tokens, strict=True):
        session.prefill(own, is_last=False)
    first = _core.Sequence(pair.core, _core.dense_policy(), **sizes)
    shared = first.workspace
    both = [
        first,
        _core.Sequence(pair.core, _core.dense_policy(), **sizes, workspace=shared),
    ]
    shared.forward([(s, own, False) for s, own in zip(both, tokens, strict=True)])
    step = [(s, np.array([9 + i], np.int32), None) for i, s in enumerate(both)]
    for i, logits in enumerate(shared.forward(step)):
        assert logits is not None
        np.testing.assert_array_equal(logits, [alone[i].decode(9 + i)])


def test_the_end_of_a_prompt_can_be_gone_back_to(pair: ModelPair) -> None:
    session = pair.session(_core.dense_policy(), all_rows=False)
    tokens = random_tokens(CHUNK_SIZE + 10)
    logits = read(session, tokens, [CHUNK_SIZE, 10])
    first = session.decode(5)
    end = len(tokens)
    assert session.marks == [end]
    assert [session.find_mark(n) for n in (end - 1, end, end + 1, 10**6)] == [
        0,
        end,
        end + 1,
        end + 1,
    ]
    session.decode(6)
    assert session.find_mark(end + 1) == end  # of the answer only its end is left
    with pytest.raises(ValueError, match="cannot go back to position"):
        session.rewind(end + 1)
    session.rewind(end)
    assert session.position == end and session.prompt_logits is not None
    np.testing.assert_array_equal(session.decode(5), first)
    session.reset()
    np.testing.assert_array_equal(read(session, tokens, [CHUNK_SIZE, 10]), logits)


def test_marks_of_large_states_are_few(tiny_model: TinyModelFactory) -> None:
    large = {"delta_head_dim": 512, "n_delta_value_heads": 24, "model_dim": 64}
    pair = load_pair(tiny_model, **{**MODELS["qwen3next"], **large, "n_layers": 2})
    session = pair.session(_core.dense_policy(), all_rows=False)
    for n_tokens, marks in ((1, [0]), (3, [0, 1]), (4, [0, 1, 4]), (9, [1, 4, 8]), (1, [4, 8, 17])):
        assert session.mark()
        assert session.marks == marks
        session.prefill(random_tokens(n_tokens), is_last=False)
    assert [session.find_mark(n) for n in (7, 16, 17)] == [4, 8, 17]


def test_a_state_that_cannot_be(pair: ModelPair) -> None:
    session = pair.session(_core.dense_policy())
    session.prefill(random_tokens(20), is_last=False)
    state = session.save_state()
    for bad in (state[:-5], state[: len(state) // 2], state + b"\0"):
        with pytest.raises(ValueError, match="the saved state"):
            session.load_state(bad)
        assert session.position == 0


def test_prompts_go_on_and_depart(llm: LLM, path: Path) -> None:
    with LLM(path, prefill=llm.prefill, context_size=512) as other:
        prompt = random_tokens(254).tolist()
        first = llm.generate(prompt, GREEDY, keep_cache=True)
        longer = [*prompt, *first.token_ids, *random_tokens(9, seed=1).tolist()]
        again = llm.generate(longer, GREEDY, keep_cache=True, logprobs=True)
        assert again.stats.cached_tokens == len(prompt) + len(first.token_ids) - 1
        departing = [*prompt[:150], *random_tokens(30, seed=2).tolist()]
        result = llm.generate(departing, GREEDY, keep_cache=True, logprobs=True)
        assert result.stats.cached_tokens == 128  # the mark between two logical batches
        for ids, answer in ((longer, again), (departing, result)):
            whole = other.generate(ids, GREEDY, logprobs=True)
            assert whole.stats.cached_tokens == 0 and whole.token_ids == answer.token_ids
            # Chunks of attention begin elsewhere.
            np.testing.assert_allclose(whole.logprobs, answer.logprobs, atol=2e-3)


def test_a_session_file(llm: LLM, path: Path, tmp_path: Path) -> None:
    first = llm.generate(TEXT, GREEDY, keep_cache=True)
    llm.save_session(tmp_path / "s")
    longer = TEXT + first.text + " and more of it"
    expected = llm.generate(longer, GREEDY, keep_cache=True, logprobs=True)
    with LLM(path, prefill=llm.prefill, context_size=512) as other:
        other.load_session(tmp_path / "s")
        result = other.generate(longer, GREEDY, keep_cache=True, logprobs=True)
    assert result.logprobs == expected.logprobs
    assert result.stats.cached_tokens == expected.stats.cached_tokens > 0


def test_budgets_are_for_the_layers_that_attend(path: Path) -> None:
    with LLM(path, attention=HeadwiseConfig(budget=64, local=16), context_size=1024) as llm:
        assert llm.config.n_slots == 4  # of two layers
        stats = llm.generate(TEXT * 3, GREEDY).stats
        assert 0 < stats.pairs_computed < stats.pairs_dense
        assert stats.pairs_dense == stats.prompt_tokens * (stats.prompt_tokens + 1) // 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["calibrate", "{model}"], "calibration is for models without recurrent layers"),
        (["run", "{model}", "-p", "x", "--budget-table", "{text}"], "a budget table is for models"),
        (["run", "{model}", "-p", "x", "--max-loss", "1"], "which is for models without recurrent"),
        (["heatmap", "{model}", "-f", "{text}", "--ctx", "1500"], "a heatmap needs layers of"),
        (["export-onnx", "{model}", "{folder}"], "recurrent layers cannot be written"),
        (["bench", "{model}", "-p", "64", "-n", "4", "-r", "1"], ""),
        (["perplexity", "{model}", "-f", "{text}", "--ctx", "512"], ""),
    ],
)
def test_verbs_run_or_refuse(
    path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT * 8)
    places = {"model": path, "text": text, "folder": tmp_path / "folder"}
    code = main([argument.format(**places) for argument in arguments])
    err = capsys.readouterr().err
    assert (code == 0) == (not problem), err
    assert problem in err and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "{model}", "-f", "{text}", "-n", "4"],
        ["run", "{model}", "-f", "{text}", "-n", "4", "--attention", "h2o"],
        ["bench", "{model}", "-p", "64", "-n", "4", "-r", "1"],
        ["perplexity", "{model}", "-f", "{text}", "--ctx", "512"],
        ["inspect", "{model}"],
    ],
)
def test_a_model_without_attention(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT * 8)
    places = {"model": tiny_model(**MODELS["mamba"]), "text": text}
    assert main([argument.format(**places) for argument in arguments]) == 0, capsys.readouterr().err


def test_inspect_shows_the_state(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--json", "-c", "256"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory_bytes"]
    assert memory["recurrent_state"] == 2 * 3 * 256 * 4  # layers, taps before a token, channels
    assert memory["kv_cache"] > 0
