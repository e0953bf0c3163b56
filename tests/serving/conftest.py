"""A real server process on a tiny model, and the engine without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edgeh2o import LLM, PrefillConfig
from edgeh2o.engine.session import Session
from edgeh2o.formats.known_models import CACHE_VARIABLE, cache_folder
from edgeh2o.serving.answers import AnswerEngine
from tests.tiny_models import TinyModelFactory

if TYPE_CHECKING:
    import openai

StartServer = Callable[..., "RunningServer"]
ROOT = Path(__file__).parents[2]


@contextmanager
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder in which nothing is known of models, but known ones are at hand."""
    known, folder = cache_folder(), tmp_path_factory.mktemp("cache")
    for model in known.glob("*.gguf"):
        (folder / model.name).symlink_to(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder))
        yield


@pytest.fixture(autouse=True, scope="package")
def _processes_keep_no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the processes that tests share learn of models stays with these tests."""
    with fresh_cache(tmp_path_factory):
        yield


@pytest.fixture(autouse=True)
def _tests_keep_no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """And what a test learns, with it: what is known changes how prompts are read."""
    with fresh_cache(tmp_path_factory):
        yield


class RunningServer:
    """A process of ``edgeh2o serve``; ``url`` is where it listens."""

    def __init__(
        self,
        model: Path,
        log: Path,
        arguments: Sequence[str] = (),
        program: Sequence[str] = ("-m", "edgeh2o"),
    ) -> None:
        self._log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", str(model), "--port", "0", *arguments],
                stderr=stderr,
                stdout=stderr,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "default"},
            )
        self.url = self._wait_for_address()

    def _wait_for_address(self) -> str:
        while self.process.poll() is None:
            found = re.search(r" at (http://\S+)/v1", self.log)
            if found:
                return found[1]
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError(f"the server ended: {self.log}")

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text("utf-8")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> int:
        """Ends it in good order; returns its exit code."""
        self.process.terminate()
        return self.process.wait(30)


@pytest.fixture(scope="session")
def serving_model(tiny_model: TinyModelFactory) -> Path:
    """A tiny model with room for long prompts."""
    return tiny_model(tensor_type="Q4_0", context_length=8192, n_layers=2)


@pytest.fixture(scope="session")
def start_server(
    serving_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    """``start_server(*arguments)``: a server, ended with the tests."""
    started: list[RunningServer] = []
    folder = tmp_path_factory.mktemp("servers")

    def start(*arguments: str, model: Path = serving_model) -> RunningServer:
        started.append(RunningServer(model, folder / f"{len(started)}.log", arguments))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


SMALL_CALLS = ("--parallel", "4", "-ub", "64", "-b", "256")


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> RunningServer:
    """The server that most tests share."""
    return start_server(*SMALL_CALLS)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    """openai-python, for that server."""
    import openai  # takes longer than most files of tests need

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@contextmanager
def open_engine(model: Path, **options: object) -> Iterator[AnswerEngine]:
    """The engine of a server in this process."""
    opened: list[Session] = []
    names = "prefix_ram_bytes", "prefix_disk", "slot_folder"
    own = {name: options.pop(name) for name in names if name in options}
    options.setdefault("prefill", PrefillConfig(batch_size=256, chunk_size=64))
    with LLM(model, threads=1, check=opened.append, **options):  # type: ignore[arg-type]
        engine = AnswerEngine(opened[0], **own)  # type: ignore[arg-type]
        try:
            yield engine
        finally:
            engine.close()
