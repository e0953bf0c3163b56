"""Adapters of a server: what each counts is a request's own, and so is what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import SamplingParams
from edgeh2o.serving.api_error import ApiError
from edgeh2o.serving.batch import ResultFile, read_items, run_batch
from tests.engine.right_layer import DRAFTING_OPTIONS, say_the_next
from tests.models.lora_files import matrices_of, random_pairs, write_adapter
from tests.serving.answering import answer, request_of, tokens_of
from tests.serving.conftest import RunningServer, StartServer, open_engine
from tests.serving.fetching import ask, fetch
from tools.make_tiny_model import write_tiny_model

JSON = {"content-type": "application/json"}
SIZE = 2**26
QWEN = str(DRAFTING_OPTIONS["architecture"])
ALL_SCALES: tuple[Mapping[int, float], ...] = ({0: 1.0}, {1: 1.0}, {0: 0.5, 1: -1.0}, {0: 0.0})


@pytest.fixture(scope="module")
def adapters(serving_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, names = tmp_path_factory.mktemp("adapters"), matrices_of(serving_model)
    one, two = (random_pairs(serving_model, names, seed=seed) for seed in (0, 1))
    return write_adapter(folder / "one.gguf", one), write_adapter(folder / "two.gguf", two)


def test_requests_at_once_have_what_they_have_alone(
    serving_model: Path, adapters: tuple[Path, Path]
) -> None:
    prompt = tokens_of(90, seed=1)
    alone = []
    for lora in ALL_SCALES:
        with open_engine(serving_model, lora=list(adapters)) as engine:
            alone.append(answer(engine, request_of(prompt, 12, lora=lora)))
    with open_engine(serving_model) as engine:
        bare = answer(engine, request_of(prompt, 12))
    assert alone[3].logprobs == bare.logprobs
    assert len({each.logprobs for each in alone}) == 4
    with open_engine(serving_model, lora=list(adapters)) as engine:
        with ThreadPoolExecutor(8) as threads:
            requests = [request_of(prompt, 12, lora=lora) for lora in ALL_SCALES * 2]
            together = list(threads.map(lambda each: answer(engine, each), requests))
        n_steps, n_rows = engine.scheduler.n_steps, engine.scheduler.n_step_rows
    assert n_rows > n_steps  # they shared some
    for got, expected in zip(together, alone * 2, strict=True):
        assert (got.text, got.logprobs) == (expected.text, expected.logprobs)


def test_what_is_kept_serves_prompts_of_the_same_scales(
    serving_model: Path, adapters: tuple[Path, Path]
) -> None:
    prompt = tokens_of(600, seed=2)
    longer = [*prompt, *tokens_of(20, seed=3)]
    with open_engine(serving_model, lora=list(adapters)) as engine:
        first = [answer(engine, request_of(prompt, lora=lora)) for lora in ALL_SCALES]
        assert [each.stats.cached_tokens for each in first] == [0, 0, 0, 0]
        again = [answer(engine, request_of(longer, lora=lora)) for lora in ALL_SCALES]
        assert all(each.stats.cached_tokens >= 500 for each in again)
    for lora, got in zip(ALL_SCALES, again, strict=True):
        with open_engine(serving_model, lora=list(adapters)) as engine:
            assert answer(engine, request_of(longer, lora=lora)).logprobs == got.logprobs


def test_what_is_on_the_disk_too(
    serving_model: Path, adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    prompt = tokens_of(600, seed=2)
    options = {"lora": list(adapters), "prefix_disk": (tmp_path, SIZE), "prefix_ram_bytes": 0}
    with open_engine(serving_model, **options) as engine:
        first = [answer(engine, request_of(prompt, lora=lora)) for lora in ALL_SCALES]
    assert len(list(tmp_path.glob("prefix-*.session"))) == len(ALL_SCALES)
    with open_engine(serving_model, **options) as engine:
        for lora, expected in zip(ALL_SCALES, first, strict=True):
            got = answer(engine, request_of(prompt, lora=lora))
            assert got.stats.cached_tokens == 600
            assert got.logprobs == expected.logprobs
        assert answer(engine, request_of(prompt, lora={0: 0.75})).stats.cached_tokens == 0
        assert answer(engine, request_of(prompt)).stats.cached_tokens == 0
    other = options | {"lora": list(reversed(adapters))}
    with open_engine(serving_model, **other) as engine:
        assert answer(engine, request_of(prompt, lora={0: 1.0})).stats.cached_tokens == 0


def test_other_flags_go_on_from_what_the_disk_has_of_their_scales(
    serving_model: Path, adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    """What was read by the scales of the flags, too, as long as a request has them."""
    prompt = tokens_of(600, seed=2)
    flags = ((1.0, 0.5), (0.0, 0.0), (0.25, 1.0))
    read = []
    for scales in flags:
        lora = list(zip(adapters, scales, strict=True))
        options: Any = {"lora": lora, "prefix_disk": (tmp_path, SIZE), "prefix_ram_bytes": 0}
        with open_engine(serving_model, **options) as engine:
            for before in (*flags[: len(read)], scales):
                got = answer(engine, request_of(prompt, lora=dict(enumerate(before))))
                is_known = len(read) > flags.index(before)
                assert got.stats.cached_tokens == (600 if is_known else 0)
                if is_known:
                    assert got.logprobs == read[flags.index(before)]
        read.append(got.logprobs)


def test_older_files_do_not_say_the_scales_of_their_flags(
    serving_model: Path, adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    prompt = tokens_of(600, seed=2)
    options: Any = {"lora": [(adapters[0], 0.5), adapters[1]], "prefix_disk": (tmp_path, SIZE)}
    with open_engine(serving_model, **options) as engine:
        first = answer(engine, request_of(prompt))
    (path,) = tmp_path.glob("prefix-*.session")
    data = path.read_bytes()
    n_bytes = int.from_bytes(data[12:16], "little")
    header = json.loads(data[16 : 16 + n_bytes])
    assert header["fingerprint"].pop("lora") == [0.5, 1.0]
    text = json.dumps(header).encode()
    body = data[:12] + len(text).to_bytes(4, "little") + text + data[16 + n_bytes : -32]
    path.write_bytes(body + blake2b(body, digest_size=32).digest())
    with open_engine(serving_model, **options) as engine:
        got = answer(engine, request_of(prompt))
    assert got.stats.cached_tokens == 600 and got.logprobs == first.logprobs


def test_echoed_prompts_are_scored_by_the_same_adapters(
    serving_model: Path, adapters: tuple[Path, Path]
) -> None:
    prompt = tokens_of(80, seed=4)
    with open_engine(serving_model, lora=list(adapters)) as engine:
        scored = [
            answer(engine, request_of(prompt, echoes=True, lora=lora)).logprobs
            for lora in ({0: 1.0}, {0: 0.0})
        ]
    with open_engine(serving_model, lora=adapters[0]) as engine:
        np.testing.assert_equal(answer(engine, request_of(prompt, echoes=True)).logprobs, scored[0])
    with open_engine(serving_model) as engine:
        np.testing.assert_equal(answer(engine, request_of(prompt, echoes=True)).logprobs, scored[1])
    assert scored[0] != scored[1]


def test_a_request_may_name_one_as_its_model(
    serving_model: Path, adapters: tuple[Path, Path]
) -> None:
    prompt = tokens_of(60, seed=5)
    with open_engine(serving_model, lora=[(path, 0.5) for path in adapters]) as engine:
        assert engine.adapters.names == ["one", "two"]
        alone = answer(engine, request_of(prompt, lora={1: 1.0}))
        assert answer(engine, request_of(prompt, model="two")).logprobs == alone.logprobs
        both = answer(engine, request_of(prompt, lora={0: 0.5, 1: 0.5}))
        for model in ("", "three"):
            assert answer(engine, request_of(prompt, model=model)).logprobs == both.logprobs
        named = request_of(prompt, model="one", lora={1: 1.0})
        assert answer(engine, named).logprobs == alone.logprobs
        engine.adapters.give_name("two")
        assert answer(engine, request_of(prompt, model="two")).logprobs == both.logprobs


@pytest.mark.parametrize("draft", ["model", "mtp"])
def test_drafts_know_of_none_and_change_nothing(
    serving_model: Path, adapters: tuple[Path, Path], tmp_path: Path, draft: str
) -> None:
    model, lora = serving_model, list(adapters)
    if draft == "mtp":
        options = {"edit": say_the_next, "tied": False, **DRAFTING_OPTIONS}
        model = write_tiny_model(tmp_path / "mtp.gguf", context_length=1024, **options)
        names = [name for name in matrices_of(model) if name.startswith("blk.0.")]
        lora = [write_adapter(tmp_path / "a.gguf", random_pairs(model, names), architecture=QWEN)]
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, lookup="off")
    scales = [{0: 0.02}, {0: 0.0}, {0: 1.0}]
    prompt, said = tokens_of(149, seed=6), {}
    for source, tokens in ((None, "off"), ("mtp" if draft == "mtp" else model, "4")):
        each = replace(sampling, draft_tokens=tokens)
        with open_engine(model, lora=lora, draft=source, attention="dense") as engine:
            said[tokens] = [
                answer(engine, request_of(prompt, lora=of, sampling=each)) for of in scales
            ]
    assert sum(each.stats.accepted_tokens for each in said["4"]) > 0
    for drafted, plain in zip(said["4"], said["off"], strict=True):
        assert (drafted.text, drafted.logprobs) == (plain.text, plain.logprobs)


@pytest.mark.parametrize("n_adapters", [0, 2])
def test_adapters_that_are_not_there(
    serving_model: Path, adapters: tuple[Path, Path], n_adapters: int
) -> None:
    said = "there are 2 loaded, from 0 on" if n_adapters else r"there are none loaded \(--lora\)"
    with open_engine(serving_model, lora=list(adapters[:n_adapters])) as engine:
        with pytest.raises(ApiError, match=f"there is no adapter 2; {said}") as raised:
            answer(engine, request_of("the hen", lora={2: 1.0}))
        assert (raised.value.status, raised.value.param) == (400, "lora")
        with pytest.raises(ApiError, match="there is no adapter 2"):
            engine.adapters.set_scales({2: 1.0})


def test_lines_of_a_batch(serving_model: Path, adapters: tuple[Path, Path], tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [{}, {"lora": [{"id": 0, "scale": 1}]}, {"model": "one"}]
    bodies.append({"lora": [{"id": 7, "scale": 1}]})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    common = {"prompt": "the hen is in the pen", "max_tokens": 6, "seed": 1, "logprobs": 0}
    lines = [
        {"custom_id": str(i), "url": "/v1/completions", "body": common | body}
        for i, body in enumerate(bodies)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    results = ResultFile(target)
    with open_engine(serving_model, lora=[(path, 0) for path in adapters]) as engine:
        items = read_items(source)
        run_batch(engine, items, results, model_name="tiny", sampling=SamplingParams())
    results.close()
    said = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    replies = [said[str(i)]["response"]["body"] for i in range(4)]
    assert [reply.get("model") for reply in replies] == ["tiny", "tiny", "one", None]
    texts = [reply["choices"][0]["logprobs"]["token_logprobs"] for reply in replies[:3]]
    assert texts[0] != texts[1] == texts[2]
    assert said["3"]["response"]["status_code"] == 400
    assert "there is no adapter 7" in said["3"]["error"]["message"]


@pytest.fixture(scope="module")
def lora_server(start_server: StartServer, adapters: tuple[Path, Path]) -> RunningServer:
    one, two = adapters
    names = ("--lora", str(one), "--lora-scaled", f"{two}:0.25", "--lora-init-without-apply")
    return start_server(*names, "--alias", "tiny")


def scales_of(server: RunningServer) -> list[float]:
    return [each["scale"] for each in fetch(server, "/lora-adapters").json()]


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "the hen is in", "n_predict": 8, "temperature": 0, "n_probs": 1} | fields


def probabilities(server: RunningServer, **fields: Any) -> list[float]:
    reply = ask(server, "/completion", completion(**fields))
    return [token["logprob"] for token in reply["completion_probabilities"]]


def post(server: RunningServer, body: object) -> tuple[int, Any]:
    reply = fetch(server, "/lora-adapters", json.dumps(body).encode(), JSON)
    return reply.status_code, reply.json()


def test_scales_are_read_and_set(lora_server: RunningServer, adapters: tuple[Path, Path]) -> None:
    paths = [str(path) for path in adapters]
    assert fetch(lora_server, "/lora-adapters").json() == [
        {"id": number, "path": path, "scale": 0.0} for number, path in enumerate(paths)
    ]
    bare = probabilities(lora_server)
    assert post(lora_server, [{"id": 0, "scale": 1}, {"id": 1, "scale": 0.5}]) == (
        200,
        {"success": True},
    )
    assert scales_of(lora_server) == [1.0, 0.5]
    both = probabilities(lora_server)
    assert probabilities(lora_server, lora=[]) == both != bare  # nothing said
    assert probabilities(lora_server, lora=[{"id": 0, "scale": 0}]) == bare
    assert post(lora_server, [{"id": 1, "scale": 0.5}])[0] == 200
    assert scales_of(lora_server) == [0.0, 0.5]
    one = [{"id": 0, "scale": 1.0}]
    named = ask(lora_server, "/completion", completion(lora=one))
    assert named["generation_settings"]["lora"] == one
    assert probabilities(lora_server, model="one") == probabilities(lora_server, lora=one)
    assert post(lora_server, [])[0] == 200
    assert scales_of(lora_server) == [0.0, 0.0]
    assert probabilities(lora_server) == bare


def test_chat_takes_them_and_names_them(lora_server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "the hen"}], "max_tokens": 8, "logprobs": True}
    body |= {"temperature": 0, "ignore_eos": True}

    def chat(path: str, **fields: Any) -> tuple[str, list[float]]:
        reply = ask(lora_server, path, body | fields)
        return reply["model"], [
            each["logprob"] for each in reply["choices"][0]["logprobs"]["content"]
        ]

    name, bare = chat("/v1/chat/completions")
    assert name == "tiny"
    model, by_id = chat("/chat/completions", lora=[{"id": 1, "scale": 1}])
    named, by_name = chat("/v1/chat/completions", model="two")
    assert (model, named) == ("tiny", "two")
    assert by_id == by_name != bare
    listed = fetch(lora_server, "/v1/models").json()["data"]
    assert [(each["id"], each.get("parent")) for each in listed] == [
        ("tiny", None),
        ("one", "tiny"),
        ("two", "tiny"),
    ]
    assert fetch(lora_server, "/v1/models/two").json() == listed[2]
    assert fetch(lora_server, "/v1/models/three").status_code == 404


BAD: list[tuple[object, str]] = [
    ({"id": 0, "scale": 1}, "'lora' must be an array of objects, got an object"),
    ("one", "'lora' must be an array of objects, got a string"),
    ([0], "'lora' must be an array of objects, got an array"),
    ([{"scale": 1}], "'lora[0].id' must be the number of an adapter, got null"),
    ([{"id": -1, "scale": 1}], "'lora[0].id' must be an integer from 0"),
    ([{"id": 0}], "'lora[0].scale' must be a number, got null"),
    ([{"id": 0, "scale": "1"}], "'lora[0].scale' must be a number from -1000 to 1000"),
    ([{"id": 0, "scale": 1e9}], "'lora[0].scale' must be a number from -1000 to 1000"),
    ([{"id": 0, "scale": 1}, {"id": 2, "scale": 0}], "there is no adapter 2; there are 2 loaded"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_what_is_refused(lora_server: RunningServer, given: object, message: str) -> None:
    before = scales_of(lora_server)
    for path, body in (
        ("/completion", completion(lora=given)),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "lora": given}),
    ):
        reply = fetch(lora_server, path, json.dumps(body).encode(), JSON)
        assert reply.status_code == 400
        assert message in reply.json()["error"]["message"]
    status, told = post(lora_server, given)
    assert status == 400
    if isinstance(given, list):
        assert message.replace("'lora", "'body") in told["error"]["message"]
    else:
        assert "the body must be a JSON array" in told["error"]["message"]
    assert scales_of(lora_server) == before


def test_a_server_without_any(server: RunningServer) -> None:
    assert fetch(server, "/lora-adapters").json() == []
    assert post(server, []) == (200, {"success": True})
    assert "none loaded (--lora)" in post(server, [{"id": 0, "scale": 1}])[1]["error"]["message"]


def test_all_names_of_the_model_mean_the_model(
    start_server: StartServer, adapters: tuple[Path, Path]
) -> None:
    server = start_server(*(f"--lora={path}" for path in adapters), "--alias", "tiny,two")
    assert [each["id"] for each in fetch(server, "/v1/models").json()["data"]] == ["tiny", "one"]
    assert fetch(server, "/v1/models/two").json()["id"] == "tiny"
    body = {"model": "two", "messages": [{"role": "user", "content": "the hen"}], "max_tokens": 1}
    assert ask(server, "/v1/chat/completions", body)["model"] == "tiny"
