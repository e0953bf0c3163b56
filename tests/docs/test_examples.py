"""The scripts of examples/, as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.serving.conftest import RunningServer
from tests.tiny_models import TinyModelFactory

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DOCUMENT = "the hen is in the pen and the art is there. " * 100


def _run(name: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result


def test_all_are_run_and_named() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tests = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"`examples/{path.name}`" in readme
        assert tests.count(f'"{path.name}"') > 0


def test_a_document_is_read_once(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    document, model = tmp_path / "document.txt", str(tiny_model(tensor_type="Q4_0"))
    document.write_text(DOCUMENT)
    read = []
    for question in ("Who is there?", "Where is the hen?"):
        result = _run("ask_document.py", str(document), question, "--model", model)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip()
        counts = result.stderr.splitlines()[-1].split()
        read.append((int(counts[0]), int(counts[2])))
    (first, whole), (second, _) = read
    assert first == whole > 1600
    assert second < 0.7 * first
    (tmp_path / "document.txt.session").write_bytes(b"damaged")
    result = _run("ask_document.py", str(document), "Where?", "--model", model)
    assert result.returncode == 1 and "document.txt.session" in result.stderr


def test_a_conversation_keeps_its_cache(tiny_model: TinyModelFactory) -> None:
    model = str(tiny_model(tensor_type="Q4_0"))
    result = _run("chat.py", model, text="the hen\nthe pen\n\nnot this\n")
    assert result.returncode == 0, result.stderr
    notes = [line for line in result.stderr.splitlines() if line.startswith("[")]
    first, second = (line.strip("[]").split() for line in notes)
    assert first[3] == "0" and int(second[3]) >= int(first[0]) > 0


def test_a_client_asks_twice_about_a_document(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text(DOCUMENT)
    server = RunningServer(tiny_model(tensor_type="Q4_0"), tmp_path / "log")
    try:
        result = _run(
            "server_client.py", str(document), "Who?", "Where?", "--url", f"{server.url}/v1"
        )
    finally:
        server.stop()
    assert result.returncode == 0, result.stderr
    kept = [int(line[1:].split()[0]) for line in result.stdout.splitlines() if "were there" in line]
    assert kept[0] == 0 and kept[1] > 1600


def test_what_cannot_be_had_takes_one_line(tmp_path: Path) -> None:
    """These ended with a traceback."""
    missing, document = str(tmp_path / "none.txt"), tmp_path / "document.txt"
    document.write_text(DOCUMENT)
    for arguments, code, part in (
        (("ask_document.py", missing, "Who?"), 2, "none.txt cannot be read"),
        (("server_client.py", missing, "Who?"), 2, "none.txt cannot be read"),
        (
            ("server_client.py", str(document), "Who?", "--url", "http://127.0.0.1:9/v1"),
            1,
            "nobody answers at http://127.0.0.1:9/v1; start 'edgeh2o serve'",
        ),
        (("chat.py", str(tmp_path / "none.gguf")), 1, "none.gguf: no such file"),
    ):
        result = _run(*arguments)
        assert (result.returncode, result.stdout) == (code, "")
        assert part in result.stderr.splitlines()[-1]


def test_the_attention_core_alone() -> None:
    result = _run("attention_core.py")
    assert result.returncode == 0, result.stderr
    error, keys = result.stdout.splitlines()
    assert 0 < float(error.rpartition(" ")[2]) < 1
    assert "256 of 1792 earlier keys" in keys
