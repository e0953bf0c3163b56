"""Times of a server on long documents: the first question, the second, a changed middle; parallel.

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
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from urllib.parse import urlsplit

TEXT = """
river stone garden window letter winter market engine bridge forest candle morning
silver doctor island mountain paper copper summer valley harbour teacher yellow
distant quiet narrow broken ancient carries follows answers repairs watches crosses
reaches gathers
"""
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds to the first text and to the last, and the chunks with text."""

    ttft_s: float
    total_s: float
    n_chunks: int

    @property
    def rate(self) -> float:
        """Chunks per second after the first, which are tokens mostly."""
        return (self.n_chunks - 1) / max(1e-9, self.total_s - self.ttft_s)


def ask(url: str, content: str, n_tokens: int) -> Timing:
    """Streams one answer. Raises ValueError for what is none."""
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
    }
    started = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"{url} answers {response.status}: {response.read().decode():.300}")
    first = last = 0.0
    n_chunks = 0
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        choices = json.loads(line[6:]).get("choices") or [{}]
        if choices[0].get("delta", {}).get("content"):
            last = time.perf_counter() - started
            first = first or last
            n_chunks += 1
    connection.close()
    return Timing(first, last, n_chunks)


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


def measure_document(url: str, seed: int, n_tokens: int) -> dict[str, float]:
    """Seconds to the first token of questions on one document."""
    document = make_document(seed, n_tokens)
    middle = len(document) // 2
    changed = f"{document[:middle]} CHANGED {document[middle:]}"
    return {
        "cold": ask(url, f"{document}\n\nWhat is sentence 7?", 4).ttft_s,
        "second question": ask(url, f"{document}\n\nHow does it end?", 4).ttft_s,
        "changed middle": ask(url, f"{changed}\n\nHow does it end?", 4).ttft_s,
    }


def measure_parallel(url: str, n_requests: int, n_tokens: int) -> float:
    """Tokens per second of so many answers at once, from the start to the end of all."""
    questions = [f"Tell story number {number} of a bridge." for number in range(n_requests)]
    started = time.perf_counter()
    with ThreadPoolExecutor(n_requests) as threads:
        done = list(threads.map(lambda question: ask(url, question, n_tokens), questions))
    return sum(each.n_chunks for each in done) / (time.perf_counter() - started)


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.serving", description=__doc__.split("\n")[0])
    parser.add_argument("url", help="where the server listens")
    parser.add_argument("--tokens", type=int, default=8000, help="of the document")
    parser.add_argument("--answer", type=int, default=64, help="tokens of the parallel answers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args(arguments)
    rounds = [
        measure_document(args.url, args.seed + number, args.tokens) for number in range(args.rounds)
    ]
    for name in rounds[0]:
        print(f"TTFT, {name}: {statistics.median(each[name] for each in rounds):.3f} s")
    for n_requests in (1, 2, 4):
        rates = [measure_parallel(args.url, n_requests, args.answer) for _ in range(args.rounds)]
        print(f"{n_requests} at once: {statistics.median(rates):.1f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
