"""Vectors of texts: hidden rows of a prompt, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..errors import EdgeH2OError, UsageError
from ..model_config import DecoderConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..model_config import ModelConfig
    from ..runners.base import EmbeddingRunner, Runner

POOLINGS = ("none", "mean", "cls", "last")
RANK = "rank"  # of reranking models: see ranking.py
_RANKED_BY = "ranks by 'edgeh2o embed --pooling rank', LLM.rerank and /v1/rerank"
# As llama.cpp numbers them: none, the largest number becomes 32,760, sums of sizes, of squares, of
# any other power.
NO_NORM, LARGEST, EUCLIDEAN = -1, 0, 2
_LARGEST_SIZE = 32760.0
MOST_POWER = 64

# (tokens, is_last=, n_rows=) of ``EmbeddingRunner.embed``.
Embed = Callable[..., "NDArray[np.float32]"]


class EmbeddingModel(Protocol):
    """A loaded model whose file has what vectors are multiplied with."""

    @property
    def dense_weights(self) -> Sequence[NDArray[np.float32]]: ...


def choose_pooling(config: ModelConfig, asked: str | None) -> str:
    """That which was asked for, else that of the model's file. Raises UsageError."""
    if not isinstance(config, DecoderConfig):
        raise UsageError(
            "vectors are made of GGUF files and folders of safetensors; of an ONNX model only "
            "logits are known"
        )
    require_known(asked)
    if asked is not None:
        return asked
    if config.pooling not in POOLINGS:
        is_rank = config.pooling == RANK
        cause = f"is a reranking model, which {_RANKED_BY}" if is_rank else "has an unknown pooling"
        raise UsageError(
            f"the file {cause} (metadata key '{config.architecture}.pooling_type'); for vectors "
            f"say which pooling to take (--pooling): {', '.join(POOLINGS)}"
        )
    return config.pooling


def require_known(pooling: str | None) -> None:
    """Raises UsageError for another pooling than ``POOLINGS``."""
    if pooling is not None and pooling not in POOLINGS:
        cause = f"makes no vectors: a model {_RANKED_BY}" if pooling == RANK else "is unknown"
        raise UsageError(f"pooling {pooling!r:.40} {cause}; there are {', '.join(POOLINGS)}")


def require_power(power: int) -> int:
    """A norm by its number in llama.cpp. Raises UsageError for none of it."""
    if type(power) is not int or not NO_NORM <= power <= MOST_POWER:
        raise UsageError(
            f"--embd-normalize must be an integer from {NO_NORM} to {MOST_POWER} (-1 none, 0 the "
            f"largest becomes 32,760, 1 sum of sizes, 2 Euclidean, others that norm), got {power!r}"
        )
    return power


def normalise(rows: NDArray[np.float32], power: int) -> NDArray[np.float32]:
    """Every row [..., dim] divided by its norm of that number; one of zeros stays."""
    import numpy as np

    sizes = np.abs(rows.astype(np.float64))
    if power == NO_NORM:
        return rows
    largest = sizes.max(axis=-1, keepdims=True)
    if power == LARGEST:
        norms = largest / _LARGEST_SIZE
    else:  # of parts of the largest, whose powers neither overflow nor vanish
        parts = sizes / np.where(largest > 0, largest, 1.0)
        norms = largest * (parts**power).sum(axis=-1, keepdims=True) ** (1.0 / power)
    scaled = np.divide(rows, norms, out=np.zeros(rows.shape), where=norms > 0)
    return np.asarray(scaled, np.float32)


def require_rows(runner: Runner) -> EmbeddingRunner:
    """The runner, if it gives hidden rows. Raises UsageError."""
    if not hasattr(runner, "embed"):
        raise UsageError("vectors are made on the CPU (--device cpu)")
    return cast("EmbeddingRunner", runner)


def reporting(
    runner: EmbeddingRunner, n_tokens: int, report: Callable[[str, int, int], None]
) -> Embed:
    """Calls that tell ``report("prefill", done, total)`` after every layer."""

    def embed(tokens: NDArray[np.int32], **wanted: Any) -> NDArray[np.float32]:
        first = runner.position

        def on_layer(done: int, total: int) -> None:
            report("prefill", first + len(tokens) * done // total, n_tokens)

        rows: NDArray[np.float32] = runner.embed(tokens, **wanted, on_layer=on_layer)
        return rows

    return embed


def count_read(n_tokens: int, pooling: str, config: ModelConfig) -> int:
    """Tokens of a text that are read: of a causal model none behind the first changes its row."""
    return min(1, n_tokens) if pooling == "cls" and config.is_causal else n_tokens


def embed_prompt(
    embed: Embed, token_ids: NDArray[np.int32], pooling: str, calls: Iterable[slice]
) -> NDArray[np.float32]:
    """The vector [dim] of a prompt that ``calls`` read; of pooling "none" all rows [n, dim].

    ``token_ids`` are the ``count_read`` first. Raises EdgeH2OError for what is not finite.
    """
    import numpy as np

    end = len(token_ids)
    rows: list[NDArray[np.float32]] = []
    sums: list[NDArray[np.float64]] = []
    for call in calls:
        tokens, is_last = token_ids[call], call.stop == end
        n_rows = len(tokens) if pooling != "last" else int(is_last)
        found = embed(tokens, is_last=is_last, n_rows=n_rows)
        if pooling == "mean":
            sums.append(found.sum(axis=0, dtype=np.float64))
        elif n_rows:
            rows.append(found)
    if pooling == "mean":
        vector = np.asarray(np.sum(sums, axis=0) / end, np.float32)
    elif pooling == "none":
        vector = np.concatenate(rows)
    else:
        vector = rows[0][0] if pooling == "cls" else rows[-1][-1]
    if not np.isfinite(vector).all():
        raise EdgeH2OError("a vector is not finite; the model file may be damaged")
    return vector


def project(
    vector: NDArray[np.float32], model: EmbeddingModel, config: ModelConfig
) -> NDArray[np.float32]:
    """A vector, or rows [n, dim], as matrices of the model's file make it, if there are any.

    Raises EdgeH2OError for what is not finite.
    """
    import numpy as np

    if not isinstance(config, DecoderConfig) or not config.dense_modules:
        return vector
    for weights in model.dense_weights:
        vector = vector @ weights.T
    if not np.isfinite(vector).all():
        raise EdgeH2OError("a vector is not finite; the model file may be damaged")
    return vector


def is_several(texts: Any) -> bool:
    """Whether these are texts, or lists of token ids, and not one of both."""
    if hasattr(texts, "ndim"):  # an array
        return bool(texts.ndim > 1)
    if not isinstance(texts, (list, tuple)):
        return False
    return any(isinstance(each, (str, Sequence)) or hasattr(each, "ndim") for each in texts)


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Numbers of prompts in the order in which one runner serves most of them."""
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])
