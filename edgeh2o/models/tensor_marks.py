"""What only the tensors of a file say of its layers: some have them, others do not."""

from __future__ import annotations

from dataclasses import replace

from ..formats.model_tensors import ModelTensors
from . import blocks
from .experts import ROUTER_TENSOR
from .hybrids import HEAD_NORM_TENSOR
from .hyperparameters import Hyperparameters
from .spec import ArchitectureSpec

SINKS_TENSOR = "blk.{layer}.attn_sinks.weight"
FIRST_NORM = "blk.0.attn_norm.weight"
GATE_TENSOR, UP_TENSOR = "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"


def mark_layers(
    gguf: ModelTensors, spec: ArchitectureSpec, shape: Hyperparameters
) -> Hyperparameters:
    """The layers with the norms, sinks and networks that the file has tensors of."""
    if spec.experts is not None and spec.experts.goes_by_tensors:
        shape = _mark_dense(gguf, shape)
    if spec.hybrid is not None and spec.hybrid.mixer == "rwkv7":
        shape = _mark_head_norms(gguf, shape)
    if spec.has_sinks:
        shape = _mark_sinks(gguf, shape, is_required=spec.has_sinks is True)
    if spec.has_optional_first_norm and FIRST_NORM not in gguf.tensors:
        first, *others = shape.layers
        shape = replace(shape, layers=(replace(first, has_mixer_norm=False), *others))
    return shape


def _mark_dense(gguf: ModelTensors, shape: Hyperparameters) -> Hyperparameters:
    """Layers that have no router are dense."""
    widths = shape.feed_forward.dense_ffn_dims
    layers = []
    for i, layer in enumerate(shape.layers):
        if ROUTER_TENSOR.format(layer=i) not in gguf.tensors:
            layer = replace(layer, is_dense=True, ffn_dim=widths[i] if widths else layer.ffn_dim)
        layers.append(layer)
    return replace(shape, layers=tuple(layers))


def _mark_sinks(
    gguf: ModelTensors, shape: Hyperparameters, *, is_required: bool
) -> Hyperparameters:
    """Layers with attention have sinks, or only those that have a tensor of them."""
    return replace(
        shape,
        layers=tuple(
            replace(
                layer,
                has_sinks=layer.n_heads > 0
                and (is_required or SINKS_TENSOR.format(layer=i) in gguf.tensors),
            )
            for i, layer in enumerate(shape.layers)
        ),
    )


def _mark_head_norms(gguf: ModelTensors, shape: Hyperparameters) -> Hyperparameters:
    """Layers of ARWKV without weights of norms of heads have none."""
    return replace(
        shape,
        layers=tuple(
            replace(
                layer,
                wkv_norms_heads=layer.has_shifted_network
                or HEAD_NORM_TENSOR.format(layer=i) in gguf.tensors,
            )
            for i, layer in enumerate(shape.layers)
        ),
    )


def as_first_layer(
    gguf: ModelTensors, spec: ArchitectureSpec, shape: Hyperparameters
) -> ArchitectureSpec:
    """The table for files whose layers have the norms and the network of the first."""
    rules = tuple(
        replace(rule, required=True) if "_norm" in rule.name else rule
        for rule in spec.tensors
        if rule.required
        or "_norm" not in rule.name
        or rule.name.replace("{layer}", "0") in gguf.tensors
    )
    up = gguf.tensors.get(UP_TENSOR)
    if GATE_TENSOR in gguf.tensors:
        network = (*blocks.FEED_FORWARD, *blocks.UNGATED_FEED_FORWARD_BIASES)
    elif up is not None and up.rows == 2 * shape.layers[0].ffn_dim:
        network = (*blocks.FUSED_FEED_FORWARD, blocks.UNGATED_FEED_FORWARD_BIASES[-1])
    else:
        network = (*blocks.UNGATED_FEED_FORWARD, *blocks.UNGATED_FEED_FORWARD_BIASES)
        spec = replace(spec, activation="ungated_gelu")
    return replace(spec, tensors=(*rules, *network))
