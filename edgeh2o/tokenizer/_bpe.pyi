from collections.abc import Iterable, Sequence

def cut_json_merges(text: bytes) -> tuple[bytes, int] | None:
    """The merges of the array of JSON that ``text`` begins with, and the bytes that it takes.

    They are as ``PairMerger`` takes them in bytes. None unless all are pairs of strings without
    blanks, or all strings, with no escapes but of quotes, slashes and backslashes.
    """

class PairMerger:
    def __init__(
        self, tokens: Sequence[str], merges: Sequence[str] | bytes, *, ignore_merges: bool = False
    ) -> None: ...
    def encode(self, words: Iterable[str]) -> list[int]: ...
