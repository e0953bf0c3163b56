"""What reads the model's hidden rows or its cache drafts (``--draft FILE``): texts are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o.config import PrefillConfig
from edgeh2o.engine.cache_draft import CacheDraft, CacheDrafter
from edgeh2o.engine.own_draft import BlockDrafter, OwnDraft, OwnDrafter
from edgeh2o.engine.writing_drafter import WritingDrafter
from edgeh2o.errors import FormatError, ResourceError, UsageError
from edgeh2o.formats.split import open_model_file
from edgeh2o.llm import LLM
from edgeh2o.model_config import DecoderConfig
from edgeh2o.models.drafters import read_drafter
from edgeh2o.sampling_config import SamplingParams
from tests.drafter_cases import (
    CASES,
    FILE,
    GEMMA4,
    LLAMA,
    N_DRAFTED,
    N_TOKENS,
    N_WEIGHED,
    PROMPT,
)
from tests.engine.drafted import (
    PENALISED,
    SAMPLINGS,
    check_session_file,
    check_shift,
    check_turns,
    compare_drafted,
)
from tests.engine.right_drafters import WRITERS
from tests.joined_cases import for_each
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.drafters import Tensors, write_assistant, write_dflash, write_eagle3
from tools.tiny_models.model import TinyModel

PREFILL = PrefillConfig(batch_size=64, chunk_size=16)
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "lookup": "off"}


def _open(paths: tuple[Path, Path], **options: Any) -> LLM:
    settings = {"draft": paths[1], "prefill": PREFILL, "attention": "dense", **options}
    return LLM(paths[0], **settings)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(5).integers(3, 312, 150).tolist()


@pytest.fixture(scope="module", params=["assistant_own_keys", "eagle3", "dflash"])
def wrong_paths(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Of random weights."""
    return CASES[request.param].write_both(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def wrong(wrong_paths: tuple[Path, Path]) -> Iterator[LLM]:
    """One whose guesses are wrong."""
    with _open(wrong_paths) as llm:
        yield llm


@pytest.fixture(scope="module", params=list(WRITERS))
def right_paths(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def right(right_paths: tuple[Path, Path]) -> Iterator[LLM]:
    """One whose guesses are the model's tokens."""
    with _open(right_paths) as llm:
        yield llm


def _record_guesses(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, np.ndarray]]]:
    """By draft, the token before each of its tokens (-1: none), and what that is drawn from."""
    drafts: list[list[tuple[int, np.ndarray]]] = []
    write = WritingDrafter._write

    def written(self: Any, logits: np.ndarray, most: int) -> list[int]:
        drafts.append([(-1, logits.copy())])
        self.is_recorded = True
        try:
            return write(self, logits, most)
        finally:
            self.is_recorded = False

    monkeypatch.setattr(WritingDrafter, "_write", written)
    for owner in (CacheDrafter, OwnDrafter, BlockDrafter):
        step = owner._step

        def stepped(self: Any, token: int, step: Any = step) -> np.ndarray:
            logits: np.ndarray = step(self, token)
            if getattr(self, "is_recorded", False):
                drafts[-1].append((token, logits.copy()))
            return logits

        monkeypatch.setattr(owner, "_step", stepped)
    return drafts


# The others have the same kinds of layers: tests/model/test_drafters.py compares them too.
@pytest.mark.parametrize(
    "case", ["assistant_own_keys", "eagle3", "eagle3_normed", "dflash_windows"]
)
def test_guesses_are_those_of_llama_cpp(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = json.loads(FILE.read_text())[case]
    drafts = _record_guesses(monkeypatch)
    paths = CASES[case].write_both(tmp_path)
    options = {"cache_type": "f32", "attention_precision": "f32"}
    with _open(paths, **options) as llm:
        sampling = SamplingParams(**GREEDY, max_tokens=N_TOKENS, draft_tokens=N_DRAFTED)
        assert list(llm.generate(PROMPT, sampling).token_ids) == golden["tokens"]
    # llama.cpp looks GELU up in half precision.
    tolerance, n_compared = 6e-3 if case.startswith("assistant") else 2e-3, 0
    for ours, theirs in zip(drafts, golden["drafts"], strict=True):
        if len(ours) < N_DRAFTED:  # at the end of the answer: guesses of a block depend on its size
            break
        latest = -1
        for (token, logits), candidates in zip(ours, theirs, strict=True):
            if token != latest:  # one that ends the text, which is not drawn here
                break
            best = np.sort(logits.astype(np.float64))[::-1][:N_WEIGHED]
            ids, expected = zip(*candidates, strict=True)
            found = np.exp(logits[list(ids)] - best[0]) / np.exp(best - best[0]).sum()
            np.testing.assert_allclose(found, expected, atol=tolerance)
            latest = ids[0]
            n_compared += 1
    assert n_compared > 2 * N_TOKENS - 6


@for_each("options, draft_tokens", zip(SAMPLINGS + PENALISED, cycle(("auto", "1", "15"))))
def test_wrong_guesses_change_nothing(
    wrong: LLM, prompt: list[int], options: dict[str, Any], draft_tokens: str
) -> None:
    sampling = SamplingParams(
        **options, seed=1, max_tokens=20, ignore_eos=True, draft_tokens=draft_tokens
    )
    stats = compare_drafted(wrong, prompt, sampling)
    assert stats.drafted_tokens > 5 or draft_tokens == "auto"


def test_prompts_are_read_as_they_are(wrong_paths: tuple[Path, Path], prompt: list[int]) -> None:
    """Sparsely too, by any number of threads, beside a cache in 8 bits, also of one token."""
    options = {"attention": "headwise", "cache_type": "q8_0"}
    drafted = []
    for threads in (1, 2):
        with _open(wrong_paths, threads=threads, **options) as llm:
            for text in (prompt[:100], prompt[:1]):
                sampling = SamplingParams(**GREEDY, max_tokens=12, draft_tokens="4")
                stats = compare_drafted(llm, text, sampling)
                drafted.append((stats.drafted_tokens, stats.accepted_tokens))
    assert drafted[:2] == drafted[2:] and drafted[0][0] > 10


@pytest.mark.parametrize("draft_tokens", ["1", "5", "15"])
def test_right_guesses_spare_calls(
    right: LLM, right_paths: tuple[Path, Path], prompt: list[int], draft_tokens: str
) -> None:
    sampling = SamplingParams(**GREEDY, max_tokens=49, draft_tokens=draft_tokens)
    start = [*prompt[:-1], 5]
    stats = compare_drafted(right, start, sampling)
    assert right.generate(start, sampling).token_ids[:4] == (6, 7, 8, 9)
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    most = 1 if right_paths[0].parent.name.startswith("dflash") else int(draft_tokens)
    assert stats.decode_calls == -(-48 // (1 + most))
    assert stats.draft_model == str(right_paths[1])
    assert stats.memory_bytes["draft_weights"] > 0 and stats.memory_bytes["draft_session"] > 0


def test_turns_go_back_and_begin_again(right: LLM, prompt: list[int]) -> None:
    assert len(list(check_turns(right, prompt))) == 4


def test_a_session_file_holds_no_draft(right: LLM, prompt: list[int], tmp_path: Path) -> None:
    check_session_file(right, prompt, tmp_path)


def test_a_context_shifts(right_paths: tuple[Path, Path], prompt: list[int]) -> None:
    with _open(right_paths, context_size=200) as small:
        check_shift(small, prompt)


def test_an_interrupt_leaves_a_whole_model(
    right: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(**GREEDY, max_tokens=30, draft_tokens="3")
    expected = right.generate(prompt, sampling).token_ids
    right.forget()
    n_calls = 0
    write = WritingDrafter._write

    def interrupted(self: WritingDrafter, *args: Any) -> list[int]:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            raise KeyboardInterrupt
        return write(self, *args)

    monkeypatch.setattr(WritingDrafter, "_write", interrupted)
    stream = right.stream(prompt, sampling, keep_cache=True)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    monkeypatch.undo()
    said = stream.result().token_ids
    again = right.generate([*prompt, *said], sampling, keep_cache=True)
    rest = expected[len(said) :]
    assert said == expected[: len(said)] and again.token_ids[: len(rest)] == rest
    assert again.stats.accepted_tokens == again.stats.drafted_tokens > 0


def test_the_last_row_of_a_prompt_is_kept_alone(wrong: LLM, prompt: list[int]) -> None:
    """An assistant reads no other: the last layers are computed for none besides."""
    wrong.generate(prompt, SamplingParams(**GREEDY, max_tokens=2, draft_tokens="4"))
    draft, runner = wrong._session.draft, wrong._session.cache.runner
    assert isinstance(draft, CacheDraft | OwnDraft)
    assert runner.keeps_last_hidden is isinstance(draft, CacheDraft)
    assert bool(runner.hidden_layers) is isinstance(draft, OwnDraft)
    # Who drafts nothing keeps nothing.
    wrong.generate(prompt, SamplingParams(**GREEDY, max_tokens=2, draft_tokens="off"))
    assert not wrong._session.cache.runner.keeps_hidden


def test_memory_is_counted(
    wrong: LLM,
    wrong_paths: tuple[Path, Path],
    prompt: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = wrong.generate(prompt, SamplingParams(max_tokens=2, seed=0)).stats
    sizes = dict(stats.memory_bytes)
    monkeypatch.setattr(
        "edgeh2o.host.memory.available_bytes",
        lambda: 64 * 2**20 + sum(sizes.values()) - sizes["draft_session"] // 2,
    )
    with pytest.raises(ResourceError, match=r"draft session [\d.]+ [KM]iB"):
        _open(wrong_paths, context_size=stats.context_size)


_KINDS = {
    "assistant": (GEMMA4, write_assistant),
    "eagle3": (LLAMA, write_eagle3),
    "dflash": (LLAMA, write_dflash),
}
# What drafts for a model by these options is refused by the one without them.
_OTHERS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("assistant", {"model_dim": 96}, {}, "rows have a width of 96, the model has 128"),
    ("assistant", {"vocab_size": 328}, {}, "so many tokens: 328, the model has 320"),
    ("assistant", {"n_kv_heads": 1}, {}, "KV heads in layer 0 are 1, the model has 2"),
    ("assistant", {"head_dim_sliding": 24}, {}, "head size in layer 0 is 24, the model has 32"),
    ("assistant", {"sliding_window": 32}, {}, "window in layer 0 is 32, the model has 24"),
    ("eagle3", {"model_dim": 96}, {}, "rows have a width of 96, the model has 128"),
    ("eagle3", {"vocab_size": 328}, {}, "so many tokens: 328, the model has 320"),
    ("eagle3", {}, {"layers": (1, 2, 4)}, "comes before layer 4, the model has 4 layers"),
    ("eagle3", {}, {"model_dim": 64}, "width is 64, the model has 128"),
    ("dflash", {"model_dim": 96}, {}, "rows have a width of 96, the model has 128"),
    ("dflash", {}, {"layers": (1, 9)}, "comes before layer 9, the model has 4 layers"),
]


@for_each("kind,others,options,match", _OTHERS)
def test_what_drafts_for_another_model_is_refused(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    kind: str,
    others: dict[str, Any],
    options: dict[str, Any],
    match: str,
) -> None:
    model, write = _KINDS[kind]
    path = write(tmp_path / "other.gguf", TinyModel(**{**model, **others}), **options)
    with pytest.raises(UsageError, match=rf"{match}; name the one that was made for") as error:
        _open((tiny_model(**model), path))
    assert str(error.value).startswith(f"{path} drafts for another model (--draft): it")


def test_a_model_without_such_layers_is_another(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    path = write_assistant(tmp_path / "assistant.gguf", TinyModel(**GEMMA4))
    with pytest.raises(UsageError, match="reads a layer with a window, of which the model has non"):
        _open((tiny_model(**LLAMA), path))


def _lose(*names: str) -> Any:
    def lose(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return lose


_BAD: list[tuple[str, dict[str, Any], str]] = [
    ("assistant", {"edit": _lose("nextn.pre_projection.weight")}, "nextn.pre_projection.weight"),
    ("assistant", {"embedding_length_out": 0}, "gemma4-assistant.embedding_length_out"),
    ("eagle3", {"edit": _lose("fc.weight")}, "fc.weight"),
    ("eagle3", {"block_count": 2}, "eagle3.block_count"),
    ("eagle3", {"guessed": [5, 5]}, "'d2t' must name different tokens"),
    ("eagle3", {"guessed": [5, 320]}, "'d2t' must name different tokens of 0 to 319"),
    ("eagle3", {"guessed": [-1, 3]}, "'d2t' must name different tokens"),
    ("eagle3", {"guessed": [4, 5], "has_output": False}, "'output.weight' is missing"),
    ("eagle3", {"layers": (2, 1, 3)}, r"layers in their order, got \(2, 1, 3\)"),
    ("eagle3", {"logit_scale": 2}, "eagle3.logit_scale"),
    ("dflash", {"block_size": 1}, "dflash.block_size"),
    ("dflash", {"mask_token": 320}, "tokenizer.ggml.mask_token_id"),
    ("dflash", {"selector_rank": 4}, "dflash.selector_rank' is of a kind of DFlash"),
    ("dflash", {"edit": _lose("blk.1.attn_v.weight")}, "blk.1.attn_v.weight"),
    ("dflash", {"guessed": [5, 5]}, "'d2t' must name different tokens"),
]


@for_each("kind,options,match", _BAD)
def test_files_that_are_damaged_are_refused(
    tiny_model: TinyModelFactory, tmp_path: Path, kind: str, options: dict[str, Any], match: str
) -> None:
    model, write = _KINDS[kind]
    path = write(tmp_path / "bad.gguf", TinyModel(**model), **options)
    with pytest.raises(FormatError, match=match) as error:
        _open((tiny_model(**model), path))
    assert str(error.value).startswith(f"{path}: ")


def test_it_is_no_model_of_its_own(wrong_paths: tuple[Path, Path]) -> None:
    with pytest.raises(FormatError, match="drafts for one other model, which is run with --draft"):
        LLM(wrong_paths[1])


def test_models_with_several_streams_are_refused(
    wrong: LLM, wrong_paths: tuple[Path, Path]
) -> None:
    config = wrong.config
    assert isinstance(config, DecoderConfig)
    with (
        closing(open_model_file(wrong_paths[1])) as gguf,
        pytest.raises(UsageError, match=r"several residual streams.*; leave --draft out"),
    ):
        read_drafter(gguf, replace(config, has_streams=True))


def test_a_sampled_text_is_the_same_beside_lookup(wrong: LLM, prompt: list[int]) -> None:
    text = [*prompt, *prompt[:40]]
    sampling = SamplingParams(temperature=0.8, seed=4, max_tokens=60, ignore_eos=True)
    compare_drafted(wrong, text, replace(sampling, lookup="3", draft_tokens="4"))
