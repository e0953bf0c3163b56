"""The Python interface on tiny models, and the main job on the default model."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edgeh2o import _core, isa
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.config import PrefillConfig
from edgeh2o.errors import (
    BusyError,
    ContextLengthError,
    EdgeH2OError,
    FormatError,
    ResourceError,
    UsageError,
)
from edgeh2o.llm import LLM
from edgeh2o.sampling_config import SamplingParams
from tests.tiny_models import TinyModelFactory

PROMPT = "the art of the thing is that it is there and for all that"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL_CHUNKS = PrefillConfig(batch_size=32, chunk_size=8)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(tensor_type="Q4_0")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, seed=5) as llm:
        yield llm


def test_generate(llm: LLM) -> None:
    result = llm.generate(PROMPT, GREEDY)
    assert len(result.token_ids) == result.stats.generated_tokens == 8
    assert result.finish_reason == "length"
    assert result.text == llm.detokenize(result.token_ids, skip_special=True)
    assert result.stats.prompt_tokens == len(llm.tokenize(PROMPT))
    assert result.stats.pairs_dense == result.stats.pairs_computed  # one chunk
    assert result.stats.memory_bytes["weights"] > 0
    assert result.stats.load_s > 0


def test_a_model_says_what_it_is(llm: LLM, model: Path) -> None:
    assert repr(llm) == (
        f"<LLM {model}: llama, headwise attention, {llm.isa}, {llm.threads} threads>"
    )


@pytest.mark.parametrize("kind", [UsageError, FormatError, ResourceError, BusyError])
def test_errors_pass_from_process_to_process(kind: type[EdgeH2OError]) -> None:
    for error in (kind("what"), ContextLengthError(9, 5)):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_stream_is_closed_by_its_context(llm: LLM) -> None:
    with llm.stream(PROMPT, GREEDY) as stream:
        first = next(stream)
    assert next(stream, None) is None
    assert stream.result().text.startswith(first.text)
    assert stream.result().stats.generated_tokens == 1


def test_the_content_of_a_message_may_come_in_parts(llm: LLM) -> None:
    def answer(content: object) -> str:
        return llm.chat([{"role": "user", "content": content}], GREEDY).text

    parts = [{"type": "text", "text": "the hen"}, {"type": "text", "text": "<|im_end|> the pen"}]
    assert answer(parts) == answer("the hen\n<|im_end|> the pen")
    for wrong in ([{"type": "image_url", "image_url": {"url": "x"}}], ["the hen"], [{"text": "a"}]):
        with pytest.raises(UsageError, match="text, or parts of the type 'text', got "):
            answer(wrong)


def test_biases_and_penalties_change_what_is_drawn(llm: LLM) -> None:
    plain = llm.generate(PROMPT, GREEDY).token_ids
    never = llm.generate(PROMPT, replace(GREEDY, logit_bias={plain[0]: -100}))
    assert never.token_ids[0] != plain[0] and plain[0] not in never.token_ids
    always = llm.generate(PROMPT, replace(GREEDY, logit_bias={77: 100})).token_ids
    assert always == (77,) * 8
    # The same token by token, with penalties that are biases.
    bias = {77: 30.0, 78: 30.0, 79: 29.0}
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.75}
    drawn = llm.generate(PROMPT, replace(GREEDY, logit_bias=bias, **penalties)).token_ids
    assert len(set(drawn)) > 1
    prompt, said = llm.tokenize(PROMPT), Counter[int]()
    for token in drawn:
        biases = bias | {t: bias.get(t, 0) - 1.5 - 0.75 * n for t, n in said.items()}
        step = llm.generate(prompt, replace(GREEDY, logit_bias=biases, max_tokens=1))
        assert step.token_ids == (token,)
        prompt, said[token] = [*prompt, token], said[token] + 1


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {}, 0, "", SamplingParams])
def test_sampling_of_another_kind_is_refused(llm: LLM, sampling: Any) -> None:
    with pytest.raises(UsageError, match=r"sampling must be SamplingParams\(\.\.\.\), got "):
        llm.generate(PROMPT, sampling)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("prefill", [5, "x", object()], r"prefill must be PrefillConfig\(\.\.\.\), got "),
        ("rope", [5, {}, "yarn"], r"rope must be RopeConfig\(\.\.\.\), got "),
        ("isa", [5, True], r"isa \(--isa\) must be a name"),
        ("chat_template", [5, object()], "a chat template is a text, got "),
        ("chat_template_kwargs", [5, "x", []], "chat_template_kwargs are variables by name"),
        ("on_progress", [5, "x"], "on_progress must be a function, got "),
        ("check", [5, "x"], "check must be a function, got "),
    ],
)
def test_options_of_another_kind_are_refused(
    model: Path, name: str, values: list[Any], message: str
) -> None:
    for value in values:
        with pytest.raises(UsageError, match=message):
            LLM(model, **{name: value})


@pytest.mark.parametrize("name", [None, b"x", 5, [], object()])
def test_models_and_files_are_named_by_paths(llm: LLM, name: Any) -> None:
    with pytest.raises(UsageError, match="a model is named by its path or a known name"):
        LLM(name)
    for use in (llm.save_session, llm.load_session):
        with pytest.raises(UsageError, match="a session file is named by its path"):
            use(name)


@pytest.mark.parametrize("messages", [None, 5, b"x", "x", {"role": "user"}, object(), [None], []])
def test_messages_of_another_kind_are_refused(llm: LLM, messages: Any) -> None:
    for answer in (llm.chat, llm.stream_chat):
        with pytest.raises(UsageError, match="messages are a list such as"):
            answer(messages, GREEDY)


def test_attention_by_its_name(model: Path) -> None:
    with LLM(model, attention="dense") as llm:
        assert llm.attention == DenseConfig()
    with pytest.raises(UsageError, match="sparse attention 'none' is not known; use one of dense"):
        LLM(model, attention="none")


def test_keys_with_biases_are_not_rounded_to_bf16_by_default(
    model: Path, tiny_model: TinyModelFactory
) -> None:
    """Those of 16 bits are: the decoder evens keys out."""
    best = _core.best_attention_precision()
    biased = tiny_model(architecture="qwen2")
    of_biased = "f32" if best == "bf16" else best
    for path, asked, expected in [(model, "auto", best), (biased, "auto", of_biased)]:
        with LLM(path, attention_precision=asked) as llm:
            assert llm.attention_precision == expected
            assert llm.generate(PROMPT, GREEDY).stats.attention_precision == expected
    if best == "bf16":
        with LLM(biased, attention_precision="bf16") as llm:
            assert llm.attention_precision == "bf16"


def test_stream_gives_the_same_answer_in_pieces(llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)
    stream = llm.stream(PROMPT, GREEDY)
    chunks = list(stream)
    assert tuple(chunk.token_id for chunk in chunks) == whole.token_ids
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.generated_tokens for chunk in chunks] == list(range(1, 9))
    assert [chunk.finish_reason for chunk in chunks] == [None] * 7 + ["length"]
    assert stream.result().token_ids == whole.token_ids


def test_token_ids_are_taken_as_a_prompt(llm: LLM) -> None:
    ids = llm.tokenize(PROMPT)
    assert llm.generate(ids, GREEDY).token_ids == llm.generate(PROMPT, GREEDY).token_ids
    array = np.array(ids, dtype=np.int64)
    assert llm.generate(array, GREEDY).token_ids == llm.generate(ids, GREEDY).token_ids


def test_a_new_prompt_forgets_the_one_before(llm: LLM) -> None:
    alone = llm.generate(PROMPT, GREEDY).token_ids
    llm.generate("in the art", GREEDY)
    next(llm.stream("for all", GREEDY))
    assert llm.generate(PROMPT, GREEDY).token_ids == alone


def test_a_stream_ends_with_an_error_when_a_newer_prompt_begins(llm: LLM) -> None:
    old = llm.stream(PROMPT, GREEDY)
    next(old)
    llm.stream("in", GREEDY)
    with pytest.raises(UsageError, match="ended by a newer prompt"):
        next(old)


def test_seed_of_the_model_serves_calls_without_one(llm: LLM) -> None:
    loose = SamplingParams(temperature=5.0, top_k=0, min_p=0.0, max_tokens=12, ignore_eos=True)
    first = llm.generate(PROMPT, loose)
    assert first.stats.seed == 5
    assert llm.generate(PROMPT, loose).token_ids == first.token_ids


def test_ids_and_logprobs_end_with_the_text_before_a_stop_text(llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)
    start = len(llm.detokenize(whole.token_ids[:3]))
    stop = whole.text[start : start + 12]
    assert stop.strip() and whole.text.find(stop) == start
    cut = llm.generate(PROMPT, replace(GREEDY, stop=(stop,)), logprobs=True)
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:3], "stop")
    assert cut.text == llm.detokenize(cut.token_ids)
    assert cut.logprobs is not None
    assert len(cut.logprobs) == 3
    assert cut.stats.generated_tokens > 3


def test_logprobs_come_with_each_token(llm: LLM) -> None:
    result = llm.generate(PROMPT, GREEDY, logprobs=True)
    assert result.logprobs is not None
    assert len(result.logprobs) == 8
    assert all(-20 < value < 0 for value in result.logprobs)
    assert llm.generate(PROMPT, GREEDY).logprobs is None
    nothing = llm.generate(PROMPT, SamplingParams(max_tokens=0), logprobs=True)
    assert (nothing.token_ids, nothing.logprobs) == ((), ())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, 10**6], "token id 1000000 at index 1 is outside the vocabulary"),
        ([-1], "token id -1 at index 0"),
        ([0.5], "flat sequence of integer token ids, got 1 dimensions of float64"),
        ([[1], [2]], "flat sequence of integer token ids, got 2 dimensions"),
        ([True, False], "integer token ids, got 1 dimensions of bool"),
        (["the hen", "the pen"], "a prompt is one text, got 2 of them; give one after the other"),
        ([[1], [2, 3]], "integer token ids, got parts of several lengths"),
        ([1, "a"], "integer token ids, got 1 dimensions"),
        ([10**30], "integer token ids, got 1 dimensions of object"),
        (None, "integer token ids, got NoneType"),
        (5, "integer token ids, got int"),
        (np.array(5), "integer token ids, got 0 dimensions of int64"),
        (b"text", "integer token ids, got bytes"),
        ({1, 2}, "integer token ids, got 0 dimensions of object"),
        ({"role": "user"}, "integer token ids, got 0 dimensions of object"),
        ([{"role": "user", "content": "a"}], r"got 1 dimensions of object; .* chat\(\)"),
        (iter([1, 2]), "integer token ids, got list_iterator"),
        ("a\udcff", "lone surrogate"),
        ([1] * 100_000, "the prompt has 100000 tokens and the context holds"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.stream(prompt, GREEDY)


def test_progress_counts_bytes_then_tokens(model: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    with LLM(model, on_progress=lambda *report: reports.append(report)) as llm:
        n_tokens = len(llm.tokenize(PROMPT))
        llm.generate(PROMPT, GREEDY)
    for stage, total in (("load", None), ("prefill", n_tokens)):
        counts = [done for name, done, _ in reports if name == stage]
        totals = {size for name, _, size in reports if name == stage}
        assert counts == sorted(counts)
        assert totals == {total or counts[-1]}
        assert counts[-1] == next(iter(totals))


def test_batches_and_threads_do_not_change_the_answer(model: Path) -> None:
    answers = set()
    for batch_size, threads in ((8, 1), (16, 2), (64, 3)):
        prefill = PrefillConfig(batch_size=batch_size, chunk_size=8)
        attention = H2OConfig(local=2, heavy=2)
        with LLM(model, prefill=prefill, attention=attention, threads=threads) as llm:
            result = llm.generate(PROMPT, GREEDY)
            assert result.stats.pairs_computed < result.stats.pairs_dense
            answers.add(result.token_ids)
    assert len(answers) == 1


def test_dense_is_a_choice(model: Path) -> None:
    with LLM(model, prefill=SMALL_CHUNKS, attention=DenseConfig()) as llm:
        stats = llm.generate(PROMPT, GREEDY).stats
        assert stats.pairs_computed == stats.pairs_dense


def test_interrupt_in_the_prefill_leaves_a_usable_model(model: Path) -> None:
    is_armed = False

    def interrupt(stage: str, done: int, total: int) -> None:
        if is_armed and stage == "prefill" and done:
            raise KeyboardInterrupt

    with LLM(model, on_progress=interrupt) as llm:
        expected = llm.generate(PROMPT, GREEDY).token_ids
        is_armed = True
        stream = llm.stream(PROMPT, GREEDY)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        assert stream.result().finish_reason == "interrupted"
        is_armed = False
        assert llm.generate(PROMPT, GREEDY).token_ids == expected


def test_a_model_is_not_copied(llm: LLM) -> None:
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled; load it"):
            make(llm)
    assert llm.generate(PROMPT, GREEDY).token_ids


def test_closed_model_is_refused(model: Path) -> None:
    with LLM(model) as llm:
        stream = llm.stream(PROMPT, GREEDY)
    for use in (lambda: llm.generate("in"), lambda: llm.tokenize("in"), lambda: next(stream)):
        with pytest.raises(UsageError, match="close"):
            use()


def test_context_beyond_training_is_warned_about(model: Path) -> None:
    with (
        pytest.warns(UserWarning, match="longer than the"),
        LLM(model, context_size=100_000) as llm,
    ):
        assert llm.generate(PROMPT, GREEDY).stats.context_size == 100_000


def test_bad_files_and_sizes(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"none\.gguf"):
        LLM(tmp_path / "none.gguf")
    text = tmp_path / "text.gguf"
    text.write_text("not a model", encoding="utf-8")
    with pytest.raises(FormatError, match="not a GGUF file"):
        LLM(text)
    with pytest.raises(ResourceError, match="the largest context that fits is -c"):
        LLM(model, context_size=2_000_000_000)


def test_repeated_prompts_keep_the_memory_flat(model: Path) -> None:
    process = psutil.Process()
    with LLM(model, prefill=SMALL_CHUNKS, attention=H2OConfig(local=2, heavy=2)) as llm:
        ids = (llm.tokenize(PROMPT) * 30)[:300]
        for _ in range(5):
            llm.generate(ids, GREEDY)
        before = process.memory_info().rss
        for _ in range(30):
            llm.generate(ids, GREEDY)
        assert process.memory_info().rss - before < 4 * 2**20


def test_the_default_model_knows_a_capital(smollm2_path: Path) -> None:
    with LLM(smollm2_path) as llm:
        result = llm.generate(
            "The capital of France is", SamplingParams(temperature=0, stop=(".",))
        )
    assert "Paris" in result.text
    assert result.finish_reason == "stop"


@pytest.mark.skipif(isa.active() == "scalar", reason="takes minutes with scalar kernels")
def test_the_default_model_answers_a_long_prompt(smollm2_path: Path) -> None:
    prompt = (Path(__file__).parents[1] / "examples/long_prompt.txt").read_text(encoding="utf-8")
    with LLM(smollm2_path) as llm:
        result = llm.generate(
            prompt.removesuffix("\n"),
            SamplingParams(temperature=0, repeat_penalty=1.15, max_tokens=16),
        )
    assert result.stats.prompt_tokens > 4096
    assert result.stats.attention["table"] == "package"
    assert result.stats.pairs_computed < 0.55 * result.stats.pairs_dense
    assert "handbook" in result.text.lower()
