"""Words that made texts are built of, drawn by a seeded generator."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from .filler import write_filler

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..llm import LLM

_SYLLABLES = "ba,ke,lo,mi,nu,ra,se,ti,vo,xa,zen,dor,fil,gam,hul,jor,pek,quin,sul,tam,wex,yor"
_NAMES = (
    "Anna,Boris,Clara,David,Elena,Farid,Greta,Hugo,Irene,Jonas,Karin,Leon,Maria,Nadia,Oscar,Paula,"
    "Quentin,Rosa,Stefan,Tessa,Ulrich,Vera,Walter,Xenia,Yusuf,Zoe"
)
_SURNAMES = (
    "Adler,Brook,Castle,Dunn,Ellis,Ford,Green,Hart,Ivers,Jung,Klein,Lowe,Marsh,North,Olsen,Price,"
    "Quist,Reed,Stone,Tower,Urban,Vale,West,York,Zorn"
)
_ASPECTS = "locker number,office room,badge number,parking space,phone extension,desk number"
_LEAST_TOKENS_PER_SENTENCE = 4


def draw_word(rng: random.Random, words: str) -> str:
    """One of ``words`` between commas."""
    return rng.choice(words.split(","))


def draw_key(rng: random.Random) -> str:
    """A word that no language has."""
    return "".join(draw_word(rng, _SYLLABLES) for _ in range(3))


def draw_name(rng: random.Random) -> str:
    """First name and surname."""
    return f"{draw_word(rng, _NAMES)} {draw_word(rng, _SURNAMES)}"


def draw_subject(rng: random.Random) -> str:
    """What a person may have a number of: ``locker number of Anna Adler``."""
    name = draw_name(rng)
    return f"{draw_word(rng, _ASPECTS)} of {name}"


def draw_different(draw: Callable[[random.Random], str], rng: random.Random, n: int) -> list[str]:
    """``n`` different results of ``draw``."""
    drawn: dict[str, None] = {}
    while len(drawn) < n:
        drawn[draw(rng)] = None
    return list(drawn)


def filler_sentences(n_tokens: int, *, seed: int) -> list[str]:
    """Sentences without a full stop, of more than ``n_tokens`` tokens together."""
    text = write_filler(-(-n_tokens // _LEAST_TOKENS_PER_SENTENCE), seed=seed)
    return text.rstrip(".").replace("\n\n", " ").split(". ")


def encode(llm: LLM, text: str) -> list[int]:
    """Tokens of a text that has no control tokens."""
    return llm.tokenize(text, add_special=False, parse_special=False)
