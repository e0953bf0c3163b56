"""Where clients written for llama-server broke, whose answers to the same requests differed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.conftest import RunningServer, StartServer
from tests.serving.fetching import Reply, ask, fetch

PROMPT = {"prompt": "the hen is in the pen ", "n_predict": 4, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "the hen"}], "max_tokens": 3, "temperature": 0}
# Fields that it always has.
SETTINGS = (
    *("seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p"),
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p", "repeat_last_n"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("adaptive_target", "adaptive_decay", "max_tokens", "n_predict", "n_keep", "n_discard"),
    *("ignore_eos", "stream", "n_probs", "min_keep", "chat_format", "reasoning_format"),
    *("reasoning_in_content", "generation_prompt", "samplers", "speculative.types"),
    *("timings_per_token", "post_sampling_probs", "backend_sampling", "lora"),
)
OF_ANSWERS = ("stop", "logit_bias", "grammar", "grammar_lazy", "grammar_triggers")


def post(server: RunningServer, path: str, body: Any) -> Reply:
    return fetch(server, path, json.dumps(body).encode(), {"content-type": "application/json"})


def complete(server: RunningServer, **fields: Any) -> Any:
    reply = post(server, "/completion", PROMPT | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_settings_have_all_its_fields(server: RunningServer) -> None:
    params = fetch(server, "/props").json()["default_generation_settings"]["params"]
    assert set(SETTINGS) <= set(params)
    said = complete(server)["generation_settings"]
    assert {*SETTINGS, *OF_ANSWERS} <= set(said)
    assert (said["n_probs"], said["stream"], said["chat_format"]) == (0, False, "Content-only")
    told = fetch(server, "/props").json()
    assert (told["endpoint_slots"], told["endpoint_metrics"], told["endpoint_props"]) == (
        True,
        True,
        False,
    )


def test_models_are_listed_twice(server: RunningServer) -> None:
    listed = fetch(server, "/v1/models").json()
    (named,), (model,) = listed["models"], listed["data"]
    assert named["name"] == named["model"] == model["id"]
    assert named["capabilities"] == ["completion"] and named["details"]["format"] == "gguf"
    assert model["meta"]["n_embd"] > 0


def test_numbers_may_be_as_large_as_there(server: RunningServer) -> None:
    """SillyTavern's temperature goes up to 5, and biases of -1e9 are common."""
    plain = complete(server, return_tokens=True)
    assert complete(server, return_tokens=True, temperature=-1)["tokens"] == plain["tokens"]
    assert complete(server, temperature=5)["generation_settings"]["temperature"] == 5
    assert len(complete(server, stop=[f"%%{i}" for i in range(30)])["content"]) > 0
    first = plain["tokens"][0]
    for bias in ([[first, -1e9]], {str(first): -1000}):
        assert first not in complete(server, return_tokens=True, logit_bias=bias)["tokens"][:1]
    told = complete(server, n_probs=64)["completion_probabilities"]
    assert all(len(each["top_logprobs"]) == 64 for each in told)
    for wrong in ({"temperature": 1e10}, {"logit_bias": [[first, 1e10]]}, {"n_probs": 101}):
        assert post(server, "/completion", PROMPT | wrong).status_code == 400
    assert post(server, "/completion", PROMPT | {"stop": ["%"] * 65}).status_code == 400


def test_a_slot_that_there_is_not_is_any(server: RunningServer) -> None:
    """llama.vscode names one of several, whatever the server's number of them."""
    for place in (4, 99, -7):
        assert complete(server, id_slot=place)["id_slot"] in range(4)
    for wrong in ("0", 1.5):
        assert post(server, "/completion", PROMPT | {"id_slot": wrong}).status_code == 400
    assert post(server, "/slots/99?action=erase", {}).status_code >= 400


@pytest.mark.parametrize("name", ["n", "n_cmpl"])
def test_several_completions_of_a_prompt(server: RunningServer, name: str) -> None:
    fields = {"temperature": 1.5, "seed": 7, "return_tokens": True}
    told = complete(server, **fields, **{name: 2})
    assert [each["index"] for each in told] == [0, 1]
    alone = [complete(server, **(fields | {"seed": seed})) for seed in (7, 8)]
    assert [each["tokens"] for each in told] == [each["tokens"] for each in alone]
    assert [each["generation_settings"]["seed"] for each in told] == [7, 8]
    prompts = complete(server, prompt=["the pen", "a hen"], **{name: 2})
    assert [each["prompt"] for each in prompts] == ["the pen"] * 2 + ["a hen"] * 2
    chunks = ask(server, "/completion", PROMPT | {name: 2, "stream": True})
    assert {chunk["index"] for chunk in chunks} == {0, 1}
    wrong = post(server, "/completion", PROMPT | {"prompt": ["a"] * 17, name: 16})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "n")


def test_a_prompt_of_ids_is_shown_as_text(server: RunningServer) -> None:
    ids = ask(server, "/tokenize", {"content": "the hen is", "add_special": True})["tokens"]
    text = ask(server, "/detokenize", {"tokens": ids})["content"]
    assert complete(server, prompt=ids)["prompt"] == text
    assert complete(server, prompt=[*ids, " in"])["prompt"] == f"{text} in"
    assert complete(server, prompt="the hen")["prompt"] == "the hen"


def test_ids_and_texts_are_tokenised_together(server: RunningServer) -> None:
    first, second = (ask(server, "/tokenize", {"content": c})["tokens"] for c in ("the", " hen"))
    for content, expected in (
        (["the", " hen"], [*first, *second]),
        ([7, "the", 9], [7, *first, 9]),
        ([], []),
    ):
        assert ask(server, "/tokenize", {"content": content})["tokens"] == expected
    for wrong in (5, None, [None], [1.5], {}, [True]):
        reply = post(server, "/tokenize", {"content": wrong})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "content")
    assert ask(server, "/tokenize", {"prompt": "the"})["tokens"] == first


def test_a_schema_may_stand_beside_its_type(server: RunningServer) -> None:
    """As llama-server's documentation has it."""
    schema = {"enum": ["hen", "pen"]}
    form = {"type": "json_schema", "schema": schema}
    reply = ask(server, "/v1/chat/completions", CHAT | {"response_format": form, "max_tokens": 20})
    assert json.loads(reply["choices"][0]["message"]["content"]) in schema["enum"]
    for wrong in ({"type": "json_schema"}, {"type": "json_schema", "schema": None}):
        body = CHAT | {"response_format": wrong}
        assert post(server, "/v1/chat/completions", body).status_code == 400


def test_fields_that_change_nothing_are_taken(server: RunningServer) -> None:
    assert post(server, "/v1/completions", {"prompt": "a", "suffix": ""}).status_code == 200
    assert post(server, "/v1/chat/completions", CHAT | {"functions": []}).status_code == 200
    assert post(server, "/v1/completions", {"prompt": "a", "suffix": "b"}).status_code == 400


def test_logarithms_have_the_ids_of_their_tokens(server: RunningServer) -> None:
    """Those of texts stand in both forms."""
    chat = ask(server, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2})
    body = {"prompt": PROMPT["prompt"], "max_tokens": 3, "temperature": 0, "logprobs": 2}
    text = ask(server, "/v1/completions", body)["choices"][0]["logprobs"]
    for told in (chat["choices"][0]["logprobs"]["content"], text["content"]):
        for each in told:
            # Greedy: the token is the likeliest.
            assert each["top_logprobs"][0] == {k: v for k, v in each.items() if k != "top_logprobs"}
            assert ask(server, "/detokenize", {"tokens": [each["id"]]})["content"] == each["token"]
    assert len(text["content"]) == len(text["tokens"]) == 3
    assert [each["logprob"] for each in text["content"]] == text["token_logprobs"]
    for path, asked in (("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)):
        (choice,) = ask(server, path, asked | {"n_probs": 2})["choices"]
        assert [len(each["top_logprobs"]) for each in choice["logprobs"]["content"]][:3] == [2] * 3
    echoed = ask(server, "/v1/completions", body | {"echo": True})["choices"][0]["logprobs"]
    assert len(echoed["content"]) == len(echoed["tokens"]) - 1  # nothing comes before the first


def test_a_stream_of_text_ends_with_its_usage(server: RunningServer) -> None:
    body = {"prompt": PROMPT["prompt"], "max_tokens": 3, "ignore_eos": True, "stream": True}
    reply = post(server, "/v1/completions", body)
    chunks = [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]
    assert chunks[-1]["usage"]["completion_tokens"] == 3 and chunks[-1]["choices"]
    assert not any("usage" in chunk for chunk in chunks[:-1])
    asked = post(server, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    found = [json.loads(line[6:]) for line in asked.text.split("\n") if line.startswith("data: {")]
    assert [bool(chunk["usage"]) for chunk in found].count(True) == 1 and found[-1]["usage"]


def test_errors_have_numbers_on_its_own_paths(start_server: StartServer) -> None:
    """Clients read an integer there; OpenAI's have names on theirs."""
    server = start_server("-c", "64", "-ub", "64", "-b", "64", "--parallel", "1")
    for path, body, kind in (
        ("/completion", {"prompt": 5}, "invalid_request_error"),
        ("/completion", {"prompt": "the hen " * 64}, "exceed_context_size_error"),
        ("/tokenize", {"content": 5}, "invalid_request_error"),
        ("/detokenize", {"tokens": "x"}, "invalid_request_error"),
        ("/apply-template", {}, "invalid_request_error"),
        ("/lora-adapters", [{"id": 5}], "invalid_request_error"),
        ("/embedding", {"content": 5}, "invalid_request_error"),
        ("/rerank", {}, "invalid_request_error"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "not_supported_error"),
        ("/slots/0?action=erase", {}, "not_supported_error"),
        ("/infill", {}, "not_supported_error"),
    ):
        reply = post(server, path, body)
        error = reply.json()["error"]
        assert (error["code"], error["type"]) == (reply.status_code, kind), path
        assert isinstance(error["message"], str) and reply.status_code in (400, 501)
    told = post(server, "/completion", {"prompt": "the hen " * 64}).json()["error"]
    assert told["n_ctx"] == 64 < told["n_prompt_tokens"]
    long = [{"role": "user", "content": "the hen " * 64}]
    error = post(server, "/v1/chat/completions", {"messages": long}).json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert server.stop() == 0
