"""What clients of llama-server send and look for."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from edgeh2o.sampler_names import SAMPLERS
from tests.serving.conftest import RunningServer, StartServer
from tests.serving.fetching import ask, fetch

JSON = {"content-type": "application/json"}
TIMINGS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "the hen is in the pen ", "n_predict": 8, "temperature": 0} | fields


def test_timings_have_its_names(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "the hen " * 60}], "max_tokens": 4}
    body |= {"ignore_eos": True, "temperature": 0}
    first, second = (ask(server, "/v1/chat/completions", body) for _ in range(2))
    for reply in (first, second):
        said, usage = reply["timings"], reply["usage"]
        assert set(said) >= TIMINGS
        assert all(isinstance(said[name], (int, float)) for name in TIMINGS)
        assert said["prompt_n"] + said["cache_n"] == usage["prompt_tokens"]
        assert said["predicted_n"] == usage["completion_tokens"] == 4
        rate = 1e3 * (said["predicted_n"] - 1) / said["predicted_ms"]  # the first is the prompt's
        assert said["predicted_per_second"] == pytest.approx(rate, rel=0.01)
    assert second["timings"]["cache_n"] > first["timings"]["cache_n"] == 0
    assert second["timings"]["cache_n"] == second["usage"]["prompt_tokens_details"]["cached_tokens"]
    one = ask(server, "/v1/chat/completions", body | {"max_tokens": 1})["timings"]
    assert (one["predicted_per_second"], one["predicted_per_token_ms"]) == (0, 0)


def test_progress_counts_cached_tokens_as_read(server: RunningServer) -> None:
    body: dict[str, Any] = {"max_tokens": 1, "stream": True, "return_progress": True}
    body["stream_options"] = {"include_usage": True}
    for n_words, is_cached in ((150, False), (900, True)):
        messages = [{"role": "user", "content": "a pen of hens " * n_words}]
        chunks = ask_stream(server, body | {"messages": messages})
        usage = next(chunk["usage"] for chunk in chunks if chunk.get("usage"))
        told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert told and {each["total"] for each in told} == {usage["prompt_tokens"]}
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert {each["cache"] for each in told} == {cached} and (cached > 0) == is_cached
        read = [each["processed"] for each in told]
        assert read == sorted(read) and cached <= read[0] and read[-1] <= usage["prompt_tokens"]
        assert all(type(each["time_ms"]) is int for each in told)


def ask_stream(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = fetch(server, "/v1/chat/completions", json.dumps(body).encode(), JSON)
    events = [line.removeprefix("data: ") for line in reply.text.split("\n") if "data: " in line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_completions_have_its_form(server: RunningServer, path: str) -> None:
    body = completion(ignore_eos=True, return_tokens=True, n_probs=2)
    whole = ask(server, path, body)
    assert whole["stop"] is True and whole["stop_type"] == "limit" and not whole["stopping_word"]
    assert whole["tokens_predicted"] == len(whole["tokens"]) == 8
    assert ask(server, "/detokenize", {"tokens": whole["tokens"]})["content"] == whole["content"]
    assert whole["tokens_evaluated"] == whole["timings"]["prompt_n"] + whole["timings"]["cache_n"]
    assert whole["generation_settings"]["n_predict"] == 8 and whole["prompt"] == body["prompt"]
    told = whole["completion_probabilities"]
    assert [each["id"] for each in told] == whole["tokens"]
    assert all(len(each["top_logprobs"]) == 2 for each in told)
    assert all(each["id"] == each["top_logprobs"][0]["id"] for each in told)  # as greedy takes it
    assert not ask(server, path, completion(ignore_eos=True))["tokens"]
    assert "completion_probabilities" not in ask(server, path, completion())

    *chunks, last = ask(server, path, body | {"stream": True})  # and no [DONE], which is no JSON
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["tokens"]
    assert not any(chunk["stop"] for chunk in chunks) and last["stop"] is True
    assert (last["content"], last["tokens_predicted"]) == ("", 8)

    stop = whole["content"][4:7]
    cut = ask(server, path, body | {"stop": ["%%%", stop]})
    assert cut["content"] == whole["content"].partition(stop)[0]
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", stop)
    assert whole["tokens"][: len(cut["tokens"])] == cut["tokens"]
    assert len(cut["completion_probabilities"]) == len(cut["tokens"]) < 8


def test_biases_come_in_pairs(server: RunningServer) -> None:
    first = ask(server, "/completion", completion(return_tokens=True))["tokens"][0]
    never = completion(return_tokens=True, logit_bias=[[first, False]])
    assert ask(server, "/completion", never)["tokens"][0] != first
    always = completion(return_tokens=True, logit_bias=[[40, 100]], n_predict=3)
    assert ask(server, "/completion", always)["tokens"] == [40, 40, 40]
    for wrong in ([[1, 2, 3]], [["", 1]], [["a" * 300, 1]], [1], [[-1, 1]], [[1, None]], "x"):
        error = ask(server, "/completion", completion(logit_bias=wrong))["error"]
        assert error["param"] == "logit_bias" and error["type"] == "invalid_request_error"


def test_a_penalty_looks_as_far_as_it_is_told(server: RunningServer) -> None:
    body = completion(repeat_penalty=10, n_predict=16, return_tokens=True, ignore_eos=True)
    near, none = (
        ask(server, "/completion", body | {"repeat_last_n": n, "prompt": [40, 41, 42]})["tokens"]
        for n in (64, 0)
    )
    plain = ask(server, "/completion", body | {"repeat_penalty": 1, "prompt": [40, 41, 42]})
    assert none == plain["tokens"] != near


def test_a_template_is_applied(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "the hen"}]
    text = ask(server, "/apply-template", {"messages": messages})["prompt"]
    assert "the hen" in text
    n_tokens = ask(server, "/tokenize", {"content": text, "add_special": True})["count"]
    chat = {"messages": messages, "max_tokens": 1}
    for path in ("/chat/completions", "/v1/chat/completions"):
        assert ask(server, path, chat)["usage"]["prompt_tokens"] == n_tokens
    assert ask(server, "/apply-template", {})["error"]["param"] == "messages"


def test_slots_say_who_is_at_work(server: RunningServer) -> None:
    idle = fetch(server, "/slots").json()
    assert [slot["id"] for slot in idle] == [0, 1, 2, 3]
    assert not any(slot["is_processing"] for slot in idle)
    assert all(slot["n_ctx"] == 8192 for slot in idle)
    body = completion(prompt="the pen ", n_predict=4000, ignore_eos=True)
    worker = threading.Thread(target=ask, args=(server, "/completion", body))
    worker.start()
    busy: list[dict[str, Any]] = []
    while worker.is_alive() and not busy:
        slots = fetch(server, "/slots").json()
        at_work = [slot for slot in slots if slot["is_processing"]]
        busy = [slot for slot in at_work if slot["next_token"][0]["n_decoded"]]
        time.sleep(0.01)
    worker.join()
    (slot,) = busy
    (token,) = slot["next_token"]
    assert token["n_remain"] == 4000 - token["n_decoded"] and "pen" not in json.dumps(slots)
    assert slot["id_task"] >= 0
    assert fetch(server, "/slots?fail_on_no_slot=1").status_code == 200


def test_properties_have_the_defaults(server: RunningServer) -> None:
    told = fetch(server, "/props").json()["default_generation_settings"]
    assert told["n_ctx"] == 8192
    assert (told["params"]["temperature"], told["params"]["n_predict"]) == (0.8, -1)
    assert (told["params"]["xtc_probability"], told["params"]["typical_p"]) == (0, 1)
    assert told["params"]["dry_sequence_breakers"] == ["\n", ":", '"', "*"]


def test_requests_may_name_all_samplers(server: RunningServer) -> None:
    rare = {
        **{"top_n_sigma": 2.0, "typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05},
        **{"dynatemp_range": 0.3, "dynatemp_exponent": 2.0, "dry_multiplier": 0.8},
        **{"dry_base": 1.5, "dry_allowed_length": 1, "dry_penalty_last_n": -1},
        "dry_sequence_breakers": ["stop here"],
    }
    body = completion(seed=3, temperature=0.9, n_predict=24, ignore_eos=True)
    plain, drawn = ask(server, "/completion", body), ask(server, "/completion", body | rare)
    assert {name: drawn["generation_settings"][name] for name in rare} == rare
    assert drawn["content"] == ask(server, "/completion", body | rare)["content"]
    assert drawn["content"] != plain["content"]
    assert plain["generation_settings"]["samplers"] == list(SAMPLERS)
    for order in (["temp", "top-k", "tfs_z", "xtc"], "tkx"):
        moved = ask(server, "/completion", body | {"samplers": order, "temperature": 1.9})
        assert moved["generation_settings"]["samplers"] == ["temperature", "top_k", "xtc"]
    none = ask(server, "/completion", body | {"samplers": ["tfs_z"]})  # nothing is left out
    assert none["content"] != plain["content"]
    steered = {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5}
    once, again = (ask(server, "/completion", body | steered | more) for more in ({}, {"top_k": 1}))
    assert {name: once["generation_settings"][name] for name in steered} == steered
    assert once["content"] == again["content"] != plain["content"]
    aimed: dict[str, Any] = {"adaptive_target": 0.25, "adaptive_decay": 0.5}
    assert ask(server, "/completion", body | aimed)["content"] == plain["content"]  # not named
    aimed["samplers"] = ["top_k", "adaptive_p"]
    once, again = (ask(server, "/completion", body | aimed) for _ in range(2))
    assert {name: once["generation_settings"][name] for name in aimed} == aimed
    assert once["content"] == again["content"] != plain["content"]
    off = {"dry_multiplier": 2.0, "dry_base": 0.0, "typical_p": 1.0, "top_n_sigma": -1}
    off |= {"mirostat": 0, "mirostat_tau": 5.0}
    assert ask(server, "/completion", body | off)["content"] == plain["content"]
    none = ask(server, "/completion", body | {"dry_sequence_breakers": [], "typical_p": 0})
    assert none["generation_settings"]["dry_sequence_breakers"] == []
    assert len(none["content"]) > 0
    for name, wrong in (
        *(("xtc_probability", 2), ("dry_multiplier", -1), ("dry_allowed_length", 1.5)),
        *(("dry_sequence_breakers", [""]), ("typical_p", "x"), ("mirostat", 3)),
        *(("mirostat_tau", -1), ("mirostat_eta", "x")),
        *(("adaptive_target", 2), ("adaptive_decay", 1), ("adaptive_target", "x")),
        *(("samplers", 3), ("samplers", [1]), ("samplers", ["top_k"] * 33), ("samplers", "k" * 99)),
    ):
        reply = fetch(server, "/completion", json.dumps(body | {name: wrong}).encode(), JSON)
        assert reply.status_code == 400 and name in reply.json()["error"]["message"]


def test_a_request_may_name_its_slot(server: RunningServer) -> None:
    for place in (2, 0, -1):
        reply = ask(server, "/completion", completion(id_slot=place))
        assert reply["id_slot"] == max(place, 0)
    chunks = ask(server, "/completion", completion(id_slot=3, stream=True))
    assert {chunk["id_slot"] for chunk in chunks} == {3}
    for wrong in ("a", 1.5):
        reply = fetch(
            server, "/v1/completions", json.dumps(completion(id_slot=wrong)).encode(), JSON
        )
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "id_slot")


def test_metrics_have_its_names(start_server: StartServer) -> None:
    server = start_server("-ub", "64", "-b", "256")
    body = completion(prompt="the hen " * 200, n_predict=5, ignore_eos=True)
    first, second = (ask(server, "/completion", body)["timings"] for _ in range(2))
    assert second["cache_n"] > 0
    lines = fetch(server, "/metrics").text.splitlines()
    found = {
        name: float(value) for name, value in (line.split() for line in lines if line[0] != "#")
    }
    said = {name[9:]: value for name, value in found.items() if name.startswith("llamacpp:")}
    n_read = first["prompt_n"] + second["prompt_n"]
    read_s = (first["prompt_ms"] + second["prompt_ms"]) / 1e3
    written_s = (first["predicted_ms"] + second["predicted_ms"]) / 1e3
    assert said["prompt_tokens_total"] == n_read
    assert said["tokens_predicted_total"] == 10
    assert said["prompt_seconds_total"] == pytest.approx(read_s)
    assert said["tokens_predicted_seconds_total"] == pytest.approx(written_s)
    assert said["prompt_tokens_seconds"] == pytest.approx(n_read / read_s)
    assert said["predicted_tokens_seconds"] == pytest.approx(8 / written_s)
    assert said["n_decode_total"] >= 1 and said["n_busy_slots_per_decode"] >= 1
    assert said["n_tokens_max"] == first["prompt_n"] + 5
    assert said["requests_processing"] == said["requests_deferred"] == 0
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert kinds["llamacpp:prompt_tokens_total"] == "counter"
    assert kinds["llamacpp:requests_processing"] == "gauge"
    assert server.stop() == 0
