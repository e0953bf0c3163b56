from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class PieceMerger:
    def __init__(
        self, pieces: Sequence[bytes], scores: NDArray[np.float32], byte_ids: Sequence[int]
    ) -> None: ...
    def encode(self, text: bytes) -> list[int]: ...
