"""Batches on a cluster of two processes, of which one is killed: every request gets one result."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeh2o import DenseConfig, PrefillConfig, SamplingParams
from edgeh2o.cli.main import main
from edgeh2o.config import RuntimeConfig
from edgeh2o.errors import EdgeH2OError
from tests.serving.answering import answer, request_of
from tests.serving.batches import command, read, request, text_of, write

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,
        resources={"edgeh2o": 1},
        silence_logs=50,
    ) as cluster:
        yield cluster


def test_a_killed_worker_loses_nothing(
    cluster: Any, serving_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", [*map(request, range(12)), request(99, temperature="x")])
    target, alone = tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    killed = []

    def kill_one(done: int, total: int) -> None:
        if done == 4 and not killed:
            killed.append(cluster.workers[0].pid)
            os.kill(cluster.workers[0].pid, signal.SIGKILL)

    from edgeh2o.serving import cluster_batch

    run = cluster_batch.run_on_cluster
    monkeypatch.setattr(
        cluster_batch, "run_on_cluster", lambda *args, **_: run(*args, on_done=kill_one)
    )
    arguments = [*command(serving_model, source, target), "--dask", cluster.scheduler_address]
    assert main(arguments) == 1  # one is refused
    assert killed
    assert main(command(serving_model, source, alone)) == 1
    got, expected = read(target), read(alone)
    assert set(got) == set(expected) and len(got) == 13
    assert got["r99"]["error"]["param"] == "temperature"
    del got["r99"]
    assert all(text_of(got[name]) == text_of(expected[name]) for name in got)
    # The same again has nothing to do, and a line that was cut off is answered anew.
    lines = target.read_bytes().split(b"\n")
    target.write_bytes(b"\n".join(lines[:5]) + b"\n" + lines[5][:20])
    assert main(arguments) == 1  # as before
    assert set(read(target)) == set(expected)


def test_a_worker_that_cannot_load_a_model_loads_the_one_before_again(serving_model: Path) -> None:
    """It went on to answer by an engine that was closed: no request had a result."""
    from edgeh2o.serving.cluster_batch import WorkerSettings, _Loaded

    settings = WorkerSettings(
        model=str(serving_model),
        model_name="tiny",
        runtime=RuntimeConfig(threads=1),
        prefill=PrefillConfig(),
        attention=DenseConfig(),
        sampling=SamplingParams(),
    )
    loaded = _Loaded()
    try:
        asked = request_of("the hen")
        expected = answer(loaded.engine(settings), asked)
        with pytest.raises(EdgeH2OError, match="missing"):
            loaded.engine(replace(settings, model="missing.gguf"))
        assert answer(loaded.engine(settings), asked).text == expected.text
    finally:
        loaded._stack.close()


def test_a_cluster_that_is_not_there(
    serving_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("edgeh2o.serving.cluster_batch.CONNECT_S", 0.5)
    source = write(tmp_path / "in.jsonl", [request(1)])
    arguments = [*command(serving_model, source, tmp_path / "o"), "--dask", "tcp://127.0.0.1:9"]
    assert main(arguments) != 0
    assert "no Dask scheduler answers" in capsys.readouterr().err
