"""Conversations on the disk: taken up after a restart, bit by bit; bounded; never a crash."""

from __future__ import annotations

import json
import logging
import os
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from edgeh2o import LLM, H2OConfig, HeadwiseConfig, _core
from edgeh2o.attention.budget_table import table_path, write_table
from edgeh2o.attention.rounding_quality import RoundingQuality
from edgeh2o.cli.serve import parse_folder
from edgeh2o.engine.session import Session
from edgeh2o.errors import ResourceError
from edgeh2o.serving.call_grid import ReadPlaces
from edgeh2o.serving.prefix_disk import PrefixDisk
from edgeh2o.serving.saved_state import SavedPlaces, pack_state, read_places, unpack_state
from tests.budget_tables import harmless_table
from tests.serving.answering import ATTENTIONS, answer, request_of, tokens_of
from tests.serving.conftest import StartServer, open_engine
from tests.serving.fetching import fetch

SIZE = 2**26


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("prefix-*.session"), key=lambda path: path.stat().st_mtime)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_answers_after_a_restart_are_those_of_whole_reads(
    serving_model: Path, tmp_path: Path, attention: str
) -> None:
    config = ATTENTIONS[attention]
    document = tokens_of(1200, seed=1)
    prompts = [
        document + tokens_of(20, seed=2),  # another question
        [*document[:700], 9, *document[701:], 5],  # a changed middle
        document + tokens_of(30, seed=3) + tokens_of(8, seed=4),
    ]
    with open_engine(serving_model, attention=config, prefix_ram_bytes=0) as forgetting:
        alone = [answer(forgetting, request_of(prompt)) for prompt in prompts]
    with open_engine(serving_model, attention=config, prefix_disk=(tmp_path, SIZE)) as first:
        answer(first, request_of(document + tokens_of(30, seed=3)))
        assert not files_of(tmp_path)  # not before there is a reason
    assert len(files_of(tmp_path)) == 1
    for prompt, whole, least in zip(prompts, alone, (1000, 500, 1000), strict=True):
        with open_engine(
            serving_model, attention=config, prefix_disk=(tmp_path, SIZE), prefix_ram_bytes=0
        ) as again:
            got = answer(again, request_of(prompt))
        assert least <= got.stats.cached_tokens <= len(prompt)
        assert (got.text, got.logprobs) == (whole.text, whole.logprobs)


def test_prefixes_go_on_with_the_precision_that_they_were_read_by(
    serving_model: Path, tmp_path: Path
) -> None:
    """In 8 bits by the model's table; a server that reads otherwise reads them itself."""
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    with LLM(serving_model) as llm:
        measured = RoundingQuality(length=4096, kl={"prose": 4e-4}, loss=0.03)
        table = harmless_table(llm.config, 64, rounding=measured)
    write_table(table, table_path(table.fingerprint))
    document = tokens_of(1200, seed=1)
    prompt, disk = document + tokens_of(600, seed=2), (tmp_path / "disk", SIZE)
    attention, wholes = HeadwiseConfig(budget=64, local=16), {}
    for precision in ("auto", "f32"):
        with open_engine(
            serving_model, attention=attention, attention_precision=precision
        ) as engine:
            wholes[precision] = answer(engine, request_of(prompt))
    assert wholes["auto"].logprobs != wholes["f32"].logprobs
    with open_engine(serving_model, attention=attention, prefix_disk=disk) as engine:
        answer(engine, request_of(document))
    for precision, n_cached in (("auto", 1024), ("f32", 0)):
        with open_engine(
            serving_model,
            attention=attention,
            attention_precision=precision,
            prefix_disk=disk,
            prefix_ram_bytes=0,
        ) as engine:
            got = answer(engine, request_of(prompt))
        assert n_cached <= got.stats.cached_tokens <= (1200 if n_cached else 0)
        assert got.logprobs == wholes[precision].logprobs


def test_what_memory_has_no_room_for_goes_to_the_disk_and_comes_back(
    serving_model: Path, tmp_path: Path
) -> None:
    with open_engine(serving_model, prefix_ram_bytes=2**20, prefix_disk=(tmp_path, SIZE)) as engine:
        for seed in range(8):
            answer(engine, request_of(tokens_of(600, seed=seed)))
            assert engine.pool.n_bytes <= 2**20
        engine.pool.wait_for_disk()
        assert 1 < len(files_of(tmp_path)) < 8
        # The same prompt again, to its end: the logits come from the file.
        assert answer(engine, request_of(tokens_of(600, seed=0))).stats.cached_tokens == 600
    assert len(files_of(tmp_path)) == 8  # the others when it ended
    with open_engine(serving_model, prefix_disk=(tmp_path, SIZE)) as engine:
        longer = tokens_of(600, seed=7)
        answer(engine, request_of(longer))
        grown = answer(engine, request_of(tokens_of(600, seed=3) + [7] * 100, 4))
        assert grown.stats.cached_tokens >= 500
    assert len(files_of(tmp_path)) <= 9


def test_the_folder_stays_within_its_size(serving_model: Path, tmp_path: Path) -> None:
    size = 10**6
    with open_engine(serving_model, prefix_ram_bytes=0, prefix_disk=(tmp_path, size)) as engine:
        for seed in range(6):
            answer(engine, request_of(tokens_of(600, seed=seed)))
            engine.pool.wait_for_disk()
            used = sum(path.stat().st_size for path in tmp_path.iterdir())
            assert used <= size
        kept = len(files_of(tmp_path))
        assert 1 <= kept < 6
        # The latest are there, the first are not.
        assert answer(engine, request_of(tokens_of(600, seed=5))).stats.cached_tokens == 600
        assert answer(engine, request_of(tokens_of(600, seed=0))).stats.cached_tokens == 0


def test_two_servers_share_a_folder(serving_model: Path, tmp_path: Path) -> None:
    disk = (tmp_path, SIZE)
    with (
        open_engine(serving_model, prefix_disk=disk, prefix_ram_bytes=0) as one,
        open_engine(serving_model, prefix_disk=disk, prefix_ram_bytes=0) as other,
    ):
        for engine, seed in ((one, 1), (other, 1), (other, 2)):
            answer(engine, request_of(tokens_of(500, seed=seed)))
            engine.pool.wait_for_disk()
        assert answer(one, request_of(tokens_of(500, seed=2))).stats.cached_tokens == 500
        assert len(files_of(tmp_path)) == 2
        for path in files_of(tmp_path):
            path.unlink()
        assert answer(other, request_of(tokens_of(500, seed=2))).stats.cached_tokens == 0


def spoil(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("where", [0.0, 0.001, 0.02, 0.5, 1.0, "cut", "empty", "gone"])
def test_a_damaged_file_is_a_line_in_the_log(
    serving_model: Path, tmp_path: Path, where: float | str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = (tmp_path, SIZE)
    with open_engine(serving_model, prefix_disk=disk) as engine:
        answer(engine, request_of(tokens_of(500, seed=1)))
    (path,) = files_of(tmp_path)
    if where == "cut":
        os.truncate(path, path.stat().st_size - 100)
    elif where == "empty":
        path.write_bytes(b"")
    elif isinstance(where, float):
        spoil(path, where)
    with (
        caplog.at_level(logging.WARNING, "edgeh2o.serving"),
        open_engine(serving_model, prefix_disk=disk) as engine,
    ):
        if where == "gone":
            path.unlink()
        got = answer(engine, request_of(tokens_of(500, seed=1)))
        assert got.stats.cached_tokens == 0
    assert where == "gone" or "is of no use" in caplog.text


def test_files_of_others_are_left_alone(serving_model: Path, tmp_path: Path) -> None:
    disk = (tmp_path, SIZE)
    prompt = tokens_of(500, seed=1)
    with open_engine(serving_model, attention=H2OConfig(local=24, heavy=24), prefix_disk=disk) as a:
        answer(a, request_of(prompt))
    (tmp_path / "notes.txt").write_text("mine")
    other = HeadwiseConfig(budget=64, local=16)
    with open_engine(serving_model, attention=other, prefix_disk=disk) as b:
        assert answer(b, request_of(prompt)).stats.cached_tokens == 0
    assert len(files_of(tmp_path)) == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_disk_that_cannot_be_written_is_a_line_in_the_log(
    serving_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with (
        caplog.at_level(logging.WARNING, "edgeh2o.serving"),
        open_engine(serving_model, prefix_disk=(tmp_path, SIZE), prefix_ram_bytes=0) as engine,
    ):
        monkeypatch.setattr("edgeh2o.formats.atomic_file.os.fsync", full)
        for seed in range(3):
            assert answer(engine, request_of(tokens_of(400, seed=seed))).text
        engine.pool.wait_for_disk()
    assert "No space left" in caplog.text
    assert not list(tmp_path.glob("*.session")) and not list(tmp_path.glob("*.tmp"))


def test_a_conversation_larger_than_the_folder_is_not_kept(
    serving_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "edgeh2o.serving"):
        with open_engine(serving_model, prefix_disk=(tmp_path, 1000)) as engine:
            answer(engine, request_of(tokens_of(400, seed=0)))
        assert "--prefix-cache-disk" in caplog.text
    assert not files_of(tmp_path)


def test_a_conversation_that_became_too_large_leaves_what_was_kept_of_it(
    serving_model: Path, tmp_path: Path
) -> None:
    prompt = tokens_of(400, seed=0)
    with open_engine(serving_model, prefix_disk=(tmp_path, SIZE)) as engine:
        answer(engine, request_of(prompt, 1))
    kept = files_of(tmp_path)
    size = kept[0].stat().st_size
    with open_engine(serving_model, prefix_disk=(tmp_path, size + 1000)) as engine:
        answer(engine, request_of(prompt + tokens_of(600, seed=1)))
    assert files_of(tmp_path) == kept


def test_a_folder_that_was_away_is_found_again(serving_model: Path, tmp_path: Path) -> None:
    folder, away, prompt = tmp_path / "here", tmp_path / "away", tokens_of(400, seed=0)
    with open_engine(serving_model, prefix_disk=(folder, SIZE)) as engine:
        answer(engine, request_of(prompt))
    with open_engine(serving_model, prefix_disk=(folder, SIZE)) as engine:
        folder.rename(away)
        answer(engine, request_of(tokens_of(400, seed=1)))
        away.rename(folder)
        assert answer(engine, request_of(prompt)).stats.cached_tokens >= 256


def test_the_folder_is_made_for_its_owner(tmp_path: Path) -> None:
    disk = PrefixDisk(tmp_path / "a" / "b", SIZE, lambda fingerprint: None)
    assert disk.folder.stat().st_mode & 0o777 == 0o700
    assert len(disk) == 0


SAVED = SavedPlaces(ReadPlaces((0, 64), (0,), ()), 90)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"marks": [0, 64]', b'"marks": [64, 0]', "marks do not ascend"),
        (b'"marks": [0, 64]', b'"marks": [0,6.4]', "marks are no list"),
        (b'"marks": [0, 64]', b'"marks": [00064]', "header is not JSON"),
        (b'"marks": [0, 64]', b'"narks": [0, 64]', "marks are no list"),
        (b'"turns": [0]', b'"turns": [1]', "first turn"),
        (b'"whole_end": 90', b'"whole_end": -1', "end cannot be"),
        (b'"whole_end": 90', b'"whole_end":"a"', "end cannot be"),
        (b'"whole_end": 90', b'"whole_end":999', "beyond its 100 tokens"),
        (b"{", b"[", "header is not JSON"),
    ],
)
def test_a_bad_state_is_refused(old: bytes, new: bytes, reason: str) -> None:
    good = pack_state(SAVED, b"state")
    assert good.count(old) == 1
    with pytest.raises(ValueError, match=reason):
        unpack_state(good.replace(old, new), 100)


def test_a_state_survives() -> None:
    good = pack_state(SAVED, b"state")
    assert unpack_state(good, 100) == (SAVED, b"state")
    assert read_places(good + bytes(10)) == SAVED
    for bad in (b"", good[:3], good[:50], b"\xff\xff\xff\x7f" + good[4:]):
        with pytest.raises(ValueError):
            read_places(bad)


@pytest.mark.parametrize(
    ("text", "folder", "n_bytes"),
    [("/a,512M", "/a", 2**29), ("b,c,2G", "b,c", 2**31), ("d,100", "d", 100)],
)
def test_the_flag_names_a_folder_and_its_size(text: str, folder: str, n_bytes: int) -> None:
    assert parse_folder(text) == (Path(folder), n_bytes)


@pytest.mark.parametrize("text", ["/a", ",5G", "/a,", "/a,much", f"/a,{'9' * 400}"])
def test_a_flag_without_them_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is no"):
        parse_folder(text)


def test_a_folder_that_cannot_be_made_is_an_error(serving_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ResourceError, match="cannot make the folder"),
        open_engine(serving_model, prefix_disk=(tmp_path / "file" / "x", SIZE)),
    ):
        pass


def test_a_server_process_starts_again_where_it_ended(
    start_server: StartServer, tmp_path: Path
) -> None:
    flags = ("-ub", "64", "-b", "256", "--prefix-cache-disk", f"{tmp_path},64M", "-v")
    body = {"prompt": tokens_of(600, seed=1), "max_tokens": 4, "seed": 1, "temperature": 0}
    replies = []
    for _ in range(2):
        server = start_server(*flags)
        headers = {"content-type": "application/json"}
        reply = fetch(server, "/v1/completions", json.dumps(body).encode(), headers).json()
        replies.append(reply)
        assert server.stop() == 0
    assert replies[0]["choices"][0]["text"] == replies[1]["choices"][0]["text"]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert cached == [0, 600]
    assert "tokens are taken from" in server.log


def test_what_went_on_stays_until_all_of_it_is_there(
    serving_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or Ctrl-C, while the longer file was written took the shorter one along."""
    document = tokens_of(600, seed=1)
    with open_engine(serving_model, prefix_disk=(tmp_path, SIZE)) as first:
        answer(first, request_of(document))
        (kept,) = first.pool.room.kept
        assert kept.runner is not None
        longer = list(kept.runner.token_ids) + tokens_of(300, seed=2)
    (begun,) = files_of(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise ResourceError("the disk is full")

    with open_engine(serving_model, prefix_disk=(tmp_path, SIZE)) as again:
        answer(again, request_of(longer))
        with monkeypatch.context() as patch:
            patch.setattr(Session, "save", fail)
            again.close()
    assert files_of(tmp_path) == [begun]
    with open_engine(serving_model, prefix_disk=(tmp_path, SIZE)) as third:
        assert answer(third, request_of(longer)).stats.cached_tokens > 500
    (whole,) = files_of(tmp_path)
    assert whole != begun
    # Where both have no room together the shorter one goes first, and no other.
    size = whole.stat().st_size
    with open_engine(serving_model, prefix_disk=(tmp_path, size + size // 2)) as fourth:
        disk = fourth.pool.disk
        assert disk is not None
        (shown,) = [entry for entry in disk._index.values() if entry is not None]
        answer(fourth, request_of(shown.token_ids.tolist() + tokens_of(100, seed=3)))
    assert len(files_of(tmp_path)) == 1 and files_of(tmp_path) != [whole]
