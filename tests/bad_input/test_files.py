"""Row 22: paths that are not models, other formats, and files that shrink while they are read."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgeh2o import LLM
from edgeh2o.errors import FormatError
from tests.bad_input.refusal import Refusal
from tests.tiny_models import TinyModelFactory

NOBODY = 65534


def _loop(path: Path) -> Path:
    path.symlink_to(path)
    return path


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


NOT_FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda path: path, "model.gguf: no such file .* check the path"),
    "directory": (lambda path: path.parent, "holds no model: .*; give the path of a GGUF file"),
    "fifo": (_fifo, r"is not a regular file \(a pipe or a device\); give a .gguf file"),
    "endless device": (lambda _: Path("/dev/zero"), "/dev/zero: is not a regular file"),
    "symlink loop": (_loop, "model.gguf: no such file .* check the path"),
    "name too long": (lambda path: path.with_name("x" * 300), "no such file"),
    "below a file": (lambda _: Path(__file__) / "model.gguf", "no such file"),
}

OTHER_CONTENT = {
    "empty": (b"", "the file is empty; fetch it again"),
    "four bytes": (b"GGUF", "is truncated or damaged, fetch it again"),
    "HTML page": (b"<!DOCTYPE html><html><body>404</body></html>", "a web page; .* fetch the"),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(60), "a gzip archive; unpack it"),
    "JSON": (b'{"error":"Repository not found"}', "JSON, perhaps .* of an error; fetch the file"),
    "ZIP": (b"PK\x03\x04" + bytes(60), "a ZIP archive .* unpack or convert it"),
    "safetensors": (struct.pack("<Q", 100) + b'{"__metadata__":{}}', "give its folder"),
    "ONNX": (b"\x08\x0a\x12\x07pytorch", "an ONNX"),
    "pickle": (b"\x80\x02}q\x00", "not a GGUF file; check that it is the right file"),
}


@pytest.mark.parametrize("case", NOT_FILES)
def test_refuses_what_is_not_a_file(tmp_path: Path, refusal: Refusal, case: str) -> None:
    make, problem = NOT_FILES[case]
    refusal(["run", str(make(tmp_path / "model.gguf")), "-p", "x"], code=1, problem=problem)


@pytest.mark.parametrize("flags", [[], ["--rope-freq-base", "1e4"]])
def test_a_folder_of_gguf_files_names_them(
    tmp_path: Path, refusal: Refusal, flags: list[str]
) -> None:
    """Whatever else is said, and none is read."""
    for name in ("b é.gguf", "a.gguf", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    problem = "is a folder of GGUF files; give the path of one: a.gguf, b é.gguf$"
    refusal(["run", str(tmp_path), "-p", "x", *flags], code=2, problem=problem)


def test_a_folder_of_weights_without_their_settings(tmp_path: Path, refusal: Refusal) -> None:
    """A download folder with a GGUF file beside them, for one."""
    for name in ("model.safetensors", "other.gguf"):
        (tmp_path / name).write_bytes(b"x")
    problem = "config.json is missing; fetch that file too"
    refusal(["run", str(tmp_path), "-p", "x"], code=1, problem=problem)


@pytest.mark.parametrize("case", OTHER_CONTENT)
def test_refuses_other_formats_by_name(tmp_path: Path, refusal: Refusal, case: str) -> None:
    content, problem = OTHER_CONTENT[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refusal(["run", str(path), "-p", "x"], code=1, problem=f"model.gguf: .*{problem}")


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Root may read everything; give that up for a while."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_refuses_a_file_without_permissions(
    tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "closed.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    monkeypatch.chdir(tmp_path)  # a relative path: the folders above are closed too
    with _as_nobody():
        refusal(
            ["run", "closed.gguf", "-p", "x"],
            code=1,
            problem="closed.gguf: (cannot be read: Permission denied|no such file .or no access)",
        )


@pytest.mark.parametrize("n_left", [0, 5000, 200_000])
def test_a_file_that_shrinks_while_it_is_loaded(
    tmp_path: Path, tiny_model: TinyModelFactory, n_left: int
) -> None:
    """A map of the file would end the process with SIGBUS here."""
    path = tmp_path / "shrinking.gguf"
    path.write_bytes(tiny_model(tensor_type="Q4_0").read_bytes())
    assert n_left < path.stat().st_size

    def shrink(stage: str, done: int, total: int) -> None:
        os.truncate(path, n_left)

    with pytest.raises(FormatError, match=f"^{path}: the file became shorter while"):
        LLM(path, on_progress=shrink)


def test_a_file_replaced_while_it_is_loaded_stays_the_old_one(
    tmp_path: Path, tiny_model: TinyModelFactory
) -> None:
    path = tmp_path / "replaced.gguf"
    path.write_bytes(tiny_model(tensor_type="Q4_0").read_bytes())
    other = tmp_path / "other.gguf"

    def replace(stage: str, done: int, total: int) -> None:
        other.write_bytes(b"GGUF")
        os.replace(other, path)

    with LLM(path, on_progress=replace) as llm:
        assert llm.config.architecture == "llama"
