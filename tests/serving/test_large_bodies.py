"""Large bodies: streams go on while they are read, and requests keep their order."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from edgeh2o.serving.http_body import LARGE_BODY_BYTES, BodyReader
from tests.serving.conftest import RunningServer
from tests.serving.fetching import fetch

_LARGE, _SMALL = b"l" * LARGE_BODY_BYTES, b"s"


def test_requests_keep_their_order() -> None:
    """A small one behind a large one waits for it, and the event loop for neither."""
    may_end = threading.Event()
    order: list[bytes] = []

    def parse(data: bytes) -> bytes:
        assert data == _SMALL or may_end.wait(20)
        return data[:1]

    async def check() -> None:
        app: Any = None
        reader = BodyReader(app)

        async def ask(data: bytes) -> None:
            order.append(await reader.read(data, parse))

        tasks = [asyncio.create_task(ask(data)) for data in (_SMALL, _LARGE, _SMALL, _LARGE)]
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert order == [b"s"]
        may_end.set()
        await asyncio.gather(*tasks)

    asyncio.run(check())
    assert order == [b"s", b"l", b"s", b"l"]


def test_a_body_that_is_none_leaves_the_turn_to_the_next() -> None:
    def refuse(_: bytes) -> None:
        raise ValueError("no body")

    async def check() -> list[Any]:
        app: Any = None
        reader = BodyReader(app)
        reads = (reader.read(data, refuse) for data in (_LARGE, _SMALL, _LARGE))
        return await asyncio.gather(*reads, return_exceptions=True)

    assert [str(error) for error in asyncio.run(check())] == ["no body"] * 3


def test_the_server_answers_others_meanwhile(serving_model: Path, tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    code = (
        "import json, sys, time; from pathlib import Path; from edgeh2o.serving import fields\n"
        "def loads(text, loads=json.loads, **options):\n"
        f"    if len(text) > 1_000_000:\n"
        f"        Path({str(begun)!r}).touch()\n"
        f"        while not Path({str(go)!r}).exists():\n"
        "            time.sleep(0.01)\n"
        "    return loads(text, **options)\n"
        "fields.json.loads = loads\n"
        "from edgeh2o.__main__ import main; sys.exit(main())"
    )
    server = RunningServer(serving_model, tmp_path / "log", program=("-c", code))
    fields = {"prompt": "the hen", "max_tokens": 2, "user": "x" * 2**20}
    body, headers = json.dumps(fields).encode(), {"content-type": "application/json"}
    try:
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(fetch, server, "/v1/completions", body, headers)
            while not begun.exists():
                assert not answer.done()
                time.sleep(0.01)
            assert fetch(server, "/health").json() == {"status": "ok"}
            assert not answer.done()
            go.touch()
            assert answer.result(60).status_code == 200
    finally:
        go.touch()
        server.process.kill()
        server.process.wait()
