"""What is read from the bodies of requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgeh2o import SamplingParams
from edgeh2o.serving.api_error import ApiError
from edgeh2o.serving.fields import parse_body
from edgeh2o.serving.requests import GenerationRequest, read_chat_request, read_text_request


def read(body: dict[str, Any], defaults: SamplingParams) -> list[GenerationRequest]:
    """A chat and a text with these fields."""
    whole = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"} | body
    fields = parse_body(json.dumps(whole).encode())
    return [read_chat_request(fields, defaults), read_text_request(fields, defaults)]


@pytest.mark.parametrize(
    ("seed", "expected"), [(-1, None), (None, 5), (0, 0), (-2, 2**64 - 2), (2**64 - 1, 2**64 - 1)]
)
def test_minus_one_is_a_random_seed(seed: int | None, expected: int | None) -> None:
    for request in read({"seed": seed}, SamplingParams(seed=5)):
        assert request.sampling.seed == expected


def test_tokens_to_generate_by_each_of_its_names() -> None:
    defaults = SamplingParams(max_tokens=9)
    for name in ("n_predict", "max_tokens"):
        assert [r.sampling.max_tokens for r in read({name: 3}, defaults)] == [3, 3]
    both = {"n_predict": 3, "max_tokens": 4}
    assert [r.sampling.max_tokens for r in read(both, defaults)] == [4, 4]
    newest, text = read(both | {"max_completion_tokens": 5}, defaults)
    assert (newest.sampling.max_tokens, text.sampling.max_tokens) == (5, 4)
    with pytest.raises(ApiError, match="'n_predict' must be an integer"):
        read({"n_predict": "3"}, defaults)


def test_samplers_that_are_none_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """As by llama-server, which goes on with the others."""
    defaults = SamplingParams(samplers=("min_p",))
    assert [r.sampling.samplers for r in read({}, defaults)] == [("min_p",)] * 2
    for _ in range(2):
        for request in read({"samplers": ["top_k", "infill", "Temp"]}, defaults):
            assert request.sampling.samplers == ("top_k", "temperature")
    (message,) = caplog.messages
    assert message.startswith("a request's 'samplers': no such sampler: 'infill'; there are")


def test_penalties_that_are_left_out_are_off() -> None:
    body = {"presence_penalty": 1.5, "frequency_penalty": -1, "repeat_penalty": 1.2}
    for given, expected in (
        ({}, (1.5, -1.0)),
        ({"samplers": "kt"}, (0.0, 0.0)),
        ({"mirostat": 1}, (0.0, 0.0)),
    ):
        for request in read(body | given, SamplingParams()):
            assert (request.presence_penalty, request.frequency_penalty) == expected
    with pytest.raises(ApiError, match="'presence_penalty' must be a number"):
        read({"presence_penalty": 3, "samplers": "kt"}, SamplingParams())


def test_effort_is_a_variable_of_the_template() -> None:
    def variables(**body: Any) -> Any:
        return read(body, SamplingParams())[0].template_variables

    assert variables() == {}
    assert variables(reasoning_effort="low") == {"reasoning_effort": "low"}
    assert variables(reasoning_effort="none") == {"enable_thinking": False}
    own = {"reasoning_effort": "high", "enable_thinking": True}
    assert variables(reasoning_effort="low", chat_template_kwargs=own) == own
    with pytest.raises(ApiError, match="'reasoning_effort' must be"):
        variables(reasoning_effort="as much as it takes")
