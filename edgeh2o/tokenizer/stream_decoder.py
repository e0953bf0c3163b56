"""Token ids to text, one id at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Turns token ids into text as they come, holding back incomplete characters.

    A token may end in the middle of a UTF-8 sequence; its bytes are kept until the character is
    complete. Bytes that cannot become valid UTF-8 turn into U+FFFD, so that the pieces always
    join to what ``Tokenizer.decode`` gives for all the ids at once.
    """

    __slots__ = ("_at_start", "_drop_first_space", "_to_bytes", "_utf8")

    def __init__(self, to_bytes: Callable[[int], bytes], *, drop_first_space: bool = False) -> None:
        """``to_bytes`` gives the bytes that one token id stands for.

        ``drop_first_space`` leaves out one blank at the very start of the text.
        """
        self._to_bytes = to_bytes
        self._drop_first_space = drop_first_space
        self._at_start = drop_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that ``token_id`` completes; may be empty."""
        data = self._to_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is still held back, as U+FFFD; gets ready for another text."""
        tail = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._at_start = self._drop_first_space
        return tail
