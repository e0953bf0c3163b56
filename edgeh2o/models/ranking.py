"""The matrices by which a model ranks documents (rerankers): a row of logits for every label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import FormatError
from ..formats.metadata import RANK_TEMPLATE_KEY, quote
from ..model_config import RankingConfig
from .tensors import readable_types

if TYPE_CHECKING:
    from ..formats.model_tensors import ModelTensors

RANK_TENSOR, RANK_BIAS = "cls.output.weight", "cls.output.bias"
# Of a matrix before it, and of the norm between the two.
DENSE_TENSOR, DENSE_BIAS, NORM_TENSOR = "cls.weight", "cls.bias", "cls.norm.weight"
LABELS_KEY, POOLING_KEY = "classifier.output_labels", "classifier.pooling_type"
_POOLINGS: dict[int, Literal["cls", "mean"]] = {1: "mean", 2: "cls"}  # as llama.cpp numbers them


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRule:
    """How an architecture ranks documents, as ``build_pooling`` of llama.cpp has it.

    Attributes:
        has_softmax: labels share a probability; else they have logits.
        activation: that behind a matrix before the one of labels, "" where files have none.
        has_norm: what comes of the activation may be normed (LayerNorm).
        pooling: what hidden row is looked at where a file does not say.
    """

    has_softmax: bool = False
    activation: Literal["", "tanh", "gelu_tanh"] = ""
    has_norm: bool = False
    pooling: Literal["last", "cls", "mean"] = "last"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of those that files may have."""
        labels = (RANK_TENSOR,) if self.has_softmax else (RANK_TENSOR, RANK_BIAS)
        dense = (DENSE_TENSOR, DENSE_BIAS) if self.activation else ()
        return (*dense, *((NORM_TENSOR,) if self.has_norm else ()), *labels)


SOFTMAX_RANKING = RankRule(has_softmax=True)
# As of RoBERTa's and BERT's for the classification of sequences.
TANH_RANKING = RankRule(activation="tanh", pooling="cls")


def read_ranking(
    gguf: ModelTensors, architecture: str, model_dim: int, rule: RankRule
) -> RankingConfig | None:
    """What a file says of it, None for one without the matrix. Raises FormatError."""
    found = tuple(name for name in rule.tensors if name in gguf.tensors)
    if RANK_TENSOR not in found:
        return None
    key = f"{architecture}.{LABELS_KEY}"
    labels = gguf.metadata.get_strings(key, default=()) or ("",)  # one without a name
    shapes = {
        DENSE_TENSOR: (model_dim, model_dim),
        DENSE_BIAS: (model_dim,),
        NORM_TENSOR: (model_dim,),
        RANK_TENSOR: (model_dim, len(labels)),
        RANK_BIAS: (len(labels),),
    }
    for name in found:
        is_of_labels = name in (RANK_TENSOR, RANK_BIAS)
        cause = key if is_of_labels else f"{architecture}.embedding_length"
        _check(gguf, name, shapes[name], quote(cause))
    if DENSE_TENSOR not in found and (spare := {DENSE_BIAS, NORM_TENSOR} & {*found}):
        raise FormatError(
            f"the file has {', '.join(map(quote, sorted(spare)))}, but no {quote(DENSE_TENSOR)}; "
            "it is damaged or was converted wrongly"
        )
    number = gguf.metadata.get(f"{architecture}.{POOLING_KEY}")
    pooling = rule.pooling
    if pooling != "last" and type(number) is int:
        pooling = _POOLINGS.get(number, "cls")
    return RankingConfig(
        labels=labels,
        template=gguf.metadata.get_str(RANK_TEMPLATE_KEY, default=""),
        has_softmax=rule.has_softmax,
        activation=rule.activation,
        pooling=pooling,
        tensors=found,
    )


def _check(gguf: ModelTensors, name: str, expected: tuple[int, ...], key: str) -> None:
    """Raises FormatError for a tensor of another shape, or of a type that is not read."""
    info = gguf.tensors[name]
    # One row is written as a vector.
    if info.shape not in (expected, expected[: 1 + (expected[-1] > 1)]):
        raise FormatError(
            f"tensor {quote(name)} has shape {list(info.shape)}, but metadata key "
            f"{key} makes it {list(expected)}; the file is damaged or was converted wrongly"
        )
    if info.type_name not in readable_types():
        raise FormatError(
            f"tensor {quote(name)} is of type {info.type_name}, which is not supported "
            "here; fetch the model in another one, such as Q8_0"
        )
