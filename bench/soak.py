"""A server under mixed load for a while: nothing is lost, crossed or kept for ever.

    python -m bench.soak MODEL --seconds 3600
    python -m bench.soak MODEL --seconds 300 --requests 20000 -- --parallel 4 -ub 64 -b 256

Starts ``edgeh2o serve`` on this machine alone and sends it requests of several threads: short and
long ones, questions on the same documents, streams, structured output, calls of tools, bodies that
are wrong, and requests that are given up. What a request must be answered with was asked for
before, one by one: an answer of another is found by that. Every ten seconds a line says what was
answered and what the server's process holds. Time in which the machine or this process was stopped
does not count. At the end nothing may be in progress. Runs of ten minutes and more must keep their
memory within two percent after the first sixth, shorter ones only within 8 MiB, because an
allocator keeps pages for a while. Ends with 1 if a request was lost or crossed, or memory grew.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import statistics
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
REQUEST_S = 3600.0  # of a request; a machine that is stopped for a while is no failure
# Of the run, until pools, caches and the allocator have taken what they will.
WARM_SHARE = 1 / 6
MOST_GROWTH = 0.02
SHORT_RUN_S = 600.0
SHORT_RUN_GROWTH_BYTES = 8 * 2**20
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

    def gauges(self) -> dict[str, float]:
        """What ``/metrics`` says, of lines without labels."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        found = (re.fullmatch(r"(\w+) ([-+.\dene]+)", line) for line in lines)
        return {match[1]: float(match[2]) for match in found if match}

    def stop(self) -> int:
        """Ends it in good order; returns its exit code."""
        self.process.terminate()
        return self.process.wait(120)

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and text of an answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S)
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
    server = Server(args.model, ["--prefix-cache-ram", "16M", *given[at + 1 :]])
    try:
        return _run(server, args)
    finally:
        server.process.kill()
        server.process.wait()


def _run(server: Server, args: argparse.Namespace) -> int:
    soak = Soak(server, args.seed, args.requests)
    soak.learn()
    interval_s = min(NOTE_S, max(0.1, args.seconds / 30))
    passed, looked_at = 0.0, time.monotonic()
    sizes = []
    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(soak.client, args.seed + n) for n in range(CLIENTS)]
        while not soak.is_over.wait(interval_s):
            now = time.monotonic()
            passed += min(now - looked_at, 2 * interval_s)  # more: somebody stopped this process
            looked_at = now
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
    left = _wait_until_idle(server)
    code = server.stop()
    print(f"{soak.n_sent} requests in {passed:.0f} s: {dict(soak.counts)}; exit {code}")
    problems = soak.wrong[:10] + left + _judge_memory(sizes, passed)
    if "Traceback" in server.log():
        problems.append(server.log()[-3000:])
    print("\n".join(problems) or "nothing was lost or crossed")
    return int(bool(problems) or code != 0)


def _wait_until_idle(server: Server) -> list[str]:
    """What is wrong with a server whose clients have all gone."""
    names = ("edgeh2o_requests_running", "edgeh2o_requests_waiting")
    end = time.monotonic() + 60
    while any(left := [server.gauges()[name] for name in names]) and time.monotonic() < end:
        time.sleep(0.1)
    return [f"{left[0]:.0f} requests are still at work, {left[1]:.0f} wait"] if any(left) else []


def _judge_memory(sizes: list[tuple[float, int]], seconds: float) -> list[str]:
    """What is wrong with resident memory over time; prints what it was."""
    later = [size for passed, size in sizes if passed >= WARM_SHARE * seconds]
    if not later:
        return []
    thirds = max(1, len(later) // 3)
    first, last = (statistics.median(part) for part in (later[:thirds], later[-thirds:]))
    least, most = min(later), max(later)
    growth = (last - first) / first
    print(
        f"memory after the first sixth: {least / 2**20:.1f} to {most / 2**20:.1f} MiB; medians of "
        f"the first and the last third {first / 2**20:.1f} and {last / 2**20:.1f} ({growth:+.2%})"
    )
    room = MOST_GROWTH * first
    if seconds < SHORT_RUN_S:
        room = max(room, SHORT_RUN_GROWTH_BYTES)
    return [f"memory grew by {growth:.1%}"] if last - first > room else []


if __name__ == "__main__":
    sys.exit(main())
