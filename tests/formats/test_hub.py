"""Models of the Hugging Face Hub, from a server on this machine that answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edgeh2o.errors import UsageError
from edgeh2o.formats.hub import HubFile, _choose_files, read_hub_name
from tests.tiny_models import TinyModelFactory

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# The first is larger than the pieces in which the library writes what it gets.
FILES = {
    "tiny-Q4_0.gguf": b"GGUF" + bytes(range(256)) * 94_000,
    "tiny-Q8_0.gguf": b"GGUF8",
    "README.md": b"# tiny",
}


class Hub(ThreadingHTTPServer):
    """``files`` of the one repository org/tiny; the first answer of some is cut in the middle.

    Requests of paths that begin with ``silent``, if that is set, get no answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(FILES)
        self.sha256 = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
        self.cut: set[str] = set()
        self.silent = ""
        self.closing = threading.Event()
        self.ranges: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.server.silent and path.startswith(self.server.silent):
            self.server.closing.wait()
            self.close_connection = True
            return
        if path.startswith("/api/models/org/tiny"):
            siblings = [
                {
                    "rfilename": name,
                    "size": len(data),
                    "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
                    **self.lfs(name, data),
                }
                for name, data in self.server.files.items()
            ]
            body = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": siblings}
            self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self.give(path.removeprefix(f"/org/tiny/resolve/{COMMIT}/"))
        else:
            code = "GatedRepo" if "gated" in path else "RepoNotFound"
            self.answer(403 if "gated" in path else 404, b"", {"X-Error-Code": code})

    def lfs(self, name: str, data: bytes) -> dict[str, object]:
        if not name.endswith((".gguf", ".safetensors")):
            return {}
        sha256 = self.server.sha256.get(name) or hashlib.sha256(data).hexdigest()
        return {"lfs": {"size": len(data), "sha256": sha256, "pointerSize": 130}}

    def give(self, name: str) -> None:
        data = self.server.files[name]
        etag = hashlib.sha256(data).hexdigest()
        head = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            self.answer(200, data, head)
            return
        first, status = 0, 200
        if wanted := self.headers.get("Range"):
            self.server.ranges.append(wanted)
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            status = 206
            head["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        if name in self.server.cut:
            self.server.cut.remove(name)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self.answer(status, data[first:], head)

    def answer(self, status: int, body: bytes, head: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in head.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


def pull(name: str, home: Path, endpoint: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run_command(["pull", name], home, endpoint, **more)


def run_command(
    words: list[str], home: Path, endpoint: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the library reads its settings when it is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "EDGEH2O_"))}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    environment |= {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"} | more
    command = [sys.executable, "-m", "edgeh2o", *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_file_is_fetched_checked_and_gone_on_with(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    hub.cut.add("tiny-Q4_0.gguf")
    result = pull("org/tiny:q4_0", tmp_path, hub.endpoint)
    if result.returncode:  # versions differ in whether they try again themselves
        result = pull("org/tiny:q4_0", tmp_path, hub.endpoint)
    assert result.returncode == 0, result.stderr
    assert hub.ranges and hub.ranges[-1] != "bytes=0-"
    path = Path(result.stdout.strip())
    assert path.name == "tiny-Q4_0.gguf" and path.read_bytes() == FILES["tiny-Q4_0.gguf"]
    assert "fetching org/tiny/tiny-Q4_0.gguf (24 MB)" in result.stderr


def test_a_model_is_run_from_the_hub_and_found_there_again(
    hub: Hub, tmp_path: Path, tiny_model: TinyModelFactory
) -> None:
    pytest.importorskip("huggingface_hub")
    hub.files["tiny-Q8_0.gguf"] = data = tiny_model(tensor_type="Q8_0").read_bytes()
    hub.sha256["tiny-Q8_0.gguf"] = hashlib.sha256(data).hexdigest()
    words = ["run", "-hf", "org/tiny:Q8_0", "-p", "a", "-n", "2", "--temp", "0"]
    first = run_command(words, tmp_path, hub.endpoint)
    assert first.returncode == 0, first.stderr
    assert "fetching org/tiny/tiny-Q8_0.gguf" in first.stderr
    nowhere = "http://127.0.0.1:9"
    again = run_command(words, tmp_path, nowhere)
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    words[1:3] = []
    of_variable = run_command(words, tmp_path, nowhere, EDGEH2O_HF_REPO="org/tiny:Q8_0")
    assert (of_variable.returncode, of_variable.stdout) == (0, first.stdout), of_variable.stderr
    # Which files the repository has beside it is asked, and which are in it.
    for name in ("org/tiny", "org/tiny:Q4_0"):
        missing = run_command(["run", "-hf", name, "-p", "a"], tmp_path, nowhere)
        assert missing.returncode == 1 and "cannot be fetched from" in missing.stderr


def test_a_folder_of_safetensors_is_fetched_without_code(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    hub.files = {
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights",
        "consolidated.safetensors": b"weights again",
        "modeling_tiny.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
    }
    result = pull("org/tiny", tmp_path, hub.endpoint)
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.strip())
    names = sorted(path.name for path in folder.rglob("*") if path.is_file())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tool_use.jinja"]


def test_what_cannot_be_fetched_is_one_line(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    hub.sha256["tiny-Q8_0.gguf"] = "0" * 64
    nowhere = "http://127.0.0.1:9"
    for name, endpoint, code, problem in (
        ("org/tiny", hub.endpoint, 2, "name the file, as in org/tiny:Q4_K_M; it has 'tiny-Q4_0"),
        ("org/tiny:Q8_0", hub.endpoint, 1, "has the checksum"),
        ("org/none", hub.endpoint, 1, "is not on http://127.0.0.1"),
        ("org/gated", hub.endpoint, 1, "accepted its licence"),
        ("org/tiny:Q4_0", nowhere, 1, "cannot be fetched from http://127.0.0.1:9"),
    ):
        result = pull(name, tmp_path, endpoint)
        assert result.returncode == code, result.stderr
        errors = [line for line in result.stderr.splitlines() if line.startswith("edgeh2o: error")]
        assert len(errors) == 1 and problem in errors[0], result.stderr
        assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("tiny-Q8_0.gguf"))


def test_names_say_which_file_is_meant() -> None:
    def choose(wanted: str | None, *names: str) -> list[str]:
        files = [HubFile(name, 1, "0", None) for name in names]
        return [file.name for file in _choose_files("org/name", wanted, files)]

    assert choose(None, "a.gguf", "README.md") == ["a.gguf"]
    assert choose("q4_k", "a-Q4_K_M.gguf", "a-Q4_K.gguf") == ["a-Q4_K.gguf"]
    parts = [f"Q8_0/a-Q8_0-{i:05}-of-00003.gguf" for i in (3, 1, 2)]
    assert choose("Q8_0", "a-Q4_0.gguf", *parts) == sorted(parts)


@pytest.mark.parametrize("silent", ["/api", "/org/tiny/resolve"])
def test_a_hub_that_does_not_answer_is_not_waited_for(
    hub: Hub, tmp_path: Path, silent: str
) -> None:
    pytest.importorskip("huggingface_hub")
    hub.silent = silent
    result = pull("org/tiny:Q8_0", tmp_path, hub.endpoint, HF_HUB_ETAG_TIMEOUT="1")
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith(f"edgeh2o: error: {hub.endpoint} does not answer for org/tiny; check")
    assert "HF_HUB_ETAG_TIMEOUT is 1 s" in error
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("HF_HUB_OFFLINE", "1", "HF_HUB_OFFLINE forbids to fetch anything; unset it"),
        ("TRANSFORMERS_OFFLINE", "1", "TRANSFORMERS_OFFLINE forbids to fetch"),
        ("HF_HUB_ETAG_TIMEOUT", "soon", "cannot read one of its variables HF_...: invalid literal"),
        ("HF_ENDPOINT", "mirror.local", "HF_ENDPOINT='mirror.local' is not the address of a hub"),
    ],
)
def test_the_variable_that_forbids_is_named(
    tmp_path: Path, variable: str, value: str, problem: str
) -> None:
    pytest.importorskip("huggingface_hub")
    settings = {"endpoint": "http://127.0.0.1:9"}
    if variable == "HF_ENDPOINT":
        settings["endpoint"] = value
    else:
        settings[variable] = value
    result = pull("org/tiny", tmp_path, **settings)
    assert result.returncode == 2
    assert result.stderr.startswith("edgeh2o: error: ") and result.stderr.count("\n") == 1
    assert problem in result.stderr


def test_names_and_addresses_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.local:8000/hub/")
    for text, name in {
        "org/name": "org/name",
        "org/name:Q4_K_M": "org/name:Q4_K_M",
        "https://huggingface.co/org/name": "org/name",
        "http://www.huggingface.co/org/name/": "org/name",
        "HTTPS://huggingface.co/org/name/tree/main?x=y#z": "org/name",
        "https://huggingface.co/org/name/blob/main/a.gguf": "org/name:a.gguf",
        "https://huggingface.co/org/name/resolve/main/b/a%2D1.gguf?download=true": (
            "org/name:b/a-1.gguf"
        ),
        "hf.co/org/name:Q4_K_M": "org/name:Q4_K_M",
        "huggingface.co/org/name": "org/name",
        "http://mirror.local:8000/hub/org/name": "org/name",
        "mirror.local:8000/hub/org/name": "org/name",
        "smollm2-135m": None,
        "a/b/c": None,
        "/etc": None,
        "../etc": None,
        "../../etc": None,
        "": None,
        "/": None,
        "nul/\0": None,
        "[/]": None,
    }.items():
        assert read_hub_name(text) == name, text
    for text in (
        "https://huggingface.co",
        "https://huggingface.co/gpt2",
        "https://huggingface.co/datasets/org/name",
        "https://huggingface.co/org/name/tree/older",
        "https://huggingface.co/org/../name",
        "https://example.com/org/name",
        "https://[/org/name",
        "hf.co/org",
    ):
        with pytest.raises(UsageError, match="use org/name"):
            read_hub_name(text)


def test_an_address_is_fetched_from_the_mirror(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    result = pull("https://huggingface.co/org/tiny:Q8_0", tmp_path, hub.endpoint)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).read_bytes() == FILES["tiny-Q8_0.gguf"]
