"""Ranks of documents: how well a model finds that each answers a query."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, cast

from ..errors import EdgeH2OError, UsageError
from ..model_config import DecoderConfig
from .embedding import RANK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..model_config import ModelConfig, RankingConfig
    from .models import LoadedModel


class RankingModel(Protocol):
    """A loaded model whose file has the matrices of labels."""

    @property
    def rank_weights(self) -> Mapping[str, NDArray[np.float32]]: ...


def require_ranking(config: ModelConfig) -> RankingConfig:
    """Of a model that ranks documents. Raises UsageError for another one."""
    if not isinstance(config, DecoderConfig) or config.ranking is None:
        cause = "it is no reranking model"
        if isinstance(config, DecoderConfig) and config.pooling == RANK:
            cause = (
                "its file calls it a reranking model, but has no tensor 'cls.output.weight' by "
                "which its architecture ranks"
            )
        raise UsageError(
            f"this model does not rank documents: {cause}; take a GGUF file of one, such as "
            "Qwen3-Reranker or bge-reranker-v2-m3, that llama.cpp's convert_hf_to_gguf.py has made"
        )
    if config.ranking.has_softmax and len(config.ranking.labels) < 2:
        raise UsageError(
            "this model does not rank documents: it has one label, whose probability is always 1; "
            "convert it anew with llama.cpp's convert_hf_to_gguf.py"
        )
    return config.ranking


def require_template(config: ModelConfig) -> str:
    """The prompt of a query and a document, "" for a model that reads them as a pair of texts.

    Raises UsageError where there is none.
    """
    template = require_ranking(config).template
    if not template and not cast("DecoderConfig", config).is_causal:
        return ""
    for name in ("{query}", "{document}"):
        if name not in template:
            lack = f"has no {name} in its" if template else "has no"
            raise UsageError(
                f"the file {lack} chat template 'rerank', which makes a prompt of a query and a "
                "document; convert the model anew with llama.cpp's convert_hf_to_gguf.py"
            )
    return template


def find_scores(
    rows: Sequence[NDArray[np.float32]] | NDArray[np.float32], model: LoadedModel
) -> NDArray[np.float32]:
    """Of labels [n, n_labels], by hidden rows [n, model_dim] of prompts: logits, or a softmax.

    As in ``build_pooling`` of llama.cpp. Raises EdgeH2OError for what is not finite.
    """
    import numpy as np  # here, because models that write do not need it

    from ..models.ranking import DENSE_BIAS, DENSE_TENSOR, NORM_TENSOR, RANK_BIAS, RANK_TENSOR

    config = cast("DecoderConfig", model.config)
    ranking = require_ranking(config)
    found = np.asarray(rows, np.float64)
    stored = cast("RankingModel", model).rank_weights
    weights = {name: values.astype(np.float64) for name, values in stored.items()}
    if DENSE_TENSOR in weights:
        found = found @ weights[DENSE_TENSOR].T
        if DENSE_BIAS in weights:
            found = found + weights[DENSE_BIAS].reshape(-1)
        found = _activate(found, ranking.activation)
    if NORM_TENSOR in weights:
        centred = found - found.mean(axis=1, keepdims=True)
        variance = (centred**2).mean(axis=1, keepdims=True)
        found = centred / np.sqrt(variance + config.norm_eps) * weights[NORM_TENSOR]
    found = found @ weights[RANK_TENSOR].T
    if RANK_BIAS in weights:
        found = found + weights[RANK_BIAS].reshape(-1)
    if not np.isfinite(found).all():
        raise EdgeH2OError("a rank is not finite; the model file may be damaged")
    if not ranking.has_softmax:
        return np.asarray(found, np.float32)
    shares = np.exp(found - found.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True), np.float32)


def _activate(x: NDArray[np.float64], activation: str) -> NDArray[np.float64]:
    import numpy as np

    if activation == "tanh":
        return np.tanh(x)
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
