"""Windows on which long prompts show what they can do: copies, look-ups, prose, code, a dialogue.

Everything is made by a seed from word lists, and from texts that come with every Python: its manual
and its standard library. What is looked up stands far back: the last quarter of a window, which is
what is scored, asks for the rest.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .windows import find_beginning
from .words import draw_key, draw_name, draw_subject, encode, filler_sentences

if TYPE_CHECKING:
    from ..llm import LLM

# Of the manual, what `edgeh2o calibrate` reads is left out.
_SKIPPED_CHARACTERS = 100_000
_MODULES = ("tarfile", "typing", "asyncio.base_events", "email.message")

Window = NDArray[np.int32]


def make_window(llm: LLM, kind: str, length: int, *, seed: int = 0) -> Window:
    """Tokens [length] of a text of ``kind``, one of ``KINDS``; seeds give different texts.

    A model that begins its prompts with BOS gets it as the first token. Raises UsageError for an
    unknown kind, and for a length that the texts of this Python cannot fill.
    """
    if kind not in KINDS:
        raise UsageError(f"there are no texts of kind {kind!r}; use one of {', '.join(KINDS)}")
    tokens = KINDS[kind](llm, length, seed)
    if len(tokens) < length:
        raise UsageError(
            f"the text of kind {kind!r} has {len(tokens)} tokens, too few for a window of "
            f"{length}; use a smaller window or another seed"
        )
    window = np.array(tokens[:length], np.int32)
    first = find_beginning(llm)
    if first is not None:
        window[0] = first
    return window


def _prose(llm: LLM, length: int, seed: int) -> list[int]:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))[_SKIPPED_CHARACTERS:]
    tokens = encode(llm, text)
    start = seed * length % max(1, len(tokens) - length)
    return tokens[start : start + length]


def _code(llm: LLM, length: int, seed: int) -> list[int]:
    module = import_module(_MODULES[seed % len(_MODULES)])
    return encode(llm, inspect.getsource(module))[:length]


def _copied(source: Callable[[LLM, int, int], list[int]]) -> Callable[[LLM, int, int], list[int]]:
    """A text of half the length, and the same again."""

    def make(llm: LLM, length: int, seed: int) -> list[int]:
        half = source(llm, -(-length // 2), seed)
        return half + half

    return make


def _pairs(llm: LLM, length: int, seed: int) -> list[int]:
    """A table of key-value pairs, then the same pairs in another order."""
    rng = random.Random(seed)

    def draw() -> _Said:
        key = draw_key(rng)
        line = f"{key}: {rng.randrange(1000, 10000)}\n"
        return _Said(key, line, line)

    return _asked_again(llm, length, rng, draw, "Table\n", "\nSorted table\n")


def _table(llm: LLM, length: int, seed: int) -> list[int]:
    """Rows of a table as CSV, then the same as lines of JSON in another order."""
    rng = random.Random(seed)
    header = ("badge", "name", "room", "phone")

    def draw() -> _Said:
        numbers = rng.randrange(100, 1000), rng.randrange(1000, 10000)
        row = (draw_key(rng), draw_name(rng), *numbers)
        line = ",".join(map(str, row)) + "\n"
        return _Said(row[0], line, json.dumps(dict(zip(header, row, strict=True))) + "\n")

    return _asked_again(llm, length, rng, draw, ",".join(header) + "\n", "\n")


def _facts(llm: LLM, length: int, seed: int) -> list[int]:
    """Facts of one line, then questions and answers about them in another order."""
    rng = random.Random(seed)

    def draw() -> _Said:
        subject = draw_subject(rng)
        number = rng.randrange(100, 1000)
        question = f"Question: What is the {subject}? Answer: {number}.\n"
        return _Said(subject, f"The {subject} is {number}.\n", question)

    return _asked_again(llm, length, rng, draw, "", "\n")


class _Said(NamedTuple):
    """What a line is about, of which there is one each, the line, and what asks for it."""

    subject: str
    line: str
    question: str


def _asked_again(
    llm: LLM,
    length: int,
    rng: random.Random,
    draw: Callable[[], _Said],
    title: str,
    between: str,
) -> list[int]:
    """Lines that fill ``length`` tokens together with what asks for them, shuffled."""
    subjects: set[str] = set()
    tokens, asked = encode(llm, title), encode(llm, between)
    questions: list[list[int]] = []
    n_tokens = len(tokens) + len(asked)
    while n_tokens < length:
        said = draw()
        if said.subject in subjects:
            continue
        subjects.add(said.subject)
        line, question = encode(llm, said.line), encode(llm, said.question)
        tokens += line
        questions.append(question)
        n_tokens += len(line) + len(question)
    rng.shuffle(questions)
    return tokens + asked + [token for question in questions for token in question]


def _dialogue(llm: LLM, length: int, seed: int) -> list[int]:
    """A long conversation: a user tells things and asks for what was said before."""
    rng = random.Random(seed)
    story = iter(filler_sentences(length, seed=seed))
    told: list[tuple[str, str]] = []
    tokens: list[int] = []
    while len(tokens) < length:
        fact = (f"the {draw_subject(rng)}", str(rng.randrange(100, 1000)))
        said = ". ".join(next(story) for _ in range(2))
        user = f"{said}. By the way, {fact[0]} is {fact[1]}."
        answer = f"Thank you. I have noted that {fact[0]} is {fact[1]}."
        if told and rng.random() < 0.6:
            what, value = rng.choice(told)
            user += f" Do you remember {what}?"
            answer += f" You told me that {what} is {value}."
        told.append(fact)
        tokens += encode(llm, f"User: {user}\nAssistant: {answer}\n\n")
    return tokens


KINDS: Mapping[str, Callable[[LLM, int, int], list[int]]] = {
    "prose": _prose,
    "code": _code,
    "dialogue": _dialogue,
    "facts": _facts,
    "copied-prose": _copied(_prose),
    "copied-code": _copied(_code),
    "pairs": _pairs,
    "table": _table,
}
