"""A server under mixed load for a while: nothing is lost, crossed or kept for ever.

    python -m bench.soak MODEL --seconds 3600
    python -m bench.soak MODEL --seconds 300 --requests 20000 -- --parallel 4 -ub 64 -b 256

Starts ``edgeh2o serve`` on this machine alone and sends it requests of several threads: short and
long ones, questions on the same documents, streams, structured output, calls of tools, bodies that
are wrong, and requests that are given up. What a request must be answered with was asked for
before, one by one: an answer of another is found by that. Every ten seconds a line says what was
answered and what the server's process holds; after the first third its memory must stay within two
percent. Ends with 1 if a request was lost or crossed, or memory grew.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from threading import Event, Lock
from typing import Any

import psutil

from bench.serving import make_document

N_DOCUMENTS, N_KNOWN = 6, 24
CLIENTS = 6
NOTE_S = 10.0
MOST_GROWTH = 0.02
# Pages that the allocator keeps for a moment, whatever the size of the process.
LEAST_GROWTH_BYTES = 8 * 2**20
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}, "s": {"type": "string", "maxLength": 6}},
    "required": ["n", "s"],
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


class Server:
    """A process of ``edgeh2o serve`` that listens on a port of this machine."""

    def __init__(self, model: str, arguments: list[str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "edgeh2o", "serve", model, "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stderr=self._log)
        self.port = 0
        while not self.port:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended: {self.log()}")
            time.sleep(0.05)
            found = re.search(r" at http://127\.0\.0\.1:(\d+)", self.log())
            self.port = int(found[1]) if found else 0
        self._memory = psutil.Process(self.process.pid)

    def log(self) -> str:
        """What it has written so far."""
        self._log.seek(0)
        return self._log.read()

    def rss(self) -> int:
        """Bytes of memory that it holds."""
        return int(self._memory.memory_info().rss)

    def stop(self) -> int:
        """Ends it in good order; returns its exit code."""
        self.process.terminate()
        return self.process.wait(120)

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and text of an answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def give_up(self, path: str, body: bytes, after_s: float) -> None:
        """Sends a request and goes."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(after_s)


class Soak:
    """Clients that send requests until the time or the number is up."""

    def __init__(self, server: Server, seed: int, most: int) -> None:
        self._server, self._most = server, most
        self._documents = [make_document(seed + n, 150 + 120 * n) for n in range(N_DOCUMENTS)]
        self._lock = Lock()
        self._expected: dict[int, str] = {}
        self.is_over = Event()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.n_sent = 0

    def learn(self) -> None:
        """Asks for what the answers must be, one by one."""
        for number in range(N_KNOWN):
            status, text = self._server.post(CHAT, _encode(self._known(number)))
            if status != 200:
                raise SystemExit(f"the server answers {status}: {text.decode()[:300]}")
            self._expected[number] = _text_of(text)

    def _known(self, number: int) -> dict[str, Any]:
        """A request whose answer is always the same."""
        document = self._documents[number % N_DOCUMENTS]
        return _chat(f"{document}\n\nQuestion {number}?", seed=number, max_tokens=4 + number % 13)

    def client(self, seed: int) -> None:
        """One client's requests."""
        draw = random.Random(seed)
        while not self.is_over.is_set():
            with self._lock:
                self.n_sent += 1
                if self.n_sent >= self._most:
                    self.is_over.set()
            kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
            try:
                problem = getattr(self, f"_{kind}")(draw)
            except (OSError, HTTPException, ValueError, KeyError, IndexError) as error:
                problem = f"{type(error).__name__}: {error}"
            with self._lock:
                self.counts[kind] += 1
                if problem:
                    self.wrong.append(f"{kind}: {problem:.300}")

    def _repeated(self, draw: random.Random) -> str | None:
        number = draw.randrange(N_KNOWN)
        status, text = self._server.post(CHAT, _encode(self._known(number)))
        got = _text_of(text) if status == 200 else f"status {status}"
        is_right = got == self._expected[number]
        return None if is_right else f"{got!r} is not {self._expected[number]!r}"

    def _streamed(self, draw: random.Random) -> str | None:
        number = draw.randrange(N_KNOWN)
        body = _encode(self._known(number) | {"stream": True})
        status, stream = self._server.post(CHAT, body)
        got = ""
        for line in stream.decode().split("\n\n"):
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                got += choices[0]["delta"].get("content") or "" if choices else ""
        is_right = got == self._expected[number] and stream.endswith(b"[DONE]\n\n")
        return None if is_right else f"{status}, {got!r} is not {self._expected[number]!r}"

    def _new(self, draw: random.Random) -> str | None:
        text = make_document(draw.randrange(10**9), draw.randrange(20, 700))
        status, reply = self._server.post(CHAT, _encode(_chat(text, max_tokens=6)))
        return None if status == 200 else f"status {status}: {reply.decode()}"

    def _structured(self, draw: random.Random) -> str | None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        body = _chat("the hen", seed=draw.randrange(99), max_tokens=100, response_format=form)
        status, reply = self._server.post(CHAT, _encode(body))
        choice = json.loads(reply)["choices"][0]
        if choice["finish_reason"] != "stop":
            return None
        is_right = set(json.loads(choice["message"]["content"])) == {"n", "s"}
        return None if is_right else f"status {status}: {reply.decode()}"

    def _called(self, draw: random.Random) -> str | None:
        tools = {"tools": [TOOL], "tool_choice": "required"}
        body = _chat("the hen", seed=draw.randrange(99), max_tokens=100, **tools)
        status, reply = self._server.post(CHAT, _encode(body))
        return None if status == 200 else f"status {status}: {reply.decode()}"

    def _bad(self, draw: random.Random) -> str | None:
        body = draw.choice([b"{", b"[]", b'{"messages": 5}', _encode(_chat("x", temperature=9))])
        status, reply = self._server.post(CHAT, body)
        return None if status == 400 else f"status {status}: {reply.decode()}"

    def _given_up(self, draw: random.Random) -> str | None:
        text = make_document(draw.randrange(10**9), 1500)
        body = _encode(_chat(text, max_tokens=500, stream=draw.random() < 0.5))
        self._server.give_up(CHAT, body, draw.random() * 0.3)
        return None


CHAT = "/v1/chat/completions"
KINDS = {
    "repeated": 30,
    "streamed": 20,
    "new": 15,
    "structured": 8,
    "called": 5,
    "bad": 12,
    "given_up": 10,
}


def _chat(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **options}


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _text_of(reply: bytes) -> str:
    return str(json.loads(reply)["choices"][0]["message"]["content"])


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--requests", type=int, default=10**6, help="most of them")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(given[:at])
    # A rule that learns nothing of the model meanwhile, which would change later answers.
    options = ["--prefix-cache-ram", "16M", "--attention", "h2o"]
    server = Server(args.model, [*options, *given[at + 1 :]])
    try:
        return _run(server, args)
    finally:
        server.process.kill()
        server.process.wait()


def _run(server: Server, args: argparse.Namespace) -> int:
    soak = Soak(server, args.seed, args.requests)
    soak.learn()
    started, sizes = time.monotonic(), []
    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(soak.client, args.seed + n) for n in range(CLIENTS)]
        while not soak.is_over.wait(min(NOTE_S, max(0.1, args.seconds / 30))):
            passed = time.monotonic() - started
            sizes.append((passed, server.rss()))
            print(
                f"{passed:7.0f} s: {soak.n_sent:6d} requests, {len(soak.wrong)} wrong, "
                f"{sizes[-1][1] / 2**20:.1f} MiB",
                flush=True,
            )
            if passed >= args.seconds:
                soak.is_over.set()
        for client in clients:
            client.result()
    code = server.stop()
    end = sizes[-1][0] if sizes else 0.0
    later = [size for passed, size in sizes if passed >= end / 3]
    thirds = max(1, len(later) // 3)
    first, last = (sorted(part)[len(part) // 2] for part in (later[:thirds], later[-thirds:]))
    growth = last - first
    print(f"{dict(soak.counts)}; memory {first / 2**20:.1f} to {last / 2**20:.1f} MiB; exit {code}")
    for problem in soak.wrong[:10]:
        print(problem)
    grows = growth > max(MOST_GROWTH * first, LEAST_GROWTH_BYTES)
    if grows:
        print(f"memory grew by {growth / first:.1%}")
    if "Traceback" in server.log():
        print(server.log()[-3000:])
    return int(bool(soak.wrong) or grows or code != 0 or "Traceback" in server.log())


if __name__ == "__main__":
    sys.exit(main())
