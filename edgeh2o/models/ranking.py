"""The matrix by which a model ranks documents (rerankers): a row of logits for every label."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import FormatError
from ..formats.metadata import RANK_TEMPLATE_KEY, quote
from ..model_config import RankingConfig
from .tensors import readable_types

if TYPE_CHECKING:
    from ..formats.model_tensors import ModelTensors

RANK_TENSOR = "cls.output.weight"
LABELS_KEY = "classifier.output_labels"


def read_ranking(gguf: ModelTensors, architecture: str, model_dim: int) -> RankingConfig | None:
    """What a file says of it, None for one without the matrix. Raises FormatError."""
    info = gguf.tensors.get(RANK_TENSOR)
    if info is None:
        return None
    key = f"{architecture}.{LABELS_KEY}"
    labels = gguf.metadata.get_strings(key, default=()) or ("",)  # one without a name
    expected = (model_dim, len(labels))
    if info.shape not in (expected, expected[: 1 + (len(labels) > 1)]):
        raise FormatError(
            f"tensor {quote(RANK_TENSOR)} has shape {list(info.shape)}, but metadata key "
            f"{quote(key)} makes it {list(expected)}; the file is damaged or was converted wrongly"
        )
    if info.type_name not in readable_types():
        raise FormatError(
            f"tensor {quote(RANK_TENSOR)} is of type {info.type_name}, which is not supported "
            "here; fetch the model in another one, such as Q8_0"
        )
    template = gguf.metadata.get_str(RANK_TEMPLATE_KEY, default="")
    return RankingConfig(labels=labels, template=template)
