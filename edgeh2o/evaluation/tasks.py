"""Tasks that need a long context, made by seeds: several questions about one text each.

They follow the kinds of RULER (Hsieh et al., 2024): needles, look-ups, variables, copies, counts;
and a classification by examples, and questions after a long dialogue. All are plain text that a
base model can go on with; an answer is right if greedy decoding gives it to the letter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError
from .windows import find_beginning
from .words import (
    draw_different,
    draw_key,
    draw_name,
    draw_subject,
    draw_word,
    encode,
    filler_sentences,
)

if TYPE_CHECKING:
    from ..llm import LLM

# Questions about one text at most, where the task itself does not say how many.
DEFAULT_QUESTIONS = 10
N_EXAMPLES = 50
# Tokens left for a question and its answer.
QUESTION_TOKENS = 96

_TOPICS = {
    "music": "the violin concerto,the church organ,a brass band,the choir practice,a string trio",
    "sport": "the football match,a swimming race,the tennis final,the rowing club,a cycling tour",
    "cooking": "the onion soup,a roast chicken,the rye bread,an apple pie,the mushroom sauce",
    "travel": "the night train,an airport queue,the ferry ticket,a mountain hotel,the road map",
    "weather": "the heavy rain,a cold wind,the morning fog,a sudden storm,the first snow",
}
_COUNTED = "apple,river,candle,window,garden,silver,button,market,pencil,bridge"
# Of a sentence: those that say which one is meant, and those after them that are to be copied.
_KNOWN_WORDS, _COPIED_WORDS = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTask:
    """``context`` are token ids; a question is text that goes on from it, ending where ``answer``
    goes on."""

    context: tuple[int, ...]
    questions: tuple[tuple[str, str], ...]


Writer = Callable[["_Text", random.Random], Sequence[tuple[str, str]]]


class _Text:
    """A text of a given number of tokens in the making: lines that matter among lines that do not.

    What is asked for has to be written before the filler, at random places of the whole.
    """

    def __init__(self, llm: LLM, length: int, seed: int, n_questions: int) -> None:
        self.n_questions = n_questions
        self._llm = llm
        self._length = length
        self._seed = seed
        beginning = find_beginning(llm)
        self._head: list[int] = [] if beginning is None else [beginning]
        self._tail: list[int] = []

    def begin(self, text: str) -> None:
        """The first lines."""
        self._head += encode(self._llm, text)

    def end(self, text: str) -> None:
        """The last lines."""
        self._tail += encode(self._llm, text)

    @property
    def room(self) -> int:
        """Tokens that are left for what lies between."""
        return self._length - len(self._head) - len(self._tail)

    def count(self, text: str) -> int:
        """Its tokens."""
        return len(encode(self._llm, text))

    def fill(self, lines: Sequence[str]) -> None:
        """Adds lines for as long as they fit. Raises UsageError if not even one does."""
        n_before = len(self._head)
        for line in lines:
            tokens = encode(self._llm, line)
            if len(tokens) > self.room:
                break
            self._head += tokens
        if len(self._head) == n_before:
            raise UsageError(f"a text of {self._length} tokens is too short for this task")

    def hide(self, needles: Sequence[str], rng: random.Random) -> None:
        """Fills the text with sentences that say nothing and, between them, ``needles``.

        Their order stays. Raises UsageError if there is no room for them.
        """
        room = self.room - sum(map(self.count, needles))
        sentences = []
        for sentence in filler_sentences(max(0, room), seed=self._seed):
            room -= self.count(f"{sentence}. ")
            if room < 0:
                break
            sentences.append(f"{sentence}. ")
        if not sentences:
            raise UsageError(
                f"a text of {self._length} tokens has no room for {len(needles)} things to find"
            )
        places = sorted(rng.randrange(len(sentences)) for _ in needles)
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            sentences.insert(place, needle)
        for sentence in sentences:
            self._head += encode(self._llm, sentence)

    def tokens(self) -> tuple[int, ...]:
        return (*self._head, *self._tail)


def _needles(n_keys: int) -> Writer:
    """Numbers of several things in a text that says nothing."""

    def write(text: _Text, rng: random.Random) -> list[tuple[str, str]]:
        keys = draw_different(draw_key, rng, n_keys)
        numbers = [str(rng.randrange(10000, 100000)) for _ in keys]
        text.begin("Some special numbers are hidden in the text below. Remember them.\n\n")
        facts = zip(keys, numbers, strict=True)
        text.hide([f"The special number of {key} is {number}. " for key, number in facts], rng)
        return [
            (f"\n\nThe special number of {key} is", f" {number}")
            for key, number in zip(keys, numbers, strict=True)
        ]

    return write


def _json(text: _Text, rng: random.Random) -> list[tuple[str, str]]:
    """Entries of a large JSON object."""
    text.begin("{\n")
    text.end("}\n")
    keys = draw_different(draw_key, rng, text.room // 8)
    entries = [(key, str(rng.randrange(100, 1000))) for key in keys]
    lines = [f' "{key}": "{value}",\n' for key, value in entries]
    n_lines, room = 0, text.room
    while n_lines < len(lines) and room >= text.count(lines[n_lines]):
        room -= text.count(lines[n_lines])
        n_lines += 1
    text.fill(lines[:n_lines])
    asked = rng.sample(entries[:n_lines], min(n_lines, text.n_questions))
    return [(f'\nAsked for: "{key}": "', value) for key, value in asked]


def _variables(text: _Text, rng: random.Random) -> list[tuple[str, str]]:
    """Variables that others are copied to, in a text that says nothing."""
    n_values = text.n_questions
    names = [name.upper() for name in draw_different(draw_key, rng, 2 * n_values)]
    values = [str(rng.randrange(100, 1000)) for _ in range(n_values)]
    firsts, copies = names[:n_values], names[n_values:]
    text.begin("Variables are set in the text below. Keep track of their values.\n\n")
    sets = [f"VAR {name} = {value}. " for name, value in zip(firsts, values, strict=True)]
    moves = [f"VAR {copy} = {name}. " for name, copy in zip(firsts, copies, strict=True)]
    text.hide([*sets, *moves], rng)
    half = n_values // 2
    asked = list(zip([*firsts[:half], *copies[half:]], values, strict=True))
    return [(f"\n\nThe value of VAR {name} is", f" {value}") for name, value in asked]


def _copy(text: _Text, rng: random.Random) -> list[tuple[str, str]]:
    """Sentences of which some have to be repeated, from their first words on."""
    text.begin("Read the sentences.\n\n")
    lines, room = [], text.room
    for sentence in filler_sentences(text.room, seed=rng.randrange(2**30)):
        room -= text.count(f"{sentence}.\n")
        if room < 0:
            break
        lines.append(f"{sentence}.\n")
    text.fill(lines)
    asked: dict[str, str] = {}
    for line in rng.sample(lines, len(lines)):
        words = line.split(" ")
        known, copied = words[:_KNOWN_WORDS], words[_KNOWN_WORDS:][:_COPIED_WORDS]
        beginning = " ".join(known)
        if len(asked) == text.n_questions:
            break
        if sum(other.startswith(beginning) for other in lines) == 1:
            asked[f"\nOnce more: {beginning}"] = "".join(f" {word}" for word in copied)
    return list(asked.items())


def _count(text: _Text, rng: random.Random) -> list[tuple[str, str]]:
    """How often a word was said: up to nine times."""
    words = _COUNTED.split(",")
    counts = {word: 1 + i % 9 for i, word in enumerate(rng.sample(words, len(words)))}
    text.begin("Count how often the marked words occur in the text below.\n\n")
    marked = [word for word, n in counts.items() for _ in range(n)]
    rng.shuffle(marked)
    text.end("\n\nHow often did the marked words occur?")
    text.hide([f"Marked word: {word}. " for word in marked], rng)
    asked = rng.sample(words, min(len(words), text.n_questions))
    return [
        (f"\nThe marked word {word} occurred this often:", f" {counts[word]}") for word in asked
    ]


def _classify(text: _Text, rng: random.Random) -> list[tuple[str, str]]:
    """Labels of examples that show what they mean."""
    story = filler_sentences(text.room, seed=rng.randrange(2**30))
    topics = [*_TOPICS] * (N_EXAMPLES // len(_TOPICS))
    rng.shuffle(topics)
    said = [f"{draw_name(rng)} talked about {draw_word(rng, _TOPICS[topic])}" for topic in topics]
    frames = [
        f"Text: {what}.\nLabel: {topic}\n\n" for what, topic in zip(said, topics, strict=True)
    ]
    # As much else in every example as there is room for.
    room = text.room - sum(map(text.count, frames))
    examples, used = [], 0
    for i, (what, topic) in enumerate(zip(said, topics, strict=True), 1):
        more = []
        while used < i * room // len(topics) and story:
            sentence = story.pop()
            n_tokens = text.count(f" {sentence}.")
            if used + n_tokens > room:
                break
            more.append(f" {sentence}.")
            used += n_tokens
        examples.append(f"Text:{''.join(more)} {what}.\nLabel: {topic}\n\n")
    text.fill(examples)
    asked = [rng.choice([*_TOPICS]) for _ in range(text.n_questions)]
    return [
        (
            f"Text: {draw_name(rng)} talked about {draw_word(rng, _TOPICS[topic])}.\nLabel:",
            f" {topic}",
        )
        for topic in asked
    ]


def _dialogue(text: _Text, rng: random.Random) -> list[tuple[str, str]]:
    """What a user said in a long conversation."""
    story = iter(filler_sentences(2 * text.room, seed=rng.randrange(2**30)))
    subjects = draw_different(draw_subject, rng, text.room // 40 + 1)
    facts = [(subject, str(rng.randrange(100, 1000))) for subject in subjects]
    turns, room = [], text.room
    for subject, number in facts:
        told = f"{next(story)}. By the way, the {subject} is {number}."
        turn = f"User: {told}\nAssistant: Thank you. {next(story)}.\n\n"
        room -= text.count(turn)
        if room < 0:
            break
        turns.append(turn)
    text.fill(turns)
    asked = rng.sample(facts[: len(turns)], min(len(turns), text.n_questions))
    return [
        (
            f"User: Do you remember the {subject}?\nAssistant: You told me that the {subject} is",
            f" {number}",
        )
        for subject, number in asked
    ]


TASKS: Mapping[str, Writer] = {
    "needles-4": _needles(4),
    "needles-8": _needles(8),
    "json": _json,
    "variables": _variables,
    "copy": _copy,
    "count": _count,
    "classify": _classify,
    "dialogue": _dialogue,
}


def make_task(
    llm: LLM, name: str, length: int, *, seed: int = 0, n_questions: int = DEFAULT_QUESTIONS
) -> LongTask:
    """A task of ``TASKS`` whose text and longest question take at most ``length`` tokens.

    Seeds give different texts. There are ``n_questions``, or as many as the text has answers for:
    needles are all asked for, and words counted are ten at most. Raises UsageError for an unknown
    name and for a length that is too short for the task.
    """
    if name not in TASKS:
        raise UsageError(f"there is no task {name!r}; use one of {', '.join(TASKS)}")
    text = _Text(llm, length - QUESTION_TOKENS, seed, n_questions)
    questions = TASKS[name](text, random.Random(f"{name} {seed}"))
    return LongTask(context=text.tokens(), questions=tuple(questions))
