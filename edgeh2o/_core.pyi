from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

def available_isas() -> list[str]: ...
def active_isa() -> str: ...
def use_isa(name: str) -> None: ...
def set_num_threads(n: int) -> None: ...
def num_threads() -> int: ...
def supported_types() -> list[str]: ...

class DecoderConfig:
    def __init__(self, **fields: Any) -> None: ...

class Model:
    config: DecoderConfig
    weight_bytes: int
    def __init__(self, config: DecoderConfig) -> None: ...
    def set_tensor(
        self,
        name: str,
        data: Buffer,
        type: str,
        rows: int,
        cols: int,
        row_order: NDArray[np.int32] | None = None,
    ) -> None: ...
    def finish(self) -> None: ...

class SparsePolicy: ...

def dense_policy() -> SparsePolicy: ...
def h2o_policy(local: int, heavy: int) -> SparsePolicy: ...

class Session:
    position: int
    pairs_computed: int
    pairs_dense: int
    memory_bytes: Mapping[str, int]
    def __init__(
        self,
        model: Model,
        policy: SparsePolicy,
        *,
        max_context: int,
        batch_size: int,
        chunk_size: int,
        cache_type: str = "f16",
    ) -> None: ...
    def prefill(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        all_logits: bool = False,
        on_layer: Callable[[int, int], None] | None = None,
    ) -> NDArray[np.float32] | None: ...
    def decode(self, token: int) -> NDArray[np.float32]: ...
    def reset(self) -> None: ...
    @staticmethod
    def estimate_bytes(
        config: DecoderConfig,
        policy: SparsePolicy,
        *,
        max_context: int,
        batch_size: int,
        chunk_size: int,
        cache_type: str,
    ) -> dict[str, int]: ...
