from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

class Sampler:
    vocab_size: int
    def __init__(
        self,
        vocab_size: int,
        *,
        temperature: float,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        window_size: int = 0,
        seed: int = 0,
        banned: Iterable[int] = (),
    ) -> None: ...
    def twin(self, vocab_size: int) -> Sampler: ...
    def follow(self, other: Sampler) -> None: ...
    def accept(self, token: int) -> None: ...
    def sample(self, logits: NDArray[np.float32], mask: bytes | None = None) -> int: ...
    def distribution(
        self, logits: NDArray[np.float32]
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]: ...
