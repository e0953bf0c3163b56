"""The layer that guesses tokens ahead (MTP, NextN), which files of some families have.

It lies behind the layers of the model and reads a token beside what the logits of the token before
were made of (DeepSeek-V3, 2024, section 2.2). The core knows it as a model of one layer, whose
embedding and output matrix are those of the file's own model unless it has others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import FormatError
from .experts import MAX_WIDTH
from .joined import bind_joined
from .keys import ArchitectureKeys
from .spec import find_architecture
from .tensors import TensorBinding, TensorPart, TensorRule, tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..formats.model_tensors import ModelTensors
    from ..layer_config import LayerConfig
    from ..model_config import DecoderConfig

# The guesses are of the first ids, so many: those of a byte-pair encoding are in the order of its
# merges, the most frequent first, and the whole output matrix is a quarter of Qwen3.5-2B (Zhao et
# al., "FR-Spec", 2025). A multiple of every panel of columns.
GUESSED_TOKENS = 2**15

# Beside the tensors of a layer with attention.
DRAFTING_TENSORS = (
    tensor(
        "blk.{layer}.nextn.eh_proj.weight",
        "hidden_pair_dim",
        "model_dim",
        core_name="hidden_proj.weight",
    ),
    tensor("blk.{layer}.nextn.enorm.weight", "model_dim", core_name="embedding_norm.weight"),
    tensor("blk.{layer}.nextn.hnorm.weight", "model_dim", core_name="hidden_norm.weight"),
    tensor(
        "blk.{layer}.nextn.shared_head_norm.weight",
        "model_dim",
        required=False,
        core_name="output_norm.weight",
    ),
    # What files of bailingmoe2 call it.
    tensor(
        "blk.{layer}.layer_output_norm.weight",
        "model_dim",
        required=False,
        core_name="output_norm.weight",
    ),
    tensor(
        "blk.{layer}.nextn.embed_tokens.weight",
        "model_dim",
        "vocab_size",
        required=False,
        core_name="token_embd.weight",
    ),
    tensor(
        "blk.{layer}.nextn.shared_head_head.weight",
        "model_dim",
        "vocab_size",
        required=False,
        core_name="output.weight",
    ),
)
_OUTPUT, _NORM = "output.weight", "output_norm.weight"


def why_no_drafting_layer(gguf: ModelTensors) -> str:
    """Why a file, which was found good, has no layer that can draft; empty if it has."""
    spec = find_architecture(gguf.metadata.get_str("general.architecture"))
    shape = spec.read_shape(gguf.metadata)
    n_layers, n_drafting = len(shape.layers), shape.n_drafting_layers
    if not n_drafting or not any(name.startswith(f"blk.{n_layers}.") for name in gguf.tensors):
        return "the file has no layer that guesses tokens ahead (MTP)"
    if not spec.can_draft:
        return f"those layers are left out in models of the architecture {spec.name!r}"
    return "" if n_drafting == 1 else f"the file has {n_drafting} such layers, and only 1 can draft"


def read_drafting_layer(
    gguf: ModelTensors, config: DecoderConfig
) -> tuple[DecoderConfig, list[TensorBinding]]:
    """The configuration of the layer, and its weights by the names of the core.

    ``config`` is that of the file's model, whose ``why_no_drafting_layer`` is empty. Raises
    FormatError that names a tensor which is missing, unknown, or of the wrong shape or type.
    """
    spec = find_architecture(config.architecture)
    shape = spec.read_shape(gguf.metadata)
    place = len(shape.layers)
    layer = _like_first(gguf, config) if spec.drafts_as_first else _like_last(config)
    tensors = {name: i for name, i in gguf.tensors.items() if name.startswith(f"blk.{place}.")}
    try:
        bindings = bind_joined(
            tensors,
            _rules(spec.rules(shape, is_fused=f"blk.{place}.attn_qkv.weight" in tensors), place),
            replace(shape, layers=(layer,)),
            architecture=spec.name,
            interleaved=spec.qk_row_order == "interleaved",
            read_elsewhere=(),
        )
    except FormatError as error:
        raise FormatError(f"{gguf.path}: {error}") from None
    n_guessed = GUESSED_TOKENS if config.vocab_size > GUESSED_TOKENS else 0
    names = {each.name for each in bindings}
    if n_guessed:
        bindings = [
            replace(each, n_rows=n_guessed) if each.name == _OUTPUT else each for each in bindings
        ]
    if _NORM not in names:
        bindings.append(TensorBinding(gguf.tensors[_NORM], _NORM, None, 0, 1))
    own = replace(
        config,
        n_layers=1,
        layers=(layer,),
        reads_hidden=True,
        n_guessed=n_guessed,
    )
    return own, bindings


def _like_last(config: DecoderConfig) -> LayerConfig:
    """It is as the last of the layers that attend: with experts, where the first have none."""
    return next(each for each in reversed(config.layers) if each.mixer == "attention")


def _like_first(gguf: ModelTensors, config: DecoderConfig) -> LayerConfig:
    """It is as the first layer, with one network."""
    keys = ArchitectureKeys(gguf.metadata, config.architecture, len(config.layers))
    width, *_ = keys.integers("feed_forward_length", maximum=MAX_WIDTH)
    return replace(config.layers[0], is_dense=True, ffn_dim=width)


def _rules(rules: Iterable[TensorRule], place: int) -> list[TensorRule]:
    """Those of layer ``place`` of the file, which is layer 0 of a model of its own."""
    own = [rule for rule in rules if "{layer}" in rule.name]
    return [_placed(rule, place) for rule in (*own, *DRAFTING_TENSORS)]


def _placed(rule: TensorRule, place: int) -> TensorRule:
    core_name = (rule.core_name or rule.name).replace("{layer}", "0")
    parts = tuple(replace(part, name=part.name.replace("{layer}", "0")) for part in rule.parts)
    if len(rule.shape) == 3 and not parts:  # a stack of matrices, which parts name
        parts = (TensorPart(core_name, rule.shape[1]),)
    name = rule.name.replace("{layer}", str(place))
    return replace(rule, name=name, core_name=core_name, parts=parts)
