from collections.abc import Iterable, Sequence

class PairMerger:
    def __init__(
        self, tokens: Sequence[str], merges: Sequence[str] | bytes, *, ignore_merges: bool = False
    ) -> None: ...
    def encode(self, words: Iterable[str]) -> list[int]: ...
