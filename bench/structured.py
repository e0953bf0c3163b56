"""Structured output: how many sampled answers are valid, and what a form costs.

    python -m bench.structured MODEL -n 1000 --parallel 4
    python -m bench.structured MODEL -n 0 --cost 40

Answers come from ``edgeh2o serve``, sampled at temperature 1 without filters by a seed of their
own, in turns of four schemas (pydantic: bounded strings, numbers and lists, enumerations,
inner objects, alternatives). An answer is valid if pydantic reads it strictly; all of them end by
themselves, so that one cut off by its limit of tokens counts as wrong too. What a form costs is
measured alone on the machine: the seconds in the grammar as a share of those of decoding, and the
rates of answers with a form and of as many free tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from bench.soak import Server
from edgeh2o import LLM, SamplingParams
from edgeh2o.engine.grammar import GrammarState

Short = Annotated[str, Field(max_length=12)]
Size = Annotated[int, Field(ge=0, le=9999)]


class Place(BaseModel):
    """Strings, an enumeration, a number, a list, an inner object."""

    class Position(BaseModel):
        east: Annotated[int, Field(ge=-180, le=180)]
        is_exact: bool

    name: Short
    kind: Literal["city", "river", "person"]
    size: Size
    tags: Annotated[list[Annotated[str, Field(max_length=8)]], Field(max_length=2)]
    position: Position


class Order(BaseModel):
    """A list of objects of one class."""

    class Item(BaseModel):
        article: Short
        count: Annotated[int, Field(ge=1, le=20)]

    customer: Short
    items: Annotated[list[Item], Field(min_length=1, max_length=3)]


class Entry(BaseModel):
    """Alternatives, and what may be null or left out."""

    value: Size | Short | None
    note: Annotated[str, Field(max_length=30)] | None = None
    date: Annotated[str, Field(pattern=r"^20[0-9]{2}-[01][0-9]$")]


class Grid(BaseModel):
    """Lists of lists."""

    rows: Annotated[
        list[Annotated[list[Literal[0, 1]], Field(min_length=3, max_length=3)]],
        Field(min_length=2, max_length=3),
    ]


FORMS: tuple[type[BaseModel], ...] = (Place, Order, Entry, Grid)
MAX_TOKENS = 1000
FREE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def prompt_of(form: type[BaseModel]) -> str:
    """A request for an answer of a form."""
    return f"Make up one example of {form.__name__} ({', '.join(form.model_fields)}) as JSON."


def ask(server: Server, seed: int) -> str:
    """What became of one answer: "valid", or what is wrong with it."""
    form = FORMS[seed % len(FORMS)]
    schema = {"name": form.__name__, "schema": form.model_json_schema()}
    body = {
        "messages": [{"role": "user", "content": prompt_of(form)}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "seed": seed,
        "max_tokens": MAX_TOKENS,
        **FREE,
    }
    status, reply = server.post("/v1/chat/completions", json.dumps(body).encode())
    if status != 200:
        return f"status {status}: {reply.decode():.200}"
    choice = json.loads(reply)["choices"][0]
    if choice["finish_reason"] != "stop":
        return f"cut off at {MAX_TOKENS} tokens"
    try:
        form.model_validate_json(choice["message"]["content"], strict=True)
    except ValidationError as error:
        return f"{form.__name__}: {choice['message']['content']!r}: {error}"
    return "valid"


def count_valid(model: str, n_answers: int, parallel: int, flags: list[str]) -> int:
    """Prints how many answers are valid; returns how many are not."""
    server = Server(model, ["--parallel", str(parallel), *flags])
    started = time.monotonic()
    try:
        with ThreadPoolExecutor(parallel) as threads:
            became = Counter(threads.map(lambda seed: ask(server, seed), range(n_answers)))
    finally:
        server.stop()
    n_valid = became.pop("valid", 0)
    seconds = time.monotonic() - started
    print(f"{n_valid} of {n_answers} answers valid, in {seconds:.0f} s")
    for reason, count in became.most_common(20):
        print(f"{count} times {reason}")
    return n_answers - n_valid


class Stopwatch:
    """Adds up the seconds of the calls of a method."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds, self.n_calls = 0.0, 0
        method = getattr(owner, name)

        def timed(*args: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - begun
                self.n_calls += 1

        setattr(owner, name, timed)


def measure_cost(model: str, n_answers: int, threads: int | None) -> None:
    """Prints what the grammar takes, by default filters and without."""
    watches = {name: Stopwatch(GrammarState, name) for name in ("allows", "mask", "accept")}
    filters: dict[str, dict[str, Any]] = {"default filters": {}, "no filters": FREE}
    with LLM(model, threads=threads) as llm:
        llm.generate(prompt_of(Place), SamplingParams(schema=Place, max_tokens=8))
        for name, values in filters.items():
            for watch in watches.values():
                watch.seconds, watch.n_calls = 0.0, 0
            formed, free = zip(*_pairs(llm, n_answers, values), strict=True)
            (n_formed, formed_s), (n_free, free_s) = (
                map(sum, zip(*part, strict=True)) for part in (formed, free)
            )
            spent = sum(watch.seconds for watch in watches.values())
            print(
                f"{name}: {n_formed} tokens, {1e6 * spent / n_formed:.0f} us in the grammar each, "
                f"{spent / formed_s:.2%} of decoding; masks for "
                f"{watches['mask'].n_calls / n_formed:.0%} of them, "
                f"{1e6 * watches['mask'].seconds / max(1, watches['mask'].n_calls):.0f} us each; "
                f"{n_formed / formed_s:.1f} tokens/s with a form, {n_free / free_s:.1f} without"
            )


def _pairs(
    llm: LLM, n_answers: int, values: dict[str, Any]
) -> Iterator[tuple[tuple[int, float], tuple[int, float]]]:
    """(decoded tokens, seconds) of an answer with a form and of as many free tokens, in turns."""
    for seed in range(n_answers):
        form = FORMS[seed % len(FORMS)]
        common = {"seed": seed, "lookup": "off", **values}
        formed = llm.generate(
            prompt_of(form), SamplingParams(schema=form, max_tokens=MAX_TOKENS, **common)
        )
        n_tokens = formed.stats.generated_tokens
        free = llm.generate(
            prompt_of(form), SamplingParams(ignore_eos=True, max_tokens=n_tokens, **common)
        )
        yield (n_tokens - 1, formed.stats.decode_s), (n_tokens - 1, free.stats.decode_s)


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code: 1 if an answer is not valid."""
    given = sys.argv[1:] if arguments is None else arguments
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(prog="bench.structured", description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("-n", type=int, default=1000, help="answers of a server")
    parser.add_argument("--parallel", type=int, default=4, help="of them at once")
    parser.add_argument(
        "--cost", type=int, default=0, help="answers that are timed, with as many free ones"
    )
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args(given[:at])
    if args.cost:
        measure_cost(args.model, args.cost, args.threads)
    return int(args.n > 0 and count_valid(args.model, args.n, args.parallel, given[at + 1 :]) > 0)


if __name__ == "__main__":
    sys.exit(main())
