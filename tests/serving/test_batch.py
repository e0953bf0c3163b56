"""Files of requests: every one gets one result, whatever stops the runs."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from edgeh2o.cli.main import main
from edgeh2o.errors import ResourceError
from edgeh2o.sampling_config import SamplingParams
from edgeh2o.serving import batch
from edgeh2o.serving.batch import BatchItem, ResultFile, read_items, run_batch
from tests.cli.conftest import ExpectUsageError, expect_usage_error  # noqa: F401
from tests.serving.batches import command, read, request, text_of, write


def test_a_full_disk_is_told_of_the_file(tmp_path: Path) -> None:
    (item,) = read_items(Path(write(tmp_path / "in.jsonl", [request(0)])))
    results = ResultFile(tmp_path / "out.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(ResourceError, match=r"cannot write .*out\.jsonl: File too large"):
            results.add(item, {"response": None, "error": None})
        results.close()  # which had the same error, of no file
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_error_that_ends_the_run_takes_no_result_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = read_items(Path(write(tmp_path / "in.jsonl", [request(i) for i in range(8)])))

    def answer(_engine: object, item: BatchItem, *_: object) -> dict[str, Any]:
        if item.custom_id == "r3":
            raise ResourceError("no memory")
        return {"response": None, "error": None}

    monkeypatch.setattr(batch, "answer_item", answer)
    # All that run are ready when the results are written.
    monkeypatch.setattr(batch, "wait", lambda running, return_when: futures.wait(running))
    results = ResultFile(tmp_path / "out.jsonl")
    with pytest.raises(ResourceError, match="no memory"):
        run_batch(
            None,  # type: ignore[arg-type]
            items,
            results,
            model_name="m",
            sampling=SamplingParams(),
            parallel=7,
        )
    results.close()
    assert set(read(tmp_path / "out.jsonl")) == {f"r{i}" for i in range(8) if i != 3}


def test_every_request_gets_its_result(
    serving_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [request(i) for i in range(6)])
    targets = [tmp_path / name for name in ("one.jsonl", "three.jsonl")]
    assert main([*command(serving_model, source, targets[0]), "--parallel", "1"]) == 0
    assert main([*command(serving_model, source, targets[1]), "--parallel", "3"]) == 0
    one, three = map(read, targets)
    assert set(one) == {f"r{i}" for i in range(6)}
    # Neither the neighbours nor what was cached change an answer.
    assert {key: text_of(value) for key, value in one.items()} == {
        key: text_of(value) for key, value in three.items()
    }
    for results in (one, three):
        usages = [result["response"]["body"]["usage"] for result in results.values()]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        # The document was read once.
        assert sorted(cached)[0] == 0 and sorted(cached)[1] > 0.7 * usages[0]["prompt_tokens"]
    before = targets[0].read_bytes()
    assert main(command(serving_model, source, targets[0])) == 0
    assert targets[0].read_bytes() == before
    assert capsys.readouterr().out == ""


def test_a_killed_run_goes_on(serving_model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request(i, 200, ignore_eos=True) for i in range(12)])
    target = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "edgeh2o", *command(serving_model, source, target)]
    )
    while not target.exists() or target.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    first = target.read_bytes()
    n_first = first.count(b"\n")
    assert 3 <= n_first < 12
    target.write_bytes(first + first[: first.index(b"resp")])  # a line that was cut off
    assert main(command(serving_model, source, target)) == 0
    assert target.read_bytes().startswith(first)
    results = read(target)
    assert set(results) == {f"r{i}" for i in range(12)}
    whole = tmp_path / "whole.jsonl"
    assert main(command(serving_model, source, whole)) == 0
    assert {k: text_of(v) for k, v in read(whole).items()} == {
        k: text_of(v) for k, v in results.items()
    }


def test_changed_requests_are_answered_again(serving_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", [request(1), request(2)])
    assert main(command(serving_model, source, target)) == 0
    write(tmp_path / "in.jsonl", [request(1), request(2, 4)])
    assert main(command(serving_model, source, target)) == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(line["custom_id"] for line in lines) == ["r1", "r2", "r2"]


def test_refused_requests_get_their_error(serving_model: Path, tmp_path: Path) -> None:
    text = {
        "custom_id": "t",
        "url": "/v1/completions",
        "body": {"prompt": "the hen", "max_tokens": 3},
    }
    source = write(tmp_path / "in.jsonl", [request(1, temperature="hot"), request(2), text])
    target = tmp_path / "out.jsonl"
    assert main(command(serving_model, source, target)) == 1
    results = read(target)
    assert results["r1"]["response"]["status_code"] == 400
    assert results["r1"]["response"]["request_id"].startswith("req_")
    assert "'temperature'" in results["r1"]["error"]["message"]
    assert results["r2"]["error"] is None
    assert results["t"]["response"]["body"]["object"] == "text_completion"
    # Nothing is left to do, and the code does not become that of success by asking again.
    assert main(command(serving_model, source, target)) == 1
    assert read(target) == results


def test_a_byte_order_mark_is_no_part_of_a_request(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(request(1)) + "\r\n", encoding="utf-8-sig")
    assert [item.custom_id for item in read_items(source)] == ["r1"]


def test_a_model_may_have_any_name(serving_model: Path, tmp_path: Path) -> None:
    model = tmp_path / os.fsdecode(b"mod\xe9l.gguf")
    model.symlink_to(serving_model)
    source, target = write(tmp_path / "in.jsonl", [request(1)]), tmp_path / "out.jsonl"
    assert main(command(model, source, target)) == 0
    assert read(target)["r1"]["response"]["body"]["model"] == "mod\ufffdl"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "holds no requests"),
        ("{\n", "line 1: the body is not JSON"),
        ('{"custom_id": "a"}\n', "needs a custom_id and a body"),
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {"a": 1}}\n', "the url must be"),
        ('{"custom_id": "\\ud800", "body": {"b": 1}}\n', "line 1: the body has a lone surrogate"),
        ('{"custom_id": "a", "body": {"b": 1}}\n' * 2, "line 2: the id 'a' is there twice"),
    ],
)
def test_files_that_are_none(
    serving_model: Path,
    tmp_path: Path,
    content: str,
    part: str,
    expect_usage_error: ExpectUsageError,  # noqa: F811
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    target = tmp_path / "out.jsonl"
    expect_usage_error(main(command(serving_model, str(source), target)), part)
    assert not target.exists()


@pytest.mark.parametrize("text", ["my notes\n", "my notes", '{"id": 1}'])
def test_other_files_are_not_overwritten(
    serving_model: Path,
    tmp_path: Path,
    text: str,
    expect_usage_error: ExpectUsageError,  # noqa: F811
) -> None:
    source = write(tmp_path / "in.jsonl", [request(1)])
    notes = tmp_path / "notes.txt"
    notes.write_text(text)
    expect_usage_error(main(command(serving_model, source, notes)), "is no result of a batch")
    assert notes.read_text() == text
    expect_usage_error(main(command(serving_model, source, Path(source))), "name")


def test_results_need_a_regular_file(
    serving_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expect_usage_error: ExpectUsageError,  # noqa: F811
) -> None:
    source = write(tmp_path / "in.jsonl", [request(1)])
    monkeypatch.chdir(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (Path("/dev/null"), pipe, tmp_path, Path("-")):
        error = main(command(serving_model, source, target))
        expect_usage_error(error, "results need a regular file")
    assert pipe.is_fifo() and not Path("-").exists()
    assert main(command(serving_model, source, Path("results"))) == 0
    link = tmp_path / "link"
    link.symlink_to("results")  # as /dev/stdout, where that is a file
    assert main(command(serving_model, source, link)) == 0
    assert len(read(tmp_path / "results")) == 1
