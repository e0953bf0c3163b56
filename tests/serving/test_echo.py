"""Several prompts in one body, and prompts that come back with what the model gives them."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

from tests.serving.answering import tokens_of
from tests.serving.conftest import SMALL_CALLS, RunningServer, StartServer
from tests.serving.fetching import fetch


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    """In f32, because bf16 rounds otherwise when chunks are cut otherwise."""
    return start_server(*SMALL_CALLS, "--attention-precision", "f32")


def test_several_prompts_have_a_choice_each(client: openai.OpenAI) -> None:
    prompts = ["the hen ", "a fox and", "the hen ", "under the tree"]
    options: Any = {"model": "m", "max_tokens": 5, "seed": 3, "temperature": 0, "logprobs": 1}
    single = [client.completions.create(prompt=prompt, **options) for prompt in prompts]
    made = client.completions.create(prompt=prompts, **options)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    for choice, alone in zip(made.choices, single, strict=True):
        assert choice.text == alone.choices[0].text
        assert choice.logprobs == alone.choices[0].logprobs
    usages = [each.usage for each in single if each.usage]
    assert made.usage and made.usage.prompt_tokens == sum(u.prompt_tokens for u in usages)
    assert made.usage.completion_tokens == sum(u.completion_tokens for u in usages)
    ids: Any = [tokens_of(20, seed=1), tokens_of(7, seed=2)]
    assert client.completions.create(prompt=ids, **options).usage.prompt_tokens == 27  # type: ignore[union-attr]


def test_what_is_wrong_with_one_of_several_is_said(client: openai.OpenAI) -> None:
    def refuse(part: str, **body: Any) -> None:
        with pytest.raises(openai.BadRequestError, match=part):
            client.completions.create(**{"model": "m", "max_tokens": 2} | body)

    refuse("must not be empty", prompt=["the hen", ""])
    refuse("one array of token ids", prompt=[[1, 2], [1.5]])
    refuse("more than 256 prompts", prompt=["x"] * 257)
    refuse("maximum context length", prompt=[[5] * 4, [5] * 9000])


@pytest.mark.parametrize("n", [2, 40, 700])
def test_an_echoed_prompt_has_the_scores_of_its_tokens(client: openai.OpenAI, n: int) -> None:
    """Each as an answer would have it there, and the rest as without an echo."""
    ids: Any = tokens_of(n, seed=n)
    options: Any = {"model": "m", "temperature": 0, "logprobs": 3, "seed": 1}
    plain = client.completions.create(prompt=ids, max_tokens=3, **options).choices[0]
    made = client.completions.create(prompt=ids, max_tokens=3, echo=True, **options)
    (echoed,) = made.choices
    assert made.usage and (made.usage.prompt_tokens, made.usage.completion_tokens) == (n, 3)
    assert echoed.logprobs and plain.logprobs and echoed.text.endswith(plain.text)
    values, tops = echoed.logprobs.token_logprobs, echoed.logprobs.top_logprobs
    assert values and tops and len(values) == len(tops) == n + 3
    assert values[0] is None and tops[0] is None
    assert values[n:] == plain.logprobs.token_logprobs and tops[n:] == plain.logprobs.top_logprobs
    for place in sorted({1, n // 2, n - 1}):  # a prompt that ends there goes on alike
        before = client.completions.create(prompt=ids[:place], max_tokens=1, **options).choices[0]
        assert before.logprobs and before.logprobs.top_logprobs
        expected = before.logprobs.top_logprobs[0]
        assert list(tops[place]) == list(expected)
        assert list(tops[place].values()) == pytest.approx(list(expected.values()), abs=2e-3)


def test_an_echo_alone(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "prompt": "the hen is in the pen", "echo": True}
    made = client.completions.create(max_tokens=0, logprobs=1, **options)
    (choice,) = made.choices
    assert choice.text == "the hen is in the pen" and choice.finish_reason == "length"
    assert choice.logprobs and choice.logprobs.tokens and made.usage
    assert len(choice.logprobs.tokens) == made.usage.prompt_tokens
    parts = list(client.completions.create(max_tokens=4, seed=1, stream=True, **options))
    whole = client.completions.create(max_tokens=4, seed=1, **options).choices[0]
    assert "".join(part.choices[0].text for part in parts) == whole.text
    assert whole.text.startswith("the hen is in the pen") and whole.logprobs is None
    with pytest.raises(openai.BadRequestError, match="'echo' is for /v1/completions"):
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], extra_body={"echo": True}
        )


def test_a_client_that_leaves_ends_all_its_prompts(server: RunningServer) -> None:
    options: Any = {"model": "m", "prompt": ["the pen " * 900] * 8, "max_tokens": 4000}
    impatient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(timeout=0.5, **options)
    end = time.monotonic() + 30
    while "edgeh2o_requests_running 0.0" not in (told := fetch(server, "/metrics").text):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert "edgeh2o_requests_waiting 0.0" in told
