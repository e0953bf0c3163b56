"""Connections that hold a place and say nothing, and how a server ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path

import pytest
import uvicorn
from uvicorn.server import ServerState

from edgeh2o.serving import timed_protocol
from edgeh2o.serving.listening import SILENCE_S, open_sockets
from edgeh2o.serving.timed_protocol import TimedProtocol
from tests.serving.conftest import RunningServer
from tests.serving.fetching import fetch

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


async def _application(scope: object, receive: object, send: Callable[..., object]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"GET", b" 400 "),
        (HEAD + b"X: 1\r\n", b" 400 "),
        (HEAD + b"\r\n" + HEAD, b" 200 "),  # the second one of a connection
    ],
)
def test_headers_that_never_end_close_the_connection(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, status: bytes
) -> None:
    monkeypatch.setattr(timed_protocol, "HEADER_TIMEOUT_S", 0.2)
    config = uvicorn.Config(_application, lifespan="off", timeout_keep_alive=1)

    async def talk() -> bytes:
        loop, state = asyncio.get_running_loop(), ServerState()
        protocol = lambda: TimedProtocol(config, state, {})  # noqa: E731
        serving = await loop.create_server(protocol, "127.0.0.1", 0)
        port = serving.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert not state.connections
        serving.close()
        return answer

    answer = asyncio.run(talk())
    assert status in answer and answer.count(b"HTTP/1.1") <= 1


@pytest.mark.skipif(sys.platform != "linux", reason="options of Linux")
def test_connections_of_clients_that_are_gone_end() -> None:
    with open_sockets(["127.0.0.1"], 0) as (listening,):
        with socket.create_connection(listening.getsockname()):
            connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit == SILENCE_S * 1000


@contextmanager
def answering(server: RunningServer) -> Iterator[HTTPResponse]:
    """A stream that is far from its end; of one that waits there is no answer yet."""
    fields = {"prompt": "the pen ", "max_tokens": 8000, "ignore_eos": True, "logprobs": 20}
    headers = {"Content-Type": "application/json"}
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        body = json.dumps({**fields, "stream": True}).encode()
        connection.request("POST", "/v1/completions", body, headers)
        with connection.getresponse() as stream:
            while not stream.readline().startswith(b"data: "):
                pass
            yield stream


def test_a_signal_ends_answers_after_their_time(serving_model: Path, tmp_path: Path) -> None:
    """Those that wait too, and each is told."""
    code = (
        "import sys; from edgeh2o.serving import app; app.DRAIN_S = 0.2\n"
        "from edgeh2o.__main__ import main; sys.exit(main())"
    )
    arguments = ("--parallel", "1", "--max-queue", "4", "--lookup", "off")
    server = RunningServer(serving_model, tmp_path / "log", arguments, program=("-c", code))
    try:
        with answering(server) as stream, ThreadPoolExecutor(1) as threads:
            body, headers = b'{"prompt": "a"}', {"content-type": "application/json"}
            waiting = threads.submit(fetch, server, "/v1/completions", body, headers)
            while "requests_waiting 1.0" not in fetch(server, "/metrics").text:
                time.sleep(0.01)
            server.process.terminate()
            text = stream.read().decode()
            assert "shutting down" in text and text.endswith("data: [DONE]\n\n")
            assert "shutting down" in waiting.result(20).text
        assert server.process.wait(20) == 0
    finally:
        server.process.kill()
        server.process.wait()
    assert "Traceback" not in server.log


def test_a_second_signal_does_not_wait(serving_model: Path, tmp_path: Path) -> None:
    server = RunningServer(serving_model, tmp_path / "log", ("--lookup", "off"))
    try:
        with answering(server) as stream:
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            server.process.send_signal(signal.SIGINT)
            server.process.wait(10)
            with suppress(HTTPException, OSError):  # cut off
                stream.read()
    finally:
        server.process.kill()
        server.process.wait()
    assert "Traceback" not in server.log


def test_ctrl_c_ends_the_waiting_for_the_disk(serving_model: Path, tmp_path: Path) -> None:
    """It took until all was written, for 30 seconds at most. No part of a file stays."""
    folder = tmp_path / "kept"
    code = (
        "import hashlib, sys, time; from edgeh2o.engine import session_file\n"
        "class Slow:\n"
        "    def __init__(self, **options): self._hash = hashlib.blake2b(**options)\n"
        "    def update(self, data): time.sleep(4); self._hash.update(data)\n"
        "    def digest(self): return self._hash.digest()\n"
        "session_file.blake2b = Slow\n"
        "from edgeh2o.__main__ import main; sys.exit(main())"
    )
    arguments = ("--prefix-cache-disk", f"{folder},64M", "-ub", "64", "-b", "256")
    server = RunningServer(serving_model, tmp_path / "log", arguments, program=("-c", code))
    fields, headers = {"max_tokens": 1}, {"content-type": "application/json"}
    try:
        for first in range(3, 6):
            body = json.dumps({"prompt": [first] * 400, **fields}).encode()
            assert fetch(server, "/v1/completions", body, headers).status_code == 200
        server.process.send_signal(signal.SIGINT)
        while not list(folder.glob(".edgeh2o-*.tmp")):
            assert server.process.poll() is None, server.log
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
    finally:
        server.process.kill()
        server.process.wait()
    assert not list(folder.glob("*.session")) and not list(folder.glob(".edgeh2o-*.tmp"))
    assert server.log.count("was not to wait for the disk") == 1
    assert "Traceback" not in server.log
