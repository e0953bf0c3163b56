"""Times of a server: questions on long documents, answers side by side, short beside long ones.

What guesses are worth is shown by ``--parts parallel edits mixed``, at a server with
``--lookup off`` and at one without.

    edgeh2o serve MODEL --port 8080 -c 16384 &
    python -m bench.serving http://127.0.0.1:8080 --tokens 8000
    llama-server -m MODEL --port 8081 -c 65536 -np 4 &
    python -m bench.serving http://127.0.0.1:8081 --tokens 8000

The same requests go to both: streams of /v1/chat/completions at temperature 0. The time to the
first token is that of the first chunk with text, the rate that of the chunks after it. The document
is made of numbered sentences by a seed; a run takes a new one, so that nothing of it is cached.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from threading import Event
from urllib.parse import urlsplit

from .errors import LlamaCppError
from .reporting import run_script

TEXT = """
river stone garden window letter winter market engine bridge forest candle morning
silver doctor island mountain paper copper summer valley harbour teacher yellow
distant quiet narrow broken ancient carries follows answers repairs watches crosses
reaches gathers
"""
WORDS = TEXT.split()
PARTS = ("documents", "parallel", "edits", "mixed", "beside")
EDITED_TOKENS = 300  # of a text that answers repeat


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds to the first text, and the tokens of the answer."""

    ttft_s: float
    n_tokens: int


def ask(url: str, content: str, n_tokens: int, is_over: Event | None = None) -> Timing:
    """Streams one answer, until ``is_over``. Raises ValueError for what is none.

    A prompt that is still read gives no lines at llama-server, so that its connection is watched.
    """
    parts = urlsplit(url)
    connection = HTTPConnection(str(parts.hostname), parts.port, timeout=3600)
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": n_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "cache_prompt": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    if is_over is not None:
        assert connection.sock is not None
        while not select.select([connection.sock], [], [], 0.05)[0]:
            if is_over.is_set():
                connection.close()  # the server gives the request up
                return Timing(0.0, 0)
    response = connection.getresponse()
    if response.status != 200:
        raise LlamaCppError(f"{url} answers {response.status}: {response.read().decode():.300}")
    first = 0.0
    n_made = 0
    for line in response:
        if is_over is not None and is_over.is_set():
            break
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        n_made = (chunk.get("usage") or {}).get("completion_tokens", n_made)
        choices = chunk.get("choices") or [{}]
        if choices[0].get("delta", {}).get("content"):
            first = first or time.perf_counter() - started
    connection.close()
    return Timing(first, n_made)


def make_document(seed: int, n_tokens: int) -> str:
    """About so many tokens of numbered sentences of common words."""
    draw = random.Random(seed)
    sentences = []
    n_words = 0
    while n_words * 1.3 < n_tokens:
        words = draw.choices(WORDS, k=draw.randint(6, 12))
        n_words += len(words) + 2
        sentences.append(f"{len(sentences) + 1}. The {' '.join(words)}.")
    return "\n".join(sentences)


def measure_document(url: str, seed: int, n_tokens: int) -> Iterator[tuple[str, float]]:
    """Seconds to the first token of questions on one document, one after the other."""
    document = make_document(seed, n_tokens)
    middle = len(document) // 2
    changed = f"{document[:middle]} CHANGED {document[middle:]}"
    questions = {
        "cold": f"{document}\n\nWhat is sentence 7?",
        "second question": f"{document}\n\nHow does it end?",
        "third question": f"{document}\n\nWhat is the longest sentence?",
        "changed middle": f"{changed}\n\nHow does it end?",
    }
    for name, content in questions.items():
        yield name, ask(url, content, 4).ttft_s


def make_stories(n_requests: int) -> list[str]:
    """Questions whose answers repeat nothing."""
    return [f"Tell story number {number} of a bridge." for number in range(n_requests)]


def make_edits(n_requests: int, seed: int) -> list[str]:
    """Texts to be changed in little, each its own."""
    texts = [make_document(100 * seed + number, EDITED_TOKENS) for number in range(n_requests)]
    return [f"{text}\n\nRepeat all sentences above as they are." for text in texts]


def measure_parallel(url: str, questions: Sequence[str], n_tokens: int) -> float:
    """Tokens per second of the answers to all at once, from the first text to the end."""
    begun = [0.0] * len(questions)

    def measure(number: int) -> int:
        started = time.perf_counter()
        timing = ask(url, questions[number], n_tokens)
        begun[number] = started + timing.ttft_s
        return timing.n_tokens

    with ThreadPoolExecutor(len(questions)) as threads:
        n_made = sum(threads.map(measure, range(len(questions))))
    return n_made / (time.perf_counter() - min(begun))


def make_questions(part: str, n_requests: int, seed: int) -> list[str]:
    """Of a part: "parallel" stories, "edits", or "mixed": an edit beside stories."""
    if part == "parallel":
        return make_stories(n_requests)
    edits = make_edits(n_requests if part == "edits" else 1, seed)
    return edits + make_stories(n_requests - len(edits))


def measure_beside(url: str, seed: int, n_tokens: int) -> tuple[float, float]:
    """Seconds to the first token of a short request, alone and while a long prompt is read.

    The long prompt is given up then. If it was read before, a line says so: the short one had to
    wait for all of it, or it was not long enough.
    """
    alone = ask(url, f"Say hello {seed} times.", 4).ttft_s
    is_over = Event()
    with ThreadPoolExecutor(1) as threads:
        document = make_document(seed, n_tokens)
        long = threads.submit(ask, url, f"{document}\n\nWhat is sentence 9?", 4, is_over)
        try:
            time.sleep(2.0)
            beside = ask(url, f"Say good morning {seed} times.", 4).ttft_s
        finally:
            is_over.set()
        if long.result().n_tokens:
            print(f"the long prompt of seed {seed} was over by then")
    return alone, beside


def _describe(values: Sequence[float]) -> str:
    """The median, and all of several."""
    each = "" if len(values) < 2 else f" ({', '.join(f'{value:.3f}' for value in values)})"
    return f"{statistics.median(values):.3f}{each}"


def wait_until_ready(url: str, seconds: float = 300.0) -> None:
    """Returns once the server has loaded its model: /health is 200.

    Raises LlamaCppError for a server that is not there, or still loads after so many seconds.
    """
    until = time.monotonic() + seconds
    while True:
        connection = HTTPConnection(urlsplit(url).netloc, timeout=30)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        except OSError as error:
            raise LlamaCppError(f"no server answers at {url}: {error}") from None
        finally:
            connection.close()
        if status == 200:
            return
        if time.monotonic() > until:
            raise LlamaCppError(f"{url}/health answers {status} for {seconds:.0f} s")
        time.sleep(0.25)


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.serving", description=__doc__.split("\n")[0])
    parser.add_argument("url", help="where the server listens")
    parser.add_argument("--tokens", type=int, default=8000, help="of the document")
    parser.add_argument("--long", type=int, help="tokens of the prompt beside a short request")
    parser.add_argument("--answer", type=int, default=64, help="tokens of the parallel answers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args(arguments)
    wait_until_ready(args.url)
    seeds = range(args.seed, args.seed + args.rounds)
    for seed in seeds if "documents" in args.parts else ():
        for name, seconds in measure_document(args.url, seed, args.tokens):
            print(f"TTFT, {name}: {seconds:.3f} s", flush=True)
    for part in PARTS[1:4]:
        for n_requests in (1, 2, 4) if part in args.parts else ():
            rates = [
                measure_parallel(args.url, make_questions(part, n_requests, seed), args.answer)
                for seed in seeds
            ]
            name = "" if part == "parallel" else f"{part}, "
            print(f"{name}{n_requests} at once: {_describe(rates)} tokens/s", flush=True)
    if "beside" in args.parts:
        pairs = [
            measure_beside(args.url, seed + 1000, args.long or 2 * args.tokens) for seed in seeds
        ]
        alone, beside = zip(*pairs, strict=True)
        print(f"TTFT of a short request: {_describe(alone)} s")
        print(f"while a long prompt is read: {_describe(beside)} s")
    return 0


if __name__ == "__main__":
    run_script(main)
