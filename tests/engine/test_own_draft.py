"""A layer of the model's own file drafts (``--draft mtp``): the text is that without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.config import PrefillConfig
from edgeh2o.engine.grammar import Grammar
from edgeh2o.engine.own_draft import MOST_PENDING, OwnDraft, OwnDrafter
from edgeh2o.engine.paired_text import PairedText
from edgeh2o.errors import FormatError, ResourceError, UsageError
from edgeh2o.llm import LLM
from edgeh2o.models import drafting
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
from tests.engine.right_layer import DRAFTING_OPTIONS, N_LAYERS, say_the_next
from tests.tiny_models import TinyModelFactory
from tools.make_tiny_model import write_tiny_model
from tools.tiny_models.drafting import Tensors

VOCAB_SIZE = 320
OPTIONS = DRAFTING_OPTIONS
PREFILL = PrefillConfig(batch_size=64, chunk_size=16)


def _open(path: Path, **options: Any) -> LLM:
    settings = {"draft": "mtp", "prefill": PREFILL, "attention": "dense", **options}
    return LLM(path, **settings)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(5).integers(3, VOCAB_SIZE - 8, 150).tolist()


@pytest.fixture(scope="module")
def random_path(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(**OPTIONS)


@pytest.fixture(scope="module")
def wrong(random_path: Path) -> Iterator[LLM]:
    """A layer of random weights, whose guesses are wrong."""
    with _open(random_path) as llm:
        yield llm


@pytest.fixture(scope="module")
def right_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own_draft") / "right.gguf"
    return write_tiny_model(path, edit=say_the_next, tied=False, **OPTIONS)


@pytest.fixture(scope="module")
def right(right_path: Path) -> Iterator[LLM]:
    """One whose guesses are the model's tokens."""
    with _open(right_path) as llm:
        yield llm


def _paired(llm: LLM) -> PairedText:
    draft = llm._session.draft
    assert isinstance(draft, OwnDraft) and draft._paired is not None
    return draft._paired


@pytest.mark.parametrize("options", SAMPLINGS + PENALISED)
@pytest.mark.parametrize("draft_tokens", ["auto", "1", "15"])
def test_wrong_guesses_change_nothing(
    wrong: LLM, prompt: list[int], draft_tokens: str, options: dict[str, Any]
) -> None:
    n_drafted = n_accepted = 0
    for seed in range(2):
        sampling = SamplingParams(
            **options, seed=seed, max_tokens=40, ignore_eos=seed > 0, draft_tokens=draft_tokens
        )
        stats = compare_drafted(wrong, prompt, sampling)
        n_drafted += stats.drafted_tokens
        n_accepted += stats.accepted_tokens
    if draft_tokens != "auto":
        assert n_accepted < 0.1 * n_drafted


@pytest.mark.parametrize("draft_tokens", ["1", "5", "15"])
def test_right_guesses_spare_calls(right: LLM, prompt: list[int], draft_tokens: str) -> None:
    sampling = SamplingParams(
        temperature=0, max_tokens=49, ignore_eos=True, draft_tokens=draft_tokens, lookup="off"
    )
    start = [*prompt[:-1], 5]
    stats = compare_drafted(right, start, sampling)
    assert right.generate(start, sampling).token_ids[:4] == (6, 7, 8, 9)
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    assert stats.decode_calls == -(-48 // (1 + int(draft_tokens)))
    assert stats.draft_model == "mtp"
    assert f"{stats.accepted_tokens:,} of {stats.drafted_tokens:,} of the draft model" in (
        stats.format_table()
    )


@pytest.mark.parametrize(
    "architecture", ["glm4moe", "hy_v3", "bailingmoe2", "deepseek2", "exaone-moe"]
)
def test_layers_of_mixtures(architecture: str, prompt: list[int], tmp_path: Path) -> None:
    """With experts, where the first layer has none: right guesses, then those of random weights."""
    options = {**OPTIONS, "architecture": architecture, "tied": False}
    if architecture == "exaone-moe":
        options["sliding_window"] = 40
    start, greedy = [*prompt[:-1], 5], {"temperature": 0.0, "ignore_eos": True}
    sampling = SamplingParams(**greedy, max_tokens=31, draft_tokens="5", lookup="off")
    with _open(write_tiny_model(tmp_path / "right.gguf", edit=say_the_next, **options)) as llm:
        stats = compare_drafted(llm, start, sampling)
    assert stats.accepted_tokens == stats.drafted_tokens > 0 and stats.decode_calls == 5
    with _open(write_tiny_model(tmp_path / "random.gguf", **options)) as llm:
        for each in (greedy, SAMPLINGS[3]):
            sampling = SamplingParams(**each, seed=1, max_tokens=40, draft_tokens="5")
            assert compare_drafted(llm, prompt, sampling).drafted_tokens > 10


def test_a_guess_has_the_form_of_the_answer(right: LLM, prompt: list[int]) -> None:
    pytest.importorskip("llguidance")
    form = Grammar("lark", "start: /[a-e]{30}/ /[f-k]{30,40}/")
    sampling = SamplingParams(temperature=0.7, seed=1, max_tokens=40, schema=form, draft_tokens="5")
    assert compare_drafted(right, prompt, sampling).drafted_tokens > 10


def _rows(session: _core.Sequence) -> list[np.ndarray]:
    return [np.asarray(rows).view(np.float32).copy() for rows in session.cached_rows()]


def _expected_rows(path: Path, tokens: list[int]) -> list[np.ndarray]:
    """What the layer caches of a text that is read at once."""
    from edgeh2o.runners.native import NativeModelFile

    with NativeModelFile(path) as file:
        layer = file.open_drafting_layer()
        model = file.load()
        own = model.load_drafting_layer(layer)
    sizes = {"max_context": 512, "batch_size": 512, "chunk_size": 16, "cache_type": "f32"}
    main = _core.Sequence(model._core_model, _core.dense_policy(), **sizes)
    main.keeps_hidden = True
    main.prefill(np.array(tokens, np.int32), is_last=True)
    before = np.concatenate([np.zeros_like(main.hidden[:1]), main.hidden[:-1]])
    session = _core.Sequence(own._core_model, _core.dense_policy(), **sizes)
    session.prefill(np.array(tokens, np.int32), is_last=False, hidden=before)
    return _rows(session)


@pytest.mark.parametrize("draft_tokens", ["1", "4", "auto"])
@pytest.mark.parametrize("n_prompt", [1, 40, 150])
def test_the_layer_has_read_every_token_with_the_row_before(
    random_path: Path, prompt: list[int], n_prompt: int, draft_tokens: str
) -> None:
    """Whatever was drafted, accepted or left waiting, and over two turns of a chat."""
    sampling = SamplingParams(
        temperature=0.5, seed=3, max_tokens=100, ignore_eos=True, draft_tokens=draft_tokens
    )
    with _open(random_path, cache_type="f32", attention_precision="f32") as llm:
        text = prompt[:n_prompt]
        for _ in range(2):
            result = llm.generate(text, replace(sampling, lookup="3"), keep_cache=True)
            text = [*text, *result.token_ids, 7, 9]
        paired = _paired(llm)
        runner = paired._runner
        n_read = paired._end
        assert paired._base == 0 and n_read > n_prompt + 100
        assert paired.text[:n_read] == text[:n_read]
        n_ahead = runner.position - n_read
        rows = _rows(runner)  # type: ignore[arg-type]
    expected = _expected_rows(random_path, text[:n_read])
    for found, wanted in zip(rows, expected, strict=True):
        n = len(found) // (n_read + n_ahead) * n_read
        np.testing.assert_allclose(found[:n], wanted, atol=2e-4)


def test_turns_go_back_and_begin_again(right: LLM, prompt: list[int]) -> None:
    assert len(list(check_turns(right, prompt))) == 4


def test_a_session_file_holds_no_draft(right: LLM, prompt: list[int], tmp_path: Path) -> None:
    check_session_file(right, prompt, tmp_path)


def test_a_chat_grows_and_a_context_shifts(right_path: Path, prompt: list[int]) -> None:
    with _open(right_path, context_size=200) as small:
        check_shift(small, prompt)
    greedy = SamplingParams(temperature=0, ignore_eos=True, draft_tokens="4")
    with _open(right_path) as llm:
        text = prompt
        for n in (20, 4200):
            sampling = replace(greedy, max_tokens=n)
            found = llm.generate(text, sampling, keep_cache=True)
            assert found.stats.accepted_tokens == found.stats.drafted_tokens > 0
            text = [*text, *found.token_ids, 5]


def test_an_interrupt_leaves_whole_sequences(
    right: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, draft_tokens="3")
    expected = right.generate(prompt, without_drafts(sampling)).token_ids
    for owner, method in ((PairedText, "read"), (OwnDrafter, "_write"), (PairedText, "read_to")):
        right.forget()
        _paired(right).forget()
        n_calls = 0
        real = getattr(owner, method)

        def interrupted(self: Any, *args: Any, real: Any = real, **options: Any) -> Any:
            nonlocal n_calls
            result = real(self, *args, **options)
            n_calls += 1
            if n_calls == 2:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(owner, method, interrupted)
        stream = right.stream(prompt, sampling, keep_cache=True)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        monkeypatch.undo()
        said = stream.result().token_ids
        assert expected[: len(said)] == said
        again = right.generate([*prompt, *said], sampling, keep_cache=True)
        rest = expected[len(said) :]
        assert again.token_ids[: len(rest)] == rest
        assert again.stats.accepted_tokens == again.stats.drafted_tokens


def test_rows_wait_for_a_draft_that_pays(wrong: LLM, prompt: list[int]) -> None:
    """Of a long answer without drafts few are kept."""
    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, lookup="off")
    wrong.generate(prompt, sampling)
    paired = _paired(wrong)
    assert paired.n_pending <= MOST_PENDING + 16
    assert paired._end > len(prompt) + 100


def test_tokens_beyond_the_head_are_never_guessed(
    right_path: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text has them nevertheless, also where the repeat penalty looks at them."""
    monkeypatch.setattr(drafting, "GUESSED_TOKENS", 128)
    with _open(right_path) as llm:
        for penalty in (1.0, 1.1):
            sampling = SamplingParams(
                temperature=0, max_tokens=30, ignore_eos=True, draft_tokens="3", lookup="off"
            )
            stats = compare_drafted(
                llm, [*prompt, 119], replace(sampling, repeat_penalty=penalty, repeat_last_n=-1)
            )
            assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_weights_of_the_model_may_lie_in_a_file(
    right_path: Path, prompt: list[int], tmp_path: Path
) -> None:
    """The layer shares them there too; its own are packed anew."""
    sampling = SamplingParams(
        temperature=0, max_tokens=21, ignore_eos=True, draft_tokens="4", lookup="off"
    )
    for _ in range(2):
        with _open(right_path, packed_weights=tmp_path) as llm:
            stats = compare_drafted(llm, prompt, sampling)
        assert stats.accepted_tokens == stats.drafted_tokens > 0
        assert stats.memory_bytes["mapped_weights"] > 0
        assert stats.memory_bytes["draft_weights"] > 0


def test_memory_is_counted(
    right_path: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _open(right_path) as llm:
        stats = llm.generate(prompt, SamplingParams(max_tokens=2, seed=0)).stats
    sizes = dict(stats.memory_bytes)
    assert 0 < sizes["draft_weights"] < sizes["weights"]
    assert sizes["draft_session"] > 0
    monkeypatch.setattr(
        "edgeh2o.host.memory.available_bytes",
        lambda: 64 * 2**20 + sum(sizes.values()) - sizes["draft_session"] // 2,
    )
    with pytest.raises(ResourceError, match=r"draft session [\d.]+ [KM]iB"):
        _open(right_path, context_size=stats.context_size)


def test_files_that_cannot_draft_are_refused(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    for options, match in (
        ({**OPTIONS, "n_drafting_layers": 0}, "no layer that guesses tokens ahead"),
        ({**OPTIONS, "n_drafting_layers": 2}, "has 2 such layers"),
        ({**OPTIONS, "architecture": "qwen3next"}, "left out in models of the architecture"),
        ({"tensor_type": "F32", "n_layers": 1}, "no layer that guesses tokens ahead"),
    ):
        with pytest.raises(UsageError, match=rf"{match}.*; leave it out, or name a smaller model"):
            _open(tiny_model(**options))

    def lose_norm(tensors: Tensors) -> None:
        del tensors[f"blk.{N_LAYERS}.nextn.hnorm.weight"]

    path = write_tiny_model(tmp_path / "lost.gguf", edit=lose_norm, **OPTIONS)
    with pytest.raises(FormatError, match=r"blk\.2\.nextn\.hnorm\.weight"):
        _open(path)
    with LLM(path) as llm:  # nobody asked for it
        assert llm.generate("a", SamplingParams(max_tokens=1)).token_ids


def test_the_norm_may_be_the_model_s_and_matrices_its_own(
    tmp_path: Path, prompt: list[int]
) -> None:
    def change(tensors: Tensors) -> None:
        say_the_next(tensors)
        prefix = f"blk.{N_LAYERS}.nextn."
        del tensors[f"{prefix}shared_head_norm.weight"]
        tensors[f"{prefix}embed_tokens.weight"] = tensors["token_embd.weight"].copy()
        tensors[f"{prefix}shared_head_head.weight"] = tensors["output.weight"].copy()

    path = write_tiny_model(tmp_path / "own.gguf", edit=change, tied=False, **OPTIONS)
    sampling = SamplingParams(
        temperature=0, max_tokens=21, ignore_eos=True, draft_tokens="4", lookup="off"
    )
    with _open(path) as llm:
        stats = compare_drafted(llm, [*prompt, 5], sampling)
        assert stats.accepted_tokens == stats.drafted_tokens > 0
        assert stats.memory_bytes["draft_weights"] > 2 * 4 * VOCAB_SIZE * 256
