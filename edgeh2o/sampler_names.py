"""What llama.cpp calls its samplers, in names and in letters, and their usual order."""

from __future__ import annotations

from collections.abc import Iterable

SAMPLERS = (
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p"),
    *("top_p", "min_p", "xtc", "temperature"),
)
ADAPTIVE = "adaptive_p"  # acts where it is named alone, and behind the others
MAX_SAMPLERS = 32
_ALL = (*SAMPLERS, ADAPTIVE)
_LETTERS = dict(zip("edskypmxta", _ALL, strict=True))
_NAMES = {
    **{form: name for name in _ALL for form in (name.replace("_", "-"), name.replace("_", ""))},
    **{"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"},
    **{name: name for name in _ALL},
}


def read_samplers(given: str | Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The samplers meant by a text of letters, or by names of any case; and what is none."""
    if isinstance(given, str):
        words, table = list(given), _LETTERS
    else:
        words, table = [word.lower() for word in given], _NAMES
    known = tuple(table[word] for word in words if word in table)
    return known, tuple(dict.fromkeys(word for word in words if word not in table))


def spell_samplers(letters: str) -> str:
    """Their names with semicolons between; letters of none stay as they are."""
    return ";".join(_LETTERS.get(letter, letter) for letter in letters)


def describe_unknown(unknown: Iterable[str]) -> str:
    """What to tell whoever named samplers that are not here."""
    names = ", ".join(f"{name!r:.40}" for name in unknown)
    return f"no such sampler: {names:.200}; there are {', '.join(_ALL)}"
