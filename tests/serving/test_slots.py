"""Slots by name: saved, restored and erased as by llama-server, and nothing lost by errors."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from edgeh2o import H2OConfig
from edgeh2o.cli.main import main
from edgeh2o.errors import ResourceError
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.api_error import ApiError
from edgeh2o.serving.events import Event, Finished
from edgeh2o.serving.requests import GenerationRequest
from edgeh2o.serving.slots import is_safe_name
from edgeh2o.serving.ticket import Ticket
from tests.serving.answering import request_of, tokens_of
from tests.serving.conftest import SMALL_CALLS, RunningServer, StartServer, open_engine
from tests.serving.fetching import Reply, ask, fetch

JSON = {"content-type": "application/json"}
FLAGS = (*SMALL_CALLS, "--attention", "dense", "--slot-save-path")  # whatever profiles say
FRANCE, GERMANY = ("the hens of the land of " + name for name in ("france " * 30, "germany " * 30))


def act(server: RunningServer, slot: object, action: str, **body: object) -> Reply:
    return fetch(server, f"/slots/{slot}?action={action}", json.dumps(body).encode(), JSON)


def complete(server: RunningServer, slot: int, prompt: str = FRANCE, **more: object) -> Any:
    body = {"prompt": prompt, "id_slot": slot, "n_predict": 4, "temperature": 0, **more}
    return ask(server, "/completion", body)


def wait_for(server: RunningServer, metric: str) -> None:
    end = time.monotonic() + 30
    while metric not in fetch(server, "/metrics").text:
        assert time.monotonic() < end, metric
        time.sleep(0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots") / "made"


@pytest.fixture(scope="module")
def saving(start_server: StartServer, folder: Path) -> RunningServer:
    return start_server(*FLAGS, str(folder))


def test_a_slot_goes_on_from_its_file_after_a_restart(
    saving: RunningServer, start_server: StartServer, folder: Path
) -> None:
    assert (folder.stat().st_mode & 0o777) == 0o700
    first = complete(saving, 1, ignore_eos=True)
    saved = act(saving, 1, "save", filename="one slot.bin").json()
    assert (saved["id_slot"], saved["filename"]) == (1, "one slot.bin")
    assert saved["n_saved"] == first["tokens_evaluated"] + 3  # the last one was not read
    assert saved["n_written"] == (folder / "one slot.bin").stat().st_size
    assert saved["timings"]["save_ms"] > 0
    other = start_server(*FLAGS, str(folder))
    restored = act(other, 2, "restore", filename="one slot.bin").json()
    assert (restored["id_slot"], restored["filename"]) == (2, "one slot.bin")
    assert restored["n_restored"] == saved["n_saved"]
    assert restored["n_read"] == saved["n_written"] and restored["timings"]["restore_ms"] > 0
    again = complete(other, 2, ignore_eos=True)
    assert again["content"] == first["content"]
    assert again["timings"]["prompt_n"] <= 1
    other.stop()


def test_an_erased_slot_reads_again(saving: RunningServer) -> None:
    assert complete(saving, 3, GERMANY)["timings"]["cache_n"] < 60
    assert complete(saving, 3, GERMANY)["timings"]["prompt_n"] <= 1
    erased = act(saving, 3, "erase").json()
    assert erased["id_slot"] == 3 and erased["n_erased"] > 60
    assert act(saving, 3, "erase").json() == {"id_slot": 3, "n_erased": 0}
    assert complete(saving, 3, GERMANY)["timings"]["prompt_n"] > 60
    # As llama-server's users ask for it, without a body; a page of the web may not.
    assert fetch(saving, "/slots/3?action=erase", b"").status_code == 200
    page = {"origin": "http://evil.example", "content-type": "text/plain"}
    assert fetch(saving, "/slots/3?action=erase", b"{}", page).status_code == 415


def test_a_client_that_goes_waits_for_its_slot_no_more(saving: RunningServer) -> None:
    """It was erased all the same, whenever that was."""
    body = {"prompt": GERMANY, "id_slot": 2, "n_predict": 7000, "ignore_eos": True, "n_probs": 20}
    with closing(HTTPConnection("127.0.0.1", saving.port, timeout=60)) as at_work:
        at_work.request("POST", "/completion", json.dumps(body | {"stream": True}), JSON)
        stream = at_work.getresponse()
        while not stream.readline().startswith(b"data: "):
            pass
        with closing(HTTPConnection("127.0.0.1", saving.port, timeout=60)) as leaving:
            leaving.request("POST", "/slots/2?action=erase", b"{}", JSON)
            wait_for(saving, "edgeh2o_requests_waiting 1.0")
        wait_for(saving, "edgeh2o_requests_waiting 0.0")
        assert fetch(saving, "/slots").json()[2]["is_processing"]
        stream.close()
    wait_for(saving, "edgeh2o_requests_running 0.0")
    assert act(saving, 2, "erase").json()["n_erased"] > 60


@pytest.mark.parametrize(
    ("slot", "action", "name", "cause"),
    [
        (9, "save", "a", "one of the 4 slots"),
        (-1, "save", "a", "a slot has a number"),
        ("x", "erase", "a", "a slot has a number"),
        (0, "steal", "a", "save, restore or erase"),
        (0, "", "a", "save, restore or erase"),
        (0, "save", "", "'filename' must be"),
        (0, "save", 3, "'filename' must be"),
        (0, "save", None, "'filename' must be"),
        (0, "save", "../a", "without folders"),
        (0, "restore", "a/b", "without folders"),
        (0, "restore", "missing", "no such file"),
        (2, "save", "a", "nothing to save"),
    ],
)
def test_bad_actions_are_refused(
    start_server: StartServer,
    saving: RunningServer,
    slot: object,
    action: str,
    name: Any,
    cause: str,
) -> None:
    reply = act(saving, slot, action, filename=name)
    assert reply.status_code == 400 and cause in reply.json()["error"]["message"]


def test_names_stay_in_the_folder() -> None:
    for name in ("a", "slot 1.bin", "ä", "a" * 255, "a.b.c", "-", "日本"):
        assert is_safe_name(name)
    wrong = ["", ".", "..", ".a", "a.", " a", "a ", "a..b", "a/b", "/a", "a\\b", "a:b", "a*", "a?"]
    wrong += [
        '"',
        "<",
        ">",
        "|",
        "\0",
        "\n",
        "\x7f",
        "\x85",
        "\uff0e",
        "\u2215",
        "\u2216",
        "\ufeff",
    ]
    for name in [*wrong, "\ufffd", "\ud800", "a" * 256, "ä" * 128]:
        assert not is_safe_name(name), name


def answer_at(
    engine: AnswerEngine, slot: int, prompt: list[int], *, named: bool = True
) -> Finished:
    ticket, events = Ticket(), list[Event]()
    ticket.place = slot
    request: GenerationRequest = request_of(prompt, place=slot if named else None)
    engine.answer(request, events.append, ticket)
    assert isinstance(events[-1], Finished)
    return events[-1]


def want() -> None:
    """A request that goes on."""


def test_what_a_slot_was_asked_for_stays_its_own(serving_model: Path, tmp_path: Path) -> None:
    """Another slot goes on from a copy, also where it would lose little."""
    common = tokens_of(200, seed=1)
    first, second = common + tokens_of(60, seed=2), common + tokens_of(60, seed=3)
    with open_engine(serving_model, slot_folder=tmp_path) as engine:
        answer_at(engine, 0, first)
        assert answer_at(engine, 1, second).stats.cached_tokens >= 128
        assert len(engine.pool) == 2
        assert engine.slots.save(0, "a", want).n_tokens == 260 + 5
        assert answer_at(engine, 0, second, named=False).stats.cached_tokens >= 128  # its own again
        assert len(engine.pool) == 2
        assert answer_at(engine, 2, first).stats.cached_tokens < 260
        assert engine.slots.restore(2, "a", want).n_tokens == 265
        assert len(engine.pool) == 3  # one at a slot that has read the same goes
        assert answer_at(engine, 2, first).stats.cached_tokens >= 259


def test_slots_that_nobody_names_are_shared(serving_model: Path, tmp_path: Path) -> None:
    prompt = tokens_of(200, seed=1)
    with open_engine(serving_model, slot_folder=tmp_path) as engine:
        answer_at(engine, 0, prompt, named=False)
        answer_at(engine, 1, [*prompt, 9], named=False)
        assert len(engine.pool) == 1
        with pytest.raises(ApiError, match="nothing to save"):
            engine.slots.save(0, "a", want)  # it departed there
        assert engine.slots.save(1, "b", want).n_tokens == 206
    with open_engine(serving_model) as engine:
        answer_at(engine, 0, prompt)
        answer_at(engine, 1, [*prompt, 9])
        assert len(engine.pool) == 1  # nothing is a slot's own where none is saved
        with pytest.raises(ApiError, match="--slot-save-path") as caught:
            engine.slots.save(0, "a", want)
        assert caught.value.status == 501


def test_errors_of_files_lose_nothing(serving_model: Path, tmp_path: Path, tiny_model: Any) -> None:
    prompt = tokens_of(100, seed=1)
    path = tmp_path / "a"
    with open_engine(serving_model, slot_folder=tmp_path) as engine:
        answer_at(engine, 0, prompt)
        engine.slots.save(0, "a", want)
        good = path.read_bytes()
        for bad in (good[:-9], b"", b"x" * 50, good[:400] + b"\0" * 8 + good[408:]):
            path.write_bytes(bad)
            with pytest.raises(ApiError, match="not restored from 'a': it is damaged"):
                engine.slots.restore(0, "a", want)
            assert path.read_bytes() == bad
        (tmp_path / "folder").mkdir()
        os.mkfifo(tmp_path / "pipe")
        for name in ("folder", "pipe"):
            with pytest.raises(ApiError, match=f"not restored from '{name}'"):
                engine.slots.restore(0, name, want)
        path.write_bytes(good)
        assert engine.slots.save(0, "c", want).n_tokens == 105  # what it had
        with pytest.raises(ApiError, match="cannot be written") as caught:
            engine.slots.save(0, "folder", want)
        assert caught.value.status == 500 and str(tmp_path) not in str(caught.value)
    other = tiny_model(tensor_type="Q4_0", context_length=8192, n_layers=3)
    for model, options in (
        (other, {}),
        (serving_model, {"attention": H2OConfig(local=24, heavy=24)}),
        (serving_model, {"cache_type": "f32"}),
    ):
        with (
            open_engine(model, slot_folder=tmp_path, **options) as engine,
            pytest.raises(ApiError, match="another model or with other flags"),
        ):
            engine.slots.restore(0, "a", want)
    with (
        open_engine(serving_model, slot_folder=tmp_path, context_size=64) as engine,
        pytest.raises(ApiError, match="105 tokens do not fit in the context of 64"),
    ):
        engine.slots.restore(0, "a", want)
    assert path.read_bytes() == good


def test_a_full_disk_leaves_the_file_of_before(
    serving_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(serving_model, slot_folder=tmp_path) as engine:
        answer_at(engine, 0, tokens_of(100, seed=1))
        engine.slots.save(0, "a", want)
        before = (tmp_path / "a").read_bytes()
        answer_at(engine, 0, tokens_of(120, seed=2))

        def fail(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(ApiError, match="cannot be written"):
            engine.slots.save(0, "a", want)
        monkeypatch.undo()
        assert (tmp_path / "a").read_bytes() == before
        assert [each.name for each in tmp_path.iterdir()] == ["a"]
        assert engine.slots.save(0, "a", want).n_tokens == 125


def test_erasing_reaches_the_disk(serving_model: Path, tmp_path: Path) -> None:
    prompt, disk = tokens_of(400, seed=1), tmp_path / "disk"
    options: Any = {"slot_folder": tmp_path / "slots", "prefix_disk": (disk, 2**26)}
    with open_engine(serving_model, **options) as engine:
        answer_at(engine, 0, prompt)
    assert len(list(disk.glob("*.session"))) == 1
    with open_engine(serving_model, **options) as engine:
        assert answer_at(engine, 0, prompt).stats.cached_tokens >= 399
        assert engine.slots.erase(0, want) == 405
        assert not list(disk.glob("*.session"))
        assert answer_at(engine, 0, prompt).stats.cached_tokens == 0


def test_folders_are_apart(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--slot-save-path", f"{tmp_path}/.", "--prefix-cache-disk", f"{tmp_path},1G"]
    assert main(["serve", "model.gguf", *arguments]) == 2
    assert "need a folder each" in capfd.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(serving_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ResourceError, match="cannot make the folder"),
        open_engine(serving_model, slot_folder=tmp_path / "file" / "below"),
    ):
        pass
