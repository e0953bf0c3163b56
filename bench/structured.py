"""Structured output: how many sampled answers are valid, and what the masks cost.

    python -m bench.structured MODEL -n 1000

Each answer is sampled with a seed of its own at temperature 1 and must be JSON of the schema, which
has strings, numbers, an enumeration, a list and an inner object; one that runs into its limit of
tokens is counted apart. The cost of the masks is the time in the grammar's processor as a share of
the whole time of decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from edgeh2o import LLM, SamplingParams
from edgeh2o.engine.grammar import GrammarProcessor

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["city", "river", "person"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
        "place": {
            "type": "object",
            "properties": {"east": {"type": "number"}},
            "required": ["east"],
        },
    },
    "required": ["name", "kind", "size", "tags", "place"],
}
PROMPT = "Describe something as JSON with name, kind, size, tags and place: "


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


def is_valid(text: str) -> bool:
    """Whether it is what the schema says."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and set(value) == set(SCHEMA["required"])
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and value["kind"] in ("city", "river", "person")
        and isinstance(value["size"], int)
        and 0 <= value["size"] <= 9999
        and len(value["tags"]) <= 2
        and all(isinstance(tag, str) and len(tag) <= 8 for tag in value["tags"])
        and set(value["place"]) == {"east"}
        and isinstance(value["place"]["east"], (int, float))
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code: 1 if an answer is not valid."""
    parser = argparse.ArgumentParser(prog="bench.structured", description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("-n", type=int, default=1000, help="answers")
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args(arguments)
    watches = [Stopwatch(GrammarProcessor, name) for name in ("process", "accept")]
    n_valid = n_cut = n_tokens = 0
    decode_s = 0.0
    with LLM(args.model, threads=args.threads) as llm:
        for seed in range(args.n):
            sampling = SamplingParams(
                schema=SCHEMA, seed=seed, temperature=1.0, top_p=1.0, top_k=0, max_tokens=200
            )
            made = llm.generate(PROMPT, sampling)
            n_tokens += made.stats.generated_tokens
            decode_s += made.stats.decode_s
            if made.finish_reason == "length":
                n_cut += 1
            elif is_valid(made.text):
                n_valid += 1
            else:
                print(f"seed {seed}: {made.text!r}")
    mask_s = sum(watch.seconds for watch in watches)
    print(f"{n_valid} of {args.n} answers valid, {n_cut} cut off at 200 tokens")
    print(
        f"{n_tokens} tokens, {1e6 * mask_s / max(1, watches[0].n_calls):.0f} us of masks each: "
        f"{mask_s / max(1e-9, decode_s):.1%} of {decode_s:.1f} s of decoding"
    )
    return int(n_valid + n_cut < args.n)


if __name__ == "__main__":
    sys.exit(main())
