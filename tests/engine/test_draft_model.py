"""Draft models: their texts are those without, they follow the text, and what is refused."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeh2o.config import PrefillConfig, RuntimeConfig
from edgeh2o.engine.draft_model import check_draft, check_kind
from edgeh2o.engine.grammar import Grammar
from edgeh2o.engine.model_drafter import ModelDrafter
from edgeh2o.errors import ResourceError, UsageError
from edgeh2o.formats import gguf
from edgeh2o.formats.gguf_header import GgufHeader
from edgeh2o.llm import LLM
from edgeh2o.sampling_config import SamplingParams
from tests.engine.drafted import (
    PENALISED,
    SAMPLINGS,
    check_session_file,
    check_shift,
    check_turns,
    compare_drafted,
    without_drafts,
)
from tests.engine.fakes import CONFIG
from tests.tiny_models import TinyModelFactory

VOCAB_SIZE = 320
PREFILL = PrefillConfig(batch_size=64, chunk_size=16)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(tensor_type="F32", n_layers=2)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(5).integers(3, VOCAB_SIZE - 8, 150).tolist()


def _open(model: Path, draft: Path, **options: Any) -> LLM:
    return LLM(model, draft=draft, prefill=PREFILL, attention="dense", **options)


@pytest.fixture(scope="module")
def same(model: Path) -> Iterator[LLM]:
    """A model that drafts for itself, and as exactly whether rows are read or generated."""
    with _open(model, model, attention_precision="f32") as llm:
        yield llm


@pytest.fixture(scope="module")
def other(model: Path, tiny_model: TinyModelFactory) -> Iterator[LLM]:
    """A draft model of other random weights, which knows nothing, with a smaller padding."""
    draft = tiny_model(
        tensor_type="Q4_0", n_layers=1, seed=7, tied=False, vocab_size=VOCAB_SIZE - 8
    )
    with _open(model, draft) as llm:
        yield llm


@pytest.mark.parametrize("options", SAMPLINGS + PENALISED)
@pytest.mark.parametrize("draft_tokens", ["auto", "1", "5", "15"])
def test_a_model_drafts_for_itself(
    same: LLM, prompt: list[int], draft_tokens: str, options: dict[str, Any]
) -> None:
    """Every token that it drafts is the one that is drawn: from the same random numbers."""
    n_drafted = n_accepted = 0
    for seed in range(3):
        sampling = SamplingParams(
            **options, seed=seed, max_tokens=49, ignore_eos=True, draft_tokens=draft_tokens
        )
        stats = compare_drafted(same, prompt, sampling)
        n_drafted += stats.drafted_tokens
        n_accepted += stats.accepted_tokens
        if draft_tokens != "auto":
            assert stats.decode_calls == -(-48 // (1 + int(draft_tokens)))
    if draft_tokens != "auto":
        assert n_accepted == n_drafted > 0


FORMS = [
    Grammar("lark", "start: /[a-e]{30}/ /[f-k]{30,40}/"),
    Grammar.of_schema({"type": "array", "items": {"enum": ["a", "tin", 12]}, "minItems": 8}),
]


@pytest.mark.parametrize("options", SAMPLINGS + PENALISED)
@pytest.mark.parametrize("form", FORMS, ids=["lark", "schema"])
def test_a_draft_has_the_form_of_the_answer(
    same: LLM, prompt: list[int], form: Grammar, options: dict[str, Any]
) -> None:
    pytest.importorskip("llguidance")
    for seed in range(3):
        sampling = SamplingParams(
            **options, seed=seed, max_tokens=40, schema=form, draft_tokens="5"
        )
        stats = compare_drafted(same, prompt, sampling)
        assert stats.drafted_tokens > 10
        # What is drafted behind the end is not looked at.
        assert stats.accepted_tokens >= stats.drafted_tokens - 5


@pytest.mark.parametrize("options", SAMPLINGS + PENALISED)
@pytest.mark.parametrize("draft_tokens", ["auto", "1", "15"])
def test_a_draft_model_that_is_wrong_changes_nothing(
    other: LLM, prompt: list[int], draft_tokens: str, options: dict[str, Any]
) -> None:
    n_drafted = n_accepted = 0
    for seed in range(3):
        sampling = SamplingParams(
            **options, seed=seed, max_tokens=40, ignore_eos=seed > 0, draft_tokens=draft_tokens
        )
        stats = compare_drafted(other, prompt, sampling)
        n_drafted += stats.drafted_tokens
        n_accepted += stats.accepted_tokens
    if draft_tokens != "auto":
        assert n_accepted < 0.05 * n_drafted
    unknown = [*prompt, VOCAB_SIZE - 1]  # to the draft model
    assert compare_drafted(other, unknown, sampling).drafted_tokens == 0


def test_answers_end_where_they_would(same: LLM, prompt: list[int]) -> None:
    """By a stop text inside of a draft, the number of tokens, the context."""
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, draft_tokens="7")
    whole = same.generate(prompt, greedy)
    stops = [(whole.text[i : i + 2],) for i in range(5, 50, 7)]
    variants = [replace(greedy, stop=stop) for stop in stops if stop[0]]
    variants += [replace(greedy, max_tokens=n) for n in range(9)]
    for sampling in variants:
        found, plain = (
            same.generate(prompt, sampling),
            same.generate(prompt, without_drafts(sampling)),
        )
        assert (found.text, found.token_ids) == (plain.text, plain.token_ids)
        assert found.finish_reason == plain.finish_reason
    with _open(same.model_path, same.model_path, context_size=len(prompt) + 41) as small:
        stats = compare_drafted(small, prompt, replace(greedy, max_tokens=-1))
        assert (stats.generated_tokens, stats.accepted_tokens) == (42, stats.drafted_tokens)


def test_the_draft_follows_turns_and_goes_back(same: LLM, prompt: list[int]) -> None:
    for turn in check_turns(same, prompt):
        runner = same._session._draft.runner  # type: ignore[union-attr]
        assert list(runner.token_ids)[: len(turn)] == turn


def test_a_session_file_holds_no_draft(same: LLM, prompt: list[int], tmp_path: Path) -> None:
    check_session_file(same, prompt, tmp_path)


def test_a_shifted_context_is_read_again(same: LLM, prompt: list[int]) -> None:
    with _open(same.model_path, same.model_path, context_size=200) as small:
        check_shift(small, prompt)
        evicts = SamplingParams(
            temperature=0,
            max_tokens=150,
            ignore_eos=True,
            draft_tokens="off",
            lookup="off",
            context_full="evict",
        )
        assert small.generate(prompt, evicts).stats.evicted_tokens > 0


def test_the_text_comes_before_the_model(same: LLM, prompt: list[int]) -> None:
    """What lookup finds is not asked of the draft model."""
    twice = prompt[:90] * 2 + prompt[40:60]
    sampling = SamplingParams(
        temperature=0, max_tokens=60, ignore_eos=True, lookup="5", draft_tokens="5"
    )
    stats = compare_drafted(same, twice, sampling)
    assert 0 < stats.model_drafted_tokens < stats.drafted_tokens
    assert stats.model_accepted_tokens == stats.model_drafted_tokens
    assert "looked up accepted" in stats.format_table()
    assert f"{stats.model_drafted_tokens:,} of the draft model" in stats.format_table()
    alone = compare_drafted(same, twice, replace(sampling, lookup="off"))
    assert alone.model_drafted_tokens == alone.drafted_tokens


def test_a_draft_model_of_shorter_texts_drafts_as_far_as_it_can(
    model: Path, prompt: list[int], tiny_model: TinyModelFactory
) -> None:
    draft = tiny_model(tensor_type="F32", n_layers=2, context_length=len(prompt) + 20)
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, draft_tokens="4")
    with _open(model, draft) as llm:
        stats = compare_drafted(llm, prompt, sampling)
        assert stats.accepted_tokens == stats.drafted_tokens
        assert 12 <= stats.drafted_tokens <= 20


def test_memory_is_counted(same: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stats = same.generate(prompt, SamplingParams(max_tokens=2, seed=0)).stats
    sizes = dict(stats.memory_bytes)
    assert stats.draft_model == str(same.model_path)
    assert sizes.pop("draft_weights") == sizes.pop("weights") == same.weight_bytes
    drafting = same.weight_bytes + sizes.pop("draft_session")
    session = sum(sizes.values())
    assert drafting > same.weight_bytes
    # What is available here does not shrink by the draft model's weights.
    for n_bytes, match in (
        (drafting // 2, r"the draft model .*\.gguf: a context of"),
        (drafting + session // 2, r"draft session [\d.]+ [KM]iB"),
        (drafting + 2 * session, None),
    ):
        monkeypatch.setattr("edgeh2o.host.memory.available_bytes", lambda n=n_bytes: 64 * 2**20 + n)
        with nullcontext() if match is None else pytest.raises(ResourceError, match=match):
            _open(same.model_path, same.model_path, context_size=stats.context_size)


def test_an_interrupt_leaves_whole_sequences(
    same: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one while the draft model reads the prompt."""
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, draft_tokens="3")
    expected = same.generate(prompt, without_drafts(sampling)).token_ids
    for method in ("_read", "_write"):
        same.forget()
        same._session._draft.runner.reset()  # type: ignore[union-attr]
        n_calls = 0
        real = getattr(ModelDrafter, method)

        def interrupted(self: ModelDrafter, *args: Any, real: Any = real) -> Any:
            nonlocal n_calls
            result = real(self, *args)
            n_calls += 1
            if n_calls == 3:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(ModelDrafter, method, interrupted)
        stream = same.stream(prompt, sampling, keep_cache=True)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        monkeypatch.undo()
        said = stream.result().token_ids
        assert expected[: len(said)] == said
        again = same.generate([*prompt, *said], sampling, keep_cache=True)
        assert again.stats.cached_tokens >= len(prompt)
        rest = expected[len(said) :]
        assert again.token_ids[: len(rest)] == rest
        assert again.stats.accepted_tokens == again.stats.drafted_tokens


@pytest.mark.parametrize("place", [20, 60, 85])
def test_a_token_that_the_draft_model_lacks_is_not_followed(
    model: Path, tiny_model: TinyModelFactory, place: int
) -> None:
    """Nor is one that left the cache in a shift while the repeat penalty still looks at it."""
    draft = tiny_model(
        tensor_type="Q4_0", n_layers=1, seed=7, tied=False, vocab_size=VOCAB_SIZE - 8
    )
    prompt = [5] * 90
    prompt[place] = VOCAB_SIZE - 2
    sampling = SamplingParams(
        max_tokens=150,
        temperature=0,
        ignore_eos=True,
        repeat_penalty=1.3,
        repeat_last_n=-1,
        context_full="shift",
        draft_tokens="3",
    )
    with _open(model, draft, context_size=96) as llm:
        result = llm.generate(prompt, sampling)
        assert result.stats.context_shifts > 1
        assert result.token_ids == llm.generate(prompt, without_drafts(sampling)).token_ids


def test_other_vocabularies_are_refused(model: Path, tiny_model: TinyModelFactory) -> None:
    larger = tiny_model(tensor_type="F32", n_layers=1, vocab_size=VOCAB_SIZE + 200)
    with pytest.raises(
        UsageError, match=r"has another vocabulary: it has 520 tokens and the model 320; use a"
    ):
        _open(model, larger)

    def tokenizer(tokens: str, *eog: int) -> Any:
        return SimpleNamespace(
            vocabulary=SimpleNamespace(tokens=tuple(tokens)), eog_ids=frozenset(eog)
        )

    ours, path = tokenizer("abcd", 1), Path("draft.gguf")
    check_draft(ours, tokenizer("abcd", 1), path)
    check_draft(ours, tokenizer("abcde", 1), path)
    check_draft(tokenizer("abcd" + 128 * "x", 1), ours, path)
    with pytest.raises(
        UsageError, match=r"draft.gguf has another vocabulary: token 2 is 'x' there"
    ):
        check_draft(ours, tokenizer("abxd", 1), path)
    with pytest.raises(UsageError, match=r"answers end with the tokens \[1, 2\], the model's with"):
        check_draft(ours, tokenizer("abcd", 1, 2), path)


def test_the_header_of_a_draft_model_is_read_once(
    model: Path, tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, draft = gguf._read_header, tiny_model(tensor_type="F32", n_layers=1)
    paths: list[Path] = []

    def noted(path: Path, descriptor: int) -> GgufHeader:
        paths.append(path)
        return read(path, descriptor)

    monkeypatch.setattr(gguf, "_read_header", noted)
    with _open(model, draft):
        assert sorted(paths) == sorted([model, draft])


def test_a_refused_draft_model_is_closed(model: Path, tiny_model: TinyModelFactory) -> None:
    """Each of its files, however far it came."""
    larger = tiny_model(tensor_type="F32", n_layers=1, vocab_size=VOCAB_SIZE + 200)
    for refused in (larger, tiny_model(architecture="lfm2")):
        n_open = len(os.listdir("/dev/fd"))
        with pytest.raises(UsageError):
            _open(model, refused)
        gc.collect()
        assert len(os.listdir("/dev/fd")) == n_open


def test_models_that_cannot_take_tokens_back_are_refused(
    model: Path, tiny_model: TinyModelFactory
) -> None:
    recurrent = tiny_model(architecture="lfm2")
    with pytest.raises(UsageError, match=r"the draft model .* cannot be used .*recurrent layers"):
        _open(model, recurrent)
    with pytest.raises(UsageError, match="it is an ONNX model"):
        check_kind(CONFIG, "cpu", "the model", is_draft=False)
    with pytest.raises(UsageError, match="on a GPU they take one token a call"):
        check_kind(CONFIG, "cuda:0", "the model", is_draft=True)
    with pytest.raises(UsageError, match=r"draft \(--draft\) must name a model"):
        RuntimeConfig(draft="")


@pytest.mark.parametrize("draft_tokens", [0, 16, -1, "on", "", None, True])
def test_settings_that_cannot_be(draft_tokens: Any) -> None:
    match = r"draft_tokens \(--draft-tokens\) must be auto, off or a number of"
    with pytest.raises(UsageError, match=match):
        SamplingParams(draft_tokens=draft_tokens)
