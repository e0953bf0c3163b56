"""Recurrent layers of the models that ``tools.make_shape_model`` writes: sizes, tensors, keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from tools.make_shape_model import Shape, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Heads of the gated delta nets in all but every ``period``-th layer."""

    period: int
    n_key_heads: int
    n_value_heads: int
    head_dim: int

    @property
    def value_dim(self) -> int:
        return self.n_value_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.value_dim + 2 * self.n_key_heads * self.head_dim

    def tensors(
        self,
        prefix: str,
        shape: Shape,
        matrix: Callable[..., Tensor],
        vectors: Callable[..., Tensor],
    ) -> Iterator[Tensor]:
        width = shape.model_dim
        yield matrix(f"{prefix}attn_qkv", self.conv_dim, width)
        yield matrix(f"{prefix}attn_gate", self.value_dim, width)
        yield matrix(f"{prefix}ssm_beta", self.n_value_heads, width)
        yield matrix(f"{prefix}ssm_alpha", self.n_value_heads, width)
        yield vectors(f"{prefix}ssm_conv1d.weight", self.conv_dim, shape.n_conv_taps)
        yield vectors(f"{prefix}ssm_dt.bias", self.n_value_heads)
        yield vectors(f"{prefix}ssm_a", self.n_value_heads)
        yield vectors(f"{prefix}ssm_norm.weight", self.head_dim)
        yield matrix(f"{prefix}ssm_out", width, self.value_dim)

    def add_metadata(self, writer: GGUFWriter, shape: Shape) -> None:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_uint32(f"{shape.architecture}.full_attention_interval", self.period)
        writer.add_ssm_conv_kernel(shape.n_conv_taps)
        writer.add_ssm_group_count(self.n_key_heads)
        writer.add_ssm_time_step_rank(self.n_value_heads)
        writer.add_ssm_state_size(self.head_dim)
        writer.add_ssm_inner_size(self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Heads of Mamba-2 in the layers without attention."""

    n_heads: int
    head_dim: int
    n_groups: int
    state_dim: int

    def tensors(
        self,
        prefix: str,
        shape: Shape,
        matrix: Callable[..., Tensor],
        vectors: Callable[..., Tensor],
    ) -> Iterator[Tensor]:
        inner = self.n_heads * self.head_dim
        conv_dim = inner + 2 * self.n_groups * self.state_dim
        yield matrix(f"{prefix}ssm_in", inner + conv_dim + self.n_heads, shape.model_dim)
        yield vectors(f"{prefix}ssm_conv1d.weight", conv_dim, shape.n_conv_taps)
        yield vectors(f"{prefix}ssm_conv1d.bias", conv_dim)
        yield vectors(f"{prefix}ssm_dt.bias", self.n_heads)
        yield vectors(f"{prefix}ssm_a", self.n_heads, 1)
        yield vectors(f"{prefix}ssm_d", self.n_heads, 1)
        yield vectors(f"{prefix}ssm_norm.weight", self.n_groups, inner // self.n_groups)
        yield matrix(f"{prefix}ssm_out", shape.model_dim, inner)

    def add_metadata(self, writer: GGUFWriter, shape: Shape) -> None:
        writer.add_ssm_conv_kernel(shape.n_conv_taps)
        writer.add_ssm_group_count(self.n_groups)
        writer.add_ssm_time_step_rank(self.n_heads)
        writer.add_ssm_state_size(self.state_dim)
        writer.add_ssm_inner_size(self.n_heads * self.head_dim)
        writer.add_rope_scaling_finetuned(False)
