from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

class Sampler:
    vocab_size: int
    mu: float
    def __init__(
        self,
        vocab_size: int,
        *,
        temperature: float,
        dynatemp_range: float = 0.0,
        dynatemp_exponent: float = 1.0,
        top_n_sigma: float = -1.0,
        top_k: int = 0,
        typical_p: float = 1.0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        repeat_penalty: float = 1.0,
        window_size: int = 0,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_window_size: int = 0,
        breakers: Iterable[Iterable[int]] = (),
        samplers: Iterable[str] = ...,
        mirostat: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        adaptive_target: float = -1.0,
        adaptive_decay: float = 0.9,
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
