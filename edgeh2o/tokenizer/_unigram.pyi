from collections.abc import Sequence

class TextRewriter:
    def __init__(self, table: bytes, *, adds_blank: bool, joins_blanks: bool) -> None: ...
    def rewrite(self, text: bytes, *, goes_on: bool = False) -> bytes: ...

class PieceFinder:
    def __init__(
        self,
        pieces: Sequence[bytes],
        ids: Sequence[int],
        scores: Sequence[float],
        unknown_id: int,
        unknown_score: float,
    ) -> None: ...
    def find(self, text: bytes) -> list[int]: ...
