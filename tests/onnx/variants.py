"""The same tiny decoders with other attention operators.

Each variant overrides how the exporter of the project emits attention; the weights are those of the
GGUF file, so that onnxruntime's own run of the whole file and the native runner are both oracles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgeh2o.export.decoder import DecoderExporter

MICROSOFT = "com.microsoft"


class GroupQuery(DecoderExporter):
    """As the exporter writes it: GroupQueryAttention that rotates."""


class Packed(DecoderExporter):
    """Queries, keys and values in one tensor."""

    def attention(self, layer: int, q: str, k: str, v: str) -> str:
        qkv = self.writer.add("Concat", [q, k, v], f"/layers.{layer}/Concat", axis=-1)
        return super().attention(layer, qkv, "", "")


class Interleaved(DecoderExporter):
    """Pairs (2i, 2i + 1) are rotated: other logits, the same in every runner of the file."""

    def attention(self, layer: int, q: str, k: str, v: str) -> str:
        output = super().attention(layer, q, k, v)
        for attribute in self.writer.nodes[-1].attribute:
            if attribute.name == "rotary_interleaved":
                attribute.i = 1
        return output


class Rotated(DecoderExporter):
    """The rotary embedding is a node of its own, with the input position_ids."""

    def value_infos(self) -> Any:
        from onnx import TensorProto, helper

        inputs, outputs = super().value_infos()
        shape = ["batch_size", "sequence_length"]
        inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, shape))
        return inputs, outputs

    def rotate(self, layer: int, x: str, name: str, n_heads: int) -> str:
        cos, sin = self.rotary_tables(layer)
        is_partial = self.config.rotary_dim != self.config.head_dim
        return self.writer.add(
            "RotaryEmbedding",
            [x, "position_ids", cos, sin],
            f"/layers.{layer}/{name}/RotaryEmbedding",
            domain=MICROSOFT,
            interleaved=0,
            num_heads=n_heads if is_partial else 0,
            rotary_embedding_dim=self.config.rotary_dim if is_partial else 0,
        )

    def rotate_both(self, layer: int, q: str, k: str) -> tuple[str, str]:
        config = self.config
        return (
            self.rotate(layer, q, "q", config.n_heads),
            self.rotate(layer, k, "k", config.n_kv_heads),
        )

    def names(self, layer: int) -> tuple[list[str], list[str]]:
        """Past inputs of a layer's attention, and its outputs."""
        kinds = ("key", "value")
        return (
            [f"past_key_values.{layer}.{kind}" for kind in kinds],
            [f"/layers.{layer}/attn", *(f"present.{layer}.{kind}" for kind in kinds)],
        )


class RotatedGroupQuery(Rotated):
    """GroupQueryAttention without the rotary embedding."""

    def attention(self, layer: int, q: str, k: str, v: str) -> str:
        q, k = self.rotate_both(layer, q, k)
        output = super().attention(layer, q, k, v)
        node = self.writer.nodes[-1]
        del node.input[7:]
        for attribute in node.attribute:
            if attribute.name == "do_rotary":
                attribute.i = 0
        return output


class MultiHead(Rotated):
    """MultiHeadAttention, causal by its attribute; as many KV heads as query heads."""

    unidirectional: int | None = 1

    def attention(self, layer: int, q: str, k: str, v: str) -> str:
        q, k = self.rotate_both(layer, q, k)
        past, outputs = self.names(layer)
        return self.writer.add(
            "MultiHeadAttention",
            [q, k, v, "", "", self.bias(), *past],
            f"/layers.{layer}/MultiHeadAttention",
            domain=MICROSOFT,
            outputs=outputs,
            num_heads=self.config.n_heads,
            scale=self.config.attention_scale,
            unidirectional=self.unidirectional,
        )

    def bias(self) -> str:
        return ""


class BiasedMultiHead(MultiHead):
    """MultiHeadAttention, causal by a bias that the graph computes."""

    unidirectional = None

    def bias(self) -> str:
        return causal_bias(self)


class StandardAttention(Rotated):
    """Attention of opset 23 on [batch, tokens, width]."""

    opset = 23

    def attention(self, layer: int, q: str, k: str, v: str) -> str:
        config = self.config
        q, k = self.rotate_both(layer, q, k)
        past, outputs = self.names(layer)
        mask = self.mask()
        return self.writer.add(
            "Attention",
            [q, k, v, mask, *past],
            f"/layers.{layer}/Attention",
            outputs=outputs,
            is_causal=0 if mask else 1,
            q_num_heads=config.n_heads,
            kv_num_heads=config.n_kv_heads,
            scale=config.attention_scale,
            softcap=config.attention_soft_cap or None,
        )

    def mask(self) -> str:
        return ""


class MaskedAttention(StandardAttention):
    """Attention of opset 23 with a mask that the graph computes."""

    def mask(self) -> str:
        return causal_bias(self)


class LaterAttention(StandardAttention):
    """Attention of opset 24."""

    opset = 24


class HeadMajorAttention(Rotated):
    """Attention of opset 23 on [batch, heads, tokens, head_dim], as PyTorch exports it."""

    opset = 23

    def attention(self, layer: int, q: str, k: str, v: str) -> str:
        config, add, numbers = self.config, self.writer.add, self.writer.numbers
        q, k = self.rotate_both(layer, q, k)
        parts = (("q", q, config.n_heads), ("k", k, config.n_kv_heads), ("v", v, config.n_kv_heads))
        heads = []
        for name, x, n_heads in parts:
            shape = numbers(f"/split_{n_heads}", [0, 0, n_heads, config.head_dim])
            place = f"/layers.{layer}/{name}"
            x = add("Reshape", [x, shape], f"{place}/Reshape")
            heads.append(add("Transpose", [x], f"{place}/Transpose", perm=[0, 2, 1, 3]))
        past, outputs = self.names(layer)
        x = add(
            "Attention",
            [*heads, causal_bias(self), *past],
            f"/layers.{layer}/Attention",
            outputs=outputs,
            scale=config.attention_scale,
        )
        x = add("Transpose", [x], f"/layers.{layer}/Transpose", perm=[0, 2, 1, 3])
        row = numbers("/row", [0, 0, config.n_heads * config.head_dim])
        return add("Reshape", [x, row], f"/layers.{layer}/Reshape")


def causal_bias(exporter: DecoderExporter) -> str:
    """[1, 1, n, total] of 0 and -1e9, from the lengths of the inputs; of a window if it has one."""
    writer, name = exporter.writer, "/mask/bias"
    if any(name in node.output for node in writer.nodes):
        return name
    add, numbers = writer.add, writer.numbers
    zero, one = numbers("/zero", 0), numbers("/one", 1)
    shape = add("Shape", ["input_ids"], "/mask/ShapeOfTokens")
    n_new = add("Gather", [shape, one], "/mask/new")
    shape = add("Shape", ["past_key_values.0.key"], "/mask/ShapeOfPast")
    n_past = add("Gather", [shape, numbers("/two", 2)], "/mask/past")
    total = add("Add", [n_new, n_past], "/mask/total")
    keys = add("Range", [zero, total, one], "/mask/keys")
    queries = add("Range", [n_past, total, one], "/mask/queries")
    queries = add("Unsqueeze", [queries, numbers("/axis", [1])], "/mask/column")
    hidden = add("Greater", [keys, queries], "/mask/Greater")
    window = max(layer.window for layer in exporter.config.layers)
    if window:
        width = numbers("/mask/window", window)
        first = add("Sub", [queries, width], "/mask/first")
        old = add("LessOrEqual", [keys, first], "/mask/old")
        hidden = add("Or", [hidden, old], "/mask/Or")
    low = writer.constant("/mask/low", np.float32(-1e9))
    none = writer.constant("/mask/none", np.float32(0))
    bias = add("Where", [hidden, low, none], "/mask/Where")
    return add("Unsqueeze", [bias, numbers("/axes", [0, 1])], "/mask/Unsqueeze", outputs=[name])


VARIANTS: Sequence[type[DecoderExporter]] = (
    GroupQuery,
    Packed,
    Interleaved,
    RotatedGroupQuery,
    MultiHead,
    BiasedMultiHead,
    StandardAttention,
    MaskedAttention,
    LaterAttention,
    HeadMajorAttention,
)
# The first onnxruntime that runs a variant, if not all do that edgeh2o takes.
FIRST_RUNTIME: dict[type[DecoderExporter], tuple[int, ...]] = {LaterAttention: (1, 24)}
# Their windows are an attribute of the operator, or come from the mask that the graph computes.
WINDOWED = (GroupQuery, Packed, Interleaved, RotatedGroupQuery, BiasedMultiHead, MaskedAttention)


def options_for(variant: type[DecoderExporter]) -> dict[str, object]:
    """What a tiny model needs for the variant."""
    return {"n_kv_heads": 8} if issubclass(variant, MultiHead) else {}
