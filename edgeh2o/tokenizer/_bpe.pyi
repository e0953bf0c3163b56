from collections.abc import Iterable, Sequence

class PairMerger:
    def __init__(
        self, tokens: Sequence[str], merges: Sequence[str], *, ignore_merges: bool = False
    ) -> None: ...
    def encode(self, words: Iterable[str]) -> list[int]: ...
