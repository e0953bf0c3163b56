"""Mixtures of experts in shapes: tensors of their layers and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gguf import GGUFWriter, RopeScalingType

from tools.shape_models.shape import Experts, Shape
from tools.shape_models.tensor import Tensor


def expert_tensors(
    prefix: str,
    shape: Shape,
    experts: Experts,
    types: tuple[str, str],
    vectors: Callable[..., Tensor],
) -> Iterator[Tensor]:
    """The router and the stacks of a layer; ``types`` are those of gate and up, and of down."""
    width, ffn_dim, usual = shape.model_dim, shape.ffn_dim, types[0]
    yield vectors(f"{prefix}ffn_gate_inp.weight", experts.n_experts, width)
    for name, rows, cols, type_name in (
        ("gate", ffn_dim, width, usual),
        ("up", ffn_dim, width, usual),
        ("down", width, ffn_dim, types[1]),
    ):
        stack = f"{prefix}ffn_{name}_exps"
        yield Tensor(f"{stack}.weight", (experts.n_experts, rows, cols), type_name)
        if experts.has_biases:
            yield vectors(f"{stack}.bias", experts.n_experts, rows)
    if experts.has_biases:
        yield vectors(f"{prefix}ffn_gate_inp.bias", experts.n_experts)
    if experts.has_shared:
        yield vectors(f"{prefix}ffn_gate_inp_shexp.weight", width)
        yield Tensor(f"{prefix}ffn_gate_shexp.weight", (ffn_dim, width), usual)
        yield Tensor(f"{prefix}ffn_up_shexp.weight", (ffn_dim, width), usual)
        yield Tensor(f"{prefix}ffn_down_shexp.weight", (width, ffn_dim), types[1])


def add_expert_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Keys of a mixture, and of what gpt-oss has beside it, if there is one."""
    if (experts := shape.experts) is None:
        return
    writer.add_expert_count(experts.n_experts)
    writer.add_expert_used_count(experts.n_used)
    writer.add_expert_feed_forward_length(shape.ffn_dim)
    if experts.has_shared:
        writer.add_expert_shared_feed_forward_length(shape.ffn_dim)
    if shape.window is not None:
        writer.add_sliding_window(shape.window)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(shape.context_length / shape.trained_context)
        writer.add_rope_scaling_orig_ctx_len(shape.trained_context)
