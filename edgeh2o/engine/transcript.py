"""What the cache holds, as text: so that a prompt that goes on from it keeps its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ..tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A prompt and its answer, as texts and as token ids.

    The ids of an answer are those that were drawn; its text, tokenised, may give others, with
    which the cache would be of no use.
    """

    prompt: str
    parse_special: bool
    prompt_ids: tuple[int, ...] = ()
    answer: str = ""
    answer_ids: tuple[int, ...] = ()

    def with_prompt_ids(self, ids: Sequence[int]) -> Transcript:
        """This prompt with its token ids."""
        return replace(self, prompt_ids=tuple(ids))

    def with_answer(self, text: str, ids: Sequence[int], tokenizer: Tokenizer) -> Transcript:
        """This prompt with its answer so far; without, if text and tokens do not agree.

        They do not where a stop text was cut off, or an interrupt left a character incomplete. Nor
        is an answer without text one: the same prompt once more would go on from its tokens.
        """
        said = tuple(ids[:-1] if ids and ids[-1] in tokenizer.eog_ids else ids)
        if not text or tokenizer.decode(said, skip_special=True, continues=True) != text:
            return self
        return replace(self, answer=text, answer_ids=said)

    def encode(self, prompt: Transcript, encode_from: Callable[[int], list[int]]) -> list[int]:
        """Token ids of another prompt: those of this transcript, where it begins with its text.

        A prompt keeps its own, without the answer, up to a blank or the end of a line only: in the
        middle of a word they would be other tokens than those of the whole word.
        ``encode_from(i)`` gives the ids of the prompt's text from character i on.
        """
        text = prompt.prompt
        if prompt.parse_special != self.parse_special:
            return encode_from(0)
        if self.answer and text.startswith(self.prompt + self.answer):
            n_kept = len(self.prompt) + len(self.answer)
            return [*self.prompt_ids, *self.answer_ids, *encode_from(n_kept)]
        # Of an empty prompt the BOS comes with the text, which begins at the start.
        if self.prompt and text.startswith(self.prompt):
            rest = text[len(self.prompt) :]
            if not rest or rest[0].isspace() or self.prompt.endswith("\n"):
                return [*self.prompt_ids, *encode_from(len(self.prompt))]
        return encode_from(0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a session file."""
        return {
            "prompt": self.prompt,
            "prompt_ids": list(self.prompt_ids),
            "parse_special": self.parse_special,
            "answer": self.answer,
            "answer_ids": list(self.answer_ids),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, vocab_size: int) -> Transcript:
        """The transcript of a session file. Raises FormatError for values that it cannot have."""
        texts = [values.get(name) for name in ("prompt", "answer")]
        ids = [values.get(name) for name in ("prompt_ids", "answer_ids")]
        parse_special = values.get("parse_special")
        is_good = (
            all(isinstance(text, str) for text in texts)
            and isinstance(parse_special, bool)
            and all(
                isinstance(part, list) and all(type(i) is int and 0 <= i < vocab_size for i in part)
                for part in ids
            )
        )
        if not is_good:
            raise FormatError("the session file holds a transcript that cannot be; delete it")
        return cls(
            prompt=str(texts[0]),
            prompt_ids=tuple(ids[0] or ()),
            parse_special=bool(parse_special),
            answer=str(texts[1]),
            answer_ids=tuple(ids[1] or ()),
        )


def make_document(transcript: Transcript | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a session file: what its cache holds as text, and what is saved with it."""
    return {"transcript": transcript and transcript.to_dict(), "extra": dict(extra)}


def read_document(
    document: Mapping[str, Any], path: Path, *, vocab_size: int
) -> tuple[Transcript | None, dict[str, Any]]:
    """What ``make_document`` was given for ``path``. Raises FormatError for anything else."""
    values, extra = document.get("transcript"), document.get("extra")
    if not isinstance(extra, dict) or not isinstance(values, (dict, type(None))):
        raise FormatError(f"the session file {path} lacks its document; delete it")
    if values is None:
        return None, extra
    return Transcript.from_dict(values, vocab_size=vocab_size), extra


def count_common(
    known: Sequence[int] | NDArray[np.int32], prompt: Sequence[int] | NDArray[np.int32]
) -> int:
    """Length of the longest common beginning of two lists of tokens."""
    n_tokens = min(len(known), len(prompt))
    first, second = (np.asarray(tokens[:n_tokens], np.int32) for tokens in (known, prompt))
    differs = np.flatnonzero(first != second)
    return int(differs[0]) if differs.size else n_tokens
