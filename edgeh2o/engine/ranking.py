"""Ranks of documents: how probable a model finds it that each answers a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from ..errors import EdgeH2OError, UsageError
from ..model_config import DecoderConfig
from .embedding import RANK

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..model_config import ModelConfig, RankingConfig
    from .models import LoadedModel


class RankingModel(Protocol):
    """A loaded model whose file has the matrix of labels."""

    @property
    def rank_weights(self) -> NDArray[np.float32]: ...


def require_ranking(config: ModelConfig) -> RankingConfig:
    """Of a model that ranks documents. Raises UsageError for another one."""
    if not isinstance(config, DecoderConfig) or config.ranking is None:
        cause = "it is no reranking model"
        if isinstance(config, DecoderConfig):
            if not config.is_causal:
                cause = "its tokens read those behind them too"
            elif config.pooling == RANK:
                cause = "its file calls it a reranking model, but has no tensor 'cls.output.weight'"
        raise UsageError(
            f"this model does not rank documents: {cause}; take a GGUF file of a causal one, such "
            "as Qwen3-Reranker, that llama.cpp's convert_hf_to_gguf.py has made"
        )
    if len(config.ranking.labels) < 2:
        raise UsageError(
            "this model does not rank documents: it has one label, whose probability is always 1; "
            "convert it anew with llama.cpp's convert_hf_to_gguf.py"
        )
    return config.ranking


def require_template(config: ModelConfig) -> str:
    """The prompt of a query and a document. Raises UsageError where there is none."""
    template = require_ranking(config).template
    for name in ("{query}", "{document}"):
        if name not in template:
            lack = f"has no {name} in its" if template else "has no"
            raise UsageError(
                f"the file {lack} chat template 'rerank', which makes a prompt of a query and a "
                "document; convert the model anew with llama.cpp's convert_hf_to_gguf.py"
            )
    return template


def find_probabilities(
    rows: Sequence[NDArray[np.float32]] | NDArray[np.float32], model: LoadedModel
) -> NDArray[np.float32]:
    """Of labels [n, n_labels], by the last rows [n, model_dim] of prompts: a softmax of products.

    As in ``build_pooling`` of llama.cpp, for Qwen 3. Raises EdgeH2OError for what is not finite.
    """
    import numpy as np  # here, because models that write do not need it

    weights = cast("RankingModel", model).rank_weights
    logits = np.asarray(rows, np.float64) @ weights.astype(np.float64).T
    if not np.isfinite(logits).all():
        raise EdgeH2OError("a rank is not finite; the model file may be damaged")
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True), np.float32)
