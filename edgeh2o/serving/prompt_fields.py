"""Prompts of raw text and token ids, and biases of tokens, out of the bodies of requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from .api_error import ApiError
from .fields import Fields

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

# A text, token ids, or, as llama-server takes them, ids and texts between each other.
TextPrompt: TypeAlias = "str | tuple[int | str, ...]"

MAX_PROMPTS = 256
MAX_BIASES = 1024
MAX_BIAS_TEXT = 256
MAX_BIAS = 1e9  # of OpenAI's 100, which is for ever or never already
_ID = re.compile(r"-?\d{1,20}", re.ASCII)
# By which llama-server takes a text with pictures; one without them is a text.
_OBJECT_TEXT, _OBJECT_MEDIA = "prompt_string", "multimodal_data"


def read_prompts(fields: Fields, name: str = "prompt", most: int = MAX_PROMPTS) -> list[TextPrompt]:
    """The prompt, or the prompts, of a body. Raises ApiError, also for more than ``most``.

    An array of texts or arrays has several, one of token ids is a prompt, and so is one of both.
    """
    given = fields.raw(name)
    is_several = isinstance(given, list) and not any(type(each) is int for each in given)
    if not is_several:
        return [_read_prompt(fields, name, given)]
    if len(given) > most:
        raise ApiError(f"'{name}' has more than {most} prompts", param=name)
    return [_read_prompt(fields, name, each) for each in given or [given]]


def _read_prompt(fields: Fields, name: str, prompt: Any) -> TextPrompt:
    """That of the field, or one of several there."""
    if isinstance(prompt, dict):
        if prompt.get(_OBJECT_MEDIA):
            raise ApiError(f"'{_OBJECT_MEDIA}': this model reads text only", param=name)
        prompt = prompt.get(_OBJECT_TEXT)
    if isinstance(prompt, list) and all(type(part) in (int, str) for part in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, (str, tuple)):
        fields.refuse(name, "one text, or one array of token ids")
    if all(part == "" for part in prompt):
        raise ApiError(f"'{name}' must not be empty", param=name)
    return prompt


def read_parts(fields: Fields, name: str) -> tuple[int | str, ...]:
    """A field that is a text, or token ids and texts between each other. Raises ApiError."""
    given = fields.raw(name)
    parts = given if isinstance(given, list) else [given]
    if not all(type(part) is str or (type(part) is int and given is parts) for part in parts):
        fields.refuse(name, "a string, or an array of token ids and strings")
    return tuple(parts)


def join_prompt(
    parts: tuple[int | str, ...],
    tokenizer: Tokenizer,
    *,
    add_special: bool = True,
    parse_special: bool = True,
) -> list[int]:
    """The token ids of ids and texts; a text at the beginning gets what begins one.

    The options are those of ``Tokenizer.encode``.
    """
    ids: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        else:
            begins = add_special and index == 0
            ids += tokenizer.encode(part, add_special=begins, parse_special=parse_special)
    return ids


def read_bias(fields: Fields) -> dict[int | str, float]:
    """``logit_bias`` as OpenAI has it, or in pairs, of token ids and of texts. Raises ApiError."""
    given = fields.raw("logit_bias")
    entries: list[tuple[int | str, Any]]
    if isinstance(given, list):  # of llama-server; the value may be false for never
        is_paired = all(isinstance(pair, list) and len(pair) == 2 for pair in given)
        if not is_paired or not all(type(pair[0]) in (int, str) for pair in given):
            fields.refuse("logit_bias", "an object, or pairs of a token id or text and a number")
        entries = [(name, -100 if value is False else value) for name, value in given]
    else:
        named = fields.mapping("logit_bias").items()
        entries = [(int(k) if _ID.fullmatch(k) else k, value) for k, value in named]
    if len(entries) > MAX_BIASES:
        raise ApiError(f"'logit_bias' has more than {MAX_BIASES} entries", param="logit_bias")
    biases: dict[int | str, float] = {}
    for name, value in entries:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_name = 0 <= name < 10**9 if isinstance(name, int) else 0 < len(name) <= MAX_BIAS_TEXT
        if not is_name or not is_number or abs(value) > MAX_BIAS:
            raise ApiError(
                "'logit_bias' maps token ids, or texts of up to "
                f"{MAX_BIAS_TEXT} characters, to numbers",
                param="logit_bias",
            )
        biases[name] = float(value)
    return biases


def resolve_bias(biases: Mapping[int | str, float], tokenizer: Tokenizer) -> dict[int, float]:
    """Biases by token ids: that of a text is that of each of its tokens."""
    resolved: dict[int, float] = {}
    for name, value in biases.items():
        if isinstance(name, int):
            resolved[name] = value
        else:
            ids = tokenizer.encode(name, add_special=False, parse_special=False)
            resolved |= dict.fromkeys(ids, value)
    return resolved
