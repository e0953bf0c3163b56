"""Row 25: prompts that are empty, not text, or longer than anything can hold."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import LLM, SamplingParams
from edgeh2o.cli import prompt as prompt_module
from edgeh2o.cli.main import main
from edgeh2o.errors import UsageError
from tests.bad_input.refusal import Refusal, small_memory
from tests.tiny_models import TinyModelFactory


@pytest.fixture
def model(tiny_model: TinyModelFactory) -> str:
    return str(tiny_model(tensor_type="Q4_0"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the prompt is empty .* give at least one token"),
        (b"\n", "the prompt is empty"),
        (b"caf\xe9 au lait", "prompt.txt is not UTF-8 text: .* at byte 3; convert it"),
        (b"\xed\xa0\x80", "prompt.txt is not UTF-8 text: .* at byte 0"),  # a surrogate
        (b"the " * 3000, "the prompt has [0-9]+ tokens and the context holds 2048; shorten it"),
    ],
    ids=["empty", "newline only", "Latin-1", "surrogate", "longer than the context"],
)
def test_refuses_prompt_files(
    tmp_path: Path, model: str, refusal: Refusal, content: bytes, problem: str
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    # Opening the model is allowed to take its size.
    refusal(["run", model, "-f", str(path)], code=2, problem=problem, max_python_bytes=16 * 2**20)


@pytest.mark.parametrize("prompt", ["\0", "a\0b", "<|im_start|>", "<|im_start|><|im_end|>" * 3])
def test_answers_odd_but_valid_prompts(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(prompt)
    arguments = ["-n", "2", "--temp", "0", "--ignore-eos", "--quiet", "-f", str(path)]
    assert main(["run", model, *arguments]) == 0
    assert capsys.readouterr().err == ""


def test_refuses_a_prompt_file_of_100_mb(tmp_path: Path, model: str, refusal: Refusal) -> None:
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    refusal(
        ["run", model, "-f", str(path)],
        code=2,
        problem="huge.txt has more than 32 MiB of text, which no context holds; shorten it",
        max_python_bytes=48 * 2**20,
    )


@pytest.mark.parametrize("source", ["-f /dev/zero", "-"])
def test_refuses_prompts_without_end(
    model: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(prompt_module, "MAX_PROMPT_BYTES", 2**20)
    with open("/dev/zero", encoding="utf-8") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        refusal(["run", model, *source.split()], code=2, problem="has more than 1 MiB of text")


def test_refuses_a_long_text_before_it_is_tokenised(
    model: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"hello world, " * 500_000
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    monkeypatch.setattr(LLM, "tokenize", None)
    refusal(
        ["run", model, "-"],
        code=2,
        problem="the prompt has at least .* tokens and the context holds 2048; shorten it",
        max_python_bytes=32 * 2**20,
    )


def test_refuses_two_billion_token_ids_without_a_copy(model: str) -> None:
    with LLM(model) as llm:
        ids = np.broadcast_to(np.int32(1), (2**31,))
        with small_memory(2**20), pytest.raises(UsageError, match="at least 2147483648 tokens"):
            llm.generate(ids, SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([], "the prompt is empty"),
        ([0, -1], "token id -1 at index 1 is outside the vocabulary"),
        ([2**31], "token id 2147483648 at index 0 is outside"),
        ([0.5], "a flat sequence of integer token ids"),
        ([[1], [2]], "a flat sequence of integer token ids"),
    ],
)
def test_refuses_token_ids(model: str, ids: list, problem: str) -> None:
    with LLM(model) as llm, pytest.raises(UsageError, match=problem):
        llm.generate(ids, SamplingParams(max_tokens=1))


def test_refuses_lone_surrogates(model: str) -> None:
    with LLM(model) as llm, pytest.raises(UsageError, match=r"lone surrogate, U\+D83D, at char"):
        llm.generate("ab\ud83d", SamplingParams(max_tokens=1))


@pytest.mark.parametrize("text", [None, 5, b"a text"])
def test_refuses_to_tokenise_what_is_no_text(model: str, text: Any) -> None:
    with LLM(model) as llm, pytest.raises(UsageError, match="must be a string, got"):
        llm.tokenize(text)


@pytest.mark.parametrize("token", [1.5, "a", None])
def test_refuses_to_detokenise_what_is_no_token(model: str, token: Any) -> None:
    with LLM(model) as llm, pytest.raises(UsageError, match="token ids must be integers, got"):
        llm.detokenize([3, token])


@pytest.mark.parametrize("ids", [None, 5])
def test_refuses_to_detokenise_what_is_no_sequence(model: str, ids: Any) -> None:
    with LLM(model) as llm, pytest.raises(UsageError, match="are a sequence of integers, got"):
        llm.detokenize(ids)


def test_refuses_a_model_without_a_name(refusal: Refusal) -> None:
    with pytest.raises(UsageError, match="the model's name is empty; give the path of a model or"):
        LLM("")
    refusal(["run", "", "-p", "a"], code=2, problem="no model given: name a GGUF file")
