"""Fields of requests and answers that llama-server has beside OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.conftest import RunningServer, StartServer
from tests.serving.fetching import Reply, ask, fetch

JSON = {"content-type": "application/json"}
PROMPT = "the hen is in the pen "
SETTINGS = {"n_predict": 6, "temperature": 0, "ignore_eos": True, "return_tokens": True}
CHAT = {"messages": [{"role": "user", "content": "the hen"}], "max_tokens": 3, "temperature": 0}


def completion(server: RunningServer, **fields: Any) -> Any:
    return ask(server, "/completion", {"prompt": PROMPT} | SETTINGS | fields)


def post(server: RunningServer, path: str, **fields: Any) -> Reply:
    return fetch(server, path, json.dumps(fields).encode(), JSON)


def test_prompts_are_texts_ids_both_or_objects(server: RunningServer) -> None:
    one = completion(server)
    ids = ask(server, "/tokenize", {"content": PROMPT, "add_special": True})["tokens"]
    rest = ask(server, "/detokenize", {"tokens": ids[-3:]})["content"]
    alike = [PROMPT, ids, {"prompt_string": PROMPT}, [*ids[:-3], rest]]
    for prompt in alike[1:]:
        assert completion(server, prompt=prompt)["tokens"] == one["tokens"]
    several = completion(server, prompt=alike, response_fields=["index", "tokens"])
    assert several == [{"index": i, "tokens": one["tokens"]} for i in range(4)]
    begun = completion(server, prompt=["the ", 40, " hen"])
    assert isinstance(begun, list) is False and begun["prompt"].endswith(" hen")
    texts = ask(server, "/v1/completions", {"prompt": alike, "temperature": 0, "max_tokens": 3})
    assert len({choice["text"] for choice in texts["choices"]}) == 1 and len(texts["choices"]) == 4
    picture = {"prompt_string": PROMPT, "multimodal_data": ["iVBO"]}
    for wrong in (picture, {}, {"prompt_string": 1}, [[]], [""], ["", ""], [1, None], [1.5], None):
        reply = post(server, "/completion", prompt=wrong)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt"), wrong
    chunks = completion(server, prompt=alike, stream=True)
    for i in range(4):
        own = [chunk for chunk in chunks if chunk["index"] == i]
        assert [token for chunk in own for token in chunk["tokens"]] == one["tokens"]
        assert [chunk["stop"] for chunk in own].index(True) == len(own) - 1


def test_only_the_named_fields_are_said(server: RunningServer) -> None:
    names = ["content", "generation_settings/n_predict", "timings/prompt_n", "none", "content/a"]
    said = completion(server, response_fields=names)
    assert list(said) == names[:3] and said["generation_settings/n_predict"] == 6
    *chunks, last = completion(server, response_fields=names[1:2], stream=True)
    assert last == {"generation_settings/n_predict": 6} and all("content" in c for c in chunks)
    assert post(server, "/completion", prompt="a", response_fields=[1]).status_code == 400


def test_texts_are_biased_as_their_tokens(server: RunningServer) -> None:
    first = completion(server)["tokens"][0]
    text = ask(server, "/detokenize", {"tokens": [first]})["content"]
    ids = ask(server, "/tokenize", {"content": text})["tokens"]
    for biases in ({text: -100}, [[text, -100]], [[text, False]]):
        reply = completion(server, logit_bias=biases)
        assert not set(ids) & set(reply["tokens"])
        told = [each for each in reply["generation_settings"]["logit_bias"] if each["bias"]]
        assert told == [{"bias": -100.0, "token": token} for token in dict.fromkeys(ids)]
    names = {"-5": 1, "99999": 1, "1" * 20: 1}
    for name, value in names.items():
        reply = post(server, "/completion", prompt="a", logit_bias={name: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logit_bias")


def test_settings_are_those_of_the_answer(server: RunningServer) -> None:
    fields = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "n_probs": 2, "seed": 9}
    reply = completion(server, **fields, timings_per_token=True)
    said = reply["generation_settings"]
    assert {name: said[name] for name in fields} == fields
    assert (said["grammar"], said["timings_per_token"]) == ("", True)
    assert said["logit_bias"] and all(each["bias"] is None for each in said["logit_bias"])
    formed = completion(server, grammar='root ::= "hen"')["generation_settings"]
    assert (formed["grammar"], formed["logit_bias"]) == ('root ::= "hen"', [])  # it ends by itself
    drawn = completion(server, temperature=1.5, ignore_eos=False)
    assert drawn["generation_settings"]["logit_bias"] == []
    seed = drawn["generation_settings"]["seed"]  # not -1: the answer can be had again
    again = completion(server, temperature=1.5, ignore_eos=False, seed=seed)
    assert again["tokens"] == drawn["tokens"]


def test_probabilities_after_sampling(server: RunningServer) -> None:
    """Those that tokens were drawn by: of few tokens they sum up to 1."""
    body = {"n_probs": 4, "post_sampling_probs": True, "seed": 3, "temperature": 1.5}
    few, all_of = (completion(server, **body, top_k=k, top_p=1, min_p=0) for k in (3, 0))
    assert few["generation_settings"]["post_sampling_probs"] is True
    assert len(few["completion_probabilities"]) == 6
    for each in few["completion_probabilities"]:
        tops = each["top_probs"]
        probs = [top["prob"] for top in tops]
        assert len(tops) == 3 and sum(probs) == pytest.approx(1) and probs == sorted(probs)[::-1]
        assert each["prob"] in {top["prob"] for top in tops if top["id"] == each["id"]}
    first = all_of["completion_probabilities"][0]
    assert len(first["top_probs"]) == 4 and sum(top["prob"] for top in first["top_probs"]) < 1
    assert 0 < first["prob"] < 1
    plain = completion(server, **(body | {"post_sampling_probs": False, "top_k": 3}))
    assert plain["tokens"] == completion(server, **(body | {"top_k": 3}))["tokens"]
    greedy = completion(server, **(body | {"temperature": 0}))["completion_probabilities"]
    assert all(each["prob"] == 1 and len(each["top_probs"]) == 1 for each in greedy)
    *chunks, _ = completion(server, **(body | {"stream": True, "top_k": 3}))
    told = [each for chunk in chunks for each in chunk.get("completion_probabilities", [])]
    assert told == completion(server, **(body | {"top_k": 3}))["completion_probabilities"]
    formed = completion(server, **body, grammar='root ::= "hen"')["completion_probabilities"]
    assert all(0 <= each["prob"] <= 1 for each in formed)


def test_an_answer_that_the_context_ends_is_truncated(start_server: StartServer) -> None:
    server = start_server("-c", "64", "-ub", "64", "-b", "64")
    ended, cut = (completion(server, n_predict=n) for n in (4, -1))
    assert (ended["truncated"], ended["stop_type"]) == (False, "limit")
    assert (cut["truncated"], cut["stop_type"]) == (True, "limit")
    reply = post(server, "/completion", prompt="the hen " * 64)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert error["n_ctx"] == 64 < error["n_prompt_tokens"]
    assert server.stop() == 0


def test_timings_come_with_every_token(server: RunningServer) -> None:
    body = {"timings_per_token": True, "return_progress": True, "stream": True, "max_tokens": 4}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    words = [{"role": "user", "content": "an owl is no hen " * 60}]
    reply = post(server, "/v1/chat/completions", **(CHAT | body | {"messages": words}))
    events = [line[6:] for line in reply.text.split("\n") if line.startswith("data: {")]
    chunks = [json.loads(event) for event in events]
    assert "timings" not in chunks[0]
    reading = [chunk["timings"] for chunk in chunks if "prompt_progress" in chunk]
    assert (reading[0]["prompt_n"], reading[0]["prompt_ms"]) == (0, 0)
    counts = [said["prompt_n"] for said in reading]
    assert counts == sorted(counts) and counts[-1] > 0
    writing = [chunk["timings"] for chunk in chunks if any(_deltas(chunk))]
    assert [said["predicted_n"] for said in writing] == sorted(s["predicted_n"] for s in writing)
    assert chunks[-1]["usage"]["completion_tokens"] == chunks[-1]["timings"]["predicted_n"] == 4
    items = ask(server, "/responses", {"input": "a pen " * 90, "max_output_tokens": 3} | body)
    told = [event for event in items if "prompt_progress" in event]
    assert {event["type"] for event in told} == {"response.in_progress"}
    assert items[-1]["timings"] == items[-1]["response"]["timings"]
    plain = completion(server, stream=True)
    assert not any("timings" in chunk for chunk in plain[:-1]) and "timings" in plain[-1]
    assert None not in plain[-1]["timings"].values()


def _deltas(chunk: dict[str, Any]) -> list[str]:
    return [choice["delta"].get("content") or "" for choice in chunk["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_verbose_answers_hold_the_prompt(server: RunningServer, stream: bool) -> None:
    reply = post(server, "/v1/chat/completions", **CHAT, verbose=True, stream=stream)
    chunks = [line[6:] for line in reply.text.split("\n") if line.startswith("data: {")]
    said = json.loads(chunks[-1]) if stream else reply.json()
    told = said["__verbose"]
    assert told["prompt"] == ask(server, "/apply-template", CHAT)["prompt"]
    assert told["generation_settings"]["n_predict"] == 3
    if not stream:
        assert told["content"] == said["choices"][0]["message"]["content"]
        assert "__verbose" not in ask(server, "/v1/chat/completions", CHAT)


def test_several_answers_to_a_prompt(server: RunningServer) -> None:
    """Their seeds follow each other, and the prompt is read once."""
    fields = {"temperature": 1.5, "seed": 7, "max_tokens": 6, "ignore_eos": True}
    body = CHAT | fields | {"messages": [{"role": "user", "content": "an owl " * 90}]}
    reply = ask(server, "/v1/chat/completions", body | {"n": 3, "id_slot": 0})
    alone = [ask(server, "/v1/chat/completions", body | {"seed": seed}) for seed in (7, 8, 9)]
    told = [choice["message"]["content"] for choice in reply["choices"]]
    assert told == [each["choices"][0]["message"]["content"] for each in alone]
    assert len(set(told)) == 3 and [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    usage = reply["usage"]
    assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == 18
    assert usage["total_tokens"] == usage["prompt_tokens"] + 18
    texts = ask(server, "/v1/completions", {"prompt": ["the pen", "a hen"], "n": 2} | fields)
    one = ask(server, "/v1/completions", {"prompt": "a hen"} | fields)["choices"][0]
    assert [choice["text"] for choice in texts["choices"]][2] == one["text"]
    assert len(texts["choices"]) == 4 and texts["usage"]["completion_tokens"] == 24
    for wrong in ({"prompt": ["a"] * 17, "n": 16}, {"prompt": "a", "n": 0}):
        reply = post(server, "/v1/completions", **wrong)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
    assert post(server, "/v1/responses", input="a", n=2).json()["error"]["param"] == "n"


def test_prompts_are_counted_before_they_are_read(server: RunningServer) -> None:
    n_tokens = ask(server, "/v1/chat/completions", CHAT)["usage"]["prompt_tokens"]
    items = {"input": "the hen", "max_output_tokens": 1}
    for prefix in ("", "/v1"):
        counted = ask(server, f"{prefix}/chat/completions/input_tokens", CHAT)
        assert counted == {"object": "response.input_tokens", "input_tokens": n_tokens}
        counted = ask(server, f"{prefix}/responses/input_tokens", items)
        assert counted == {"object": "response.input_tokens", "input_tokens": n_tokens}


def test_what_is_not_served_names_the_cure(server: RunningServer) -> None:
    for path, cure in (
        ("/v1/images/generations", "this server writes text only"),
        ("/props", "start it with other flags"),
        ("/slots/0?action=save", "--slot-save-path"),
    ):
        reply = post(server, path, filename="slot.bin")
        code = "unsupported_endpoint" if path.startswith("/v1/") else 501
        assert (reply.status_code, reply.json()["error"]["code"]) == (501, code)
        assert cure in reply.json()["error"]["message"]


def test_a_template_is_shown_as_it_is_read(server: RunningServer) -> None:
    """Control tokens in a message had a private character in the place of their first."""
    messages = [{"role": "user", "content": "an end: </s> and <|im_end|>"}]
    prompt = ask(server, "/apply-template", {"messages": messages})["prompt"]
    assert messages[0]["content"] in prompt
    bare = ask(server, "/apply-template", {"messages": messages, "add_generation_prompt": False})
    assert prompt.startswith(bare["prompt"]) and prompt != bare["prompt"]


def test_the_server_says_what_it_is(start_server: StartServer) -> None:
    names = ("--alias", "mine, other", "--tags", "small,chat", "--api-key", "one,two")
    server = start_server(*names, "-ub", "64")
    for path in ("/health", "/v1/health"):
        assert fetch(server, path).status_code == 200
    for key, status in (("one", 200), ("two", 200), ("one,two", 401), ("", 401)):
        headers = {"authorization": f"Bearer {key}"}
        reply = fetch(server, "/props", headers=headers)
        assert reply.status_code == status
        if status == 200:
            told = reply.json()
            (model,) = fetch(server, "/models", headers=headers).json()["data"]
            assert fetch(server, "/v1/models/other", headers=headers).json() == model
            page = fetch(server, "/metrics", headers=headers)
    assert (model["id"], model["aliases"], model["tags"]) == (
        "mine",
        ["mine", "other"],
        ["small", "chat"],
    )
    assert model["meta"]["n_ctx_train"] == 8192 and model["meta"]["size"] > 0
    assert told["model_path"].endswith(".gguf") and told["model_alias"] == "mine"
    assert told["is_sleeping"] is False and isinstance(told["bos_token"], str)
    assert int(page.headers["process-start-time-unix"]) > 0
    assert "llamacpp:prompt_tokens_cached_total 0.0" in page.text
    assert server.stop() == 0
