"""The decoder of a GGUF file as ONNX nodes, attention as GroupQueryAttention.

Matrices of types that MatMulNBits represents exactly (Q4_0, Q8_0) keep their quantisation, all
others become float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError
from ..model_config import DecoderConfig
from ..onnx.blocks import BLOCK_SIZE, INT8_ACTIVATIONS, BlockOperands, pack_blocks
from ..runners.native import NativeModel
from .onnx_writer import MICROSOFT, OnnxWriter
from .packages import onnx

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..formats.gguf import GgufFile
    from ..models.tensors import TensorBinding

OPSET = 20
# Rows of the cos and sin tables: more would cost more than the weights of small models.
MAX_ROTARY_POSITIONS = 131072


def check_exportable(config: DecoderConfig) -> None:
    """Raises FormatError for a model that cannot be written."""
    for is_there, what in (
        (not config.is_causal, "attention to what is behind a token"),
        (config.latent, "multi-head latent attention"),
        (config.has_streams, "several residual streams (AltUp)"),
        (config.norms_embeddings or config.post_norm_eps > 0.0, "norms of embeddings"),
        (config.n_experts, "a mixture of experts"),
        (
            config.qk_norm_after_rope,
            "queries and keys that are normed after the rotary embedding",
        ),
        (config.has_sinks, "attention sinks"),
        (config.has_distance_bias, "attention with a bias by distance (ALiBi)"),
        (config.has_joint_bias, "a joint bias of queries, keys and values"),
        (config.is_recurrent, "recurrent layers"),
        (not config.is_gated, "a feed-forward network without a gate"),
        (config.centres_norms, "LayerNorm"),
        (config.is_parallel, "feed-forward networks beside attention"),
        (not config.has_like_layers, "layers that share keys and values"),
        (config.has_sub_norms, "norms behind attention and activations"),
        (config.output_gate != "none", "gates of attention"),
        (config.passes, "layers that are gone through several times"),
        (config.adapter_tokens, "adapters that tokens choose"),
        (config.temperature_period, "queries that grow with their position"),
    ):
        if is_there:
            raise FormatError(f"{what} cannot be written as ONNX yet; run the GGUF file itself")
    if len({(layer.n_heads, layer.n_kv_heads) for layer in config.layers}) > 1:
        raise FormatError(
            "layers with different numbers of heads cannot be written as ONNX: its "
            "configuration has one number for all; run the GGUF file itself"
        )
    if config.rotary_dim % 16:
        raise FormatError(
            f"the model rotates {config.rotary_dim} dimensions of a head; "
            "GroupQueryAttention wants a multiple of 16"
        )


class ModelSource:
    """The weights of a GGUF file, by the names of the core."""

    def __init__(self, gguf: GgufFile, bindings: list[TensorBinding], model: NativeModel) -> None:
        self._gguf = gguf
        self._bindings = {binding.name: binding for binding in bindings}
        self._model = model

    def __contains__(self, name: str) -> bool:
        return name in self._bindings

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm weight or bias [n]."""
        return self._model.dequantize(name).reshape(-1)

    def matrix(self, name: str) -> NDArray[np.float32]:
        """A weight [rows, cols] in float32."""
        return self._model.dequantize(name)

    def blocks(self, name: str) -> BlockOperands | None:
        """A weight as MatMulNBits takes it, None if its type has no exact form."""
        binding = self._bindings[name]
        operands = pack_blocks(self._read(binding), binding.info.type_name, binding.n_rows)
        if operands is None or binding.row_order is None:
            return operands
        order = np.asarray(binding.row_order)
        return BlockOperands(operands.bits, operands.quants[order], operands.scales[order])

    def _read(self, binding: TensorBinding) -> memoryview:
        data = self._gguf.tensor_bytes(binding.info)
        return data[binding.first_byte : binding.first_byte + binding.n_bytes]


class DecoderExporter:
    """Emits the decoder of a ``DecoderConfig``; ``attention`` can be emitted otherwise in tests.

    ``last_logits_only``: logits of the last token alone, which is all that generation needs.
    """

    opset = OPSET

    def __init__(
        self,
        config: DecoderConfig,
        source: ModelSource,
        writer: OnnxWriter,
        *,
        last_logits_only: bool,
    ) -> None:
        self.config = config
        self.source = source
        self.writer = writer
        self._last_logits_only = last_logits_only
        self.n_quantized = self.n_float = 0

    def emit(self) -> None:
        """Adds all nodes."""
        self.emit_mask()
        config, add = self.config, self.writer.add
        x = self._embedding()
        for layer in range(config.n_layers):
            x = self._branch(x, f"blk.{layer}.", "attn", self._attend)
            x = self._branch(x, f"blk.{layer}.", "ffn", self._feed_forward)
        if self._last_logits_only:
            last = self.writer.numbers("/model/last", [-1])
            x = add("Gather", [x, last], "/model/last_token/Gather", axis=1)
        x = self._norm(x, "output_norm.weight")
        self._logits(x)

    def value_infos(self) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        """Inputs and outputs of the model."""
        config, int64, float32 = self.config, onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
        batch, total = "batch_size", "total_sequence_length"
        inputs = [
            onnx.helper.make_tensor_value_info(name, int64, [batch, length])
            for name, length in (("input_ids", "sequence_length"), ("attention_mask", total))
        ]
        shape: list[str | int | None] = [batch, "logits_length", config.vocab_size]
        outputs = [onnx.helper.make_tensor_value_info("logits", float32, shape)]
        for layer in range(config.n_layers):
            for kind in ("key", "value"):
                for name, length, infos in (
                    (f"past_key_values.{layer}.{kind}", "past_sequence_length", inputs),
                    (f"present.{layer}.{kind}", total, outputs),
                ):
                    shape = [batch, config.n_kv_heads, length, config.head_dim]
                    infos.append(onnx.helper.make_tensor_value_info(name, float32, shape))
        return inputs, outputs

    def emit_mask(self) -> None:
        """What GroupQueryAttention wants to know of the mask: seqlens_k and the total length."""
        add, numbers = self.writer.add, self.writer.numbers
        base = "/model/attn_mask_reformat"
        total = add(
            "ReduceSum",
            ["attention_mask", numbers("/one_axis", [1])],
            f"{base}/ReduceSum",
            keepdims=0,
        )
        last = add("Sub", [total, numbers("/ones", [1])], f"{base}/Sub")
        self.seqlens_k = add("Cast", [last], f"{base}/Cast", to=6)
        shape = add("Shape", ["attention_mask"], f"{base}/Shape")
        length = add("Gather", [shape, numbers("/one", 1)], f"{base}/Gather", axis=0)
        self.total_length = add("Cast", [length], f"{base}/Cast_1", to=6)

    def attention(self, layer: int, q: str, k: str, v: str) -> str:
        """Attention over [1, n, width] before the rotary embedding; returns [1, n, q width]."""
        config = self.config
        cos, sin = self.rotary_tables(layer)
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        return self.writer.add(
            "GroupQueryAttention",
            [q, k, v, *past, self.seqlens_k, self.total_length, cos, sin],
            f"/model/layers.{layer}/attn/GroupQueryAttention",
            domain=MICROSOFT,
            outputs=[
                f"/model/layers.{layer}/attn/GroupQueryAttention/output_0",
                *(f"present.{layer}.{kind}" for kind in ("key", "value")),
            ],
            num_heads=config.n_heads,
            kv_num_heads=config.n_kv_heads,
            scale=config.attention_scale,
            do_rotary=1,
            rotary_interleaved=0,
            local_window_size=self.window(layer) or None,
            softcap=config.attention_soft_cap or None,
        )

    def window(self, layer: int) -> int:
        """Positions that a query of the layer sees, 0 for all."""
        return self.config.layers[layer].window

    def rotary_tables(self, layer: int) -> tuple[str, str]:
        """Names of cos and sin [positions, pairs] of a layer."""
        config = self.config
        kind, frequencies, factor = "", config.rope_inv_freq, config.rope_attention_factor
        if config.long_rope_inv_freq and config.context_length > config.long_rope_after:
            kind, frequencies = "_long", config.long_rope_inv_freq
        # The factor belongs to the scaling, which tables of their own do not have.
        if self.window(layer) and config.sliding_rope_inv_freq:
            kind, frequencies, factor = "_sliding", config.sliding_rope_inv_freq, 1.0
        if not config.layers[layer].has_rope:
            kind, frequencies, factor = "_none", (0.0,) * len(config.rope_inv_freq), 1.0
        n_positions = min(config.context_length, MAX_ROTARY_POSITIONS)
        names = f"cos_cache{kind}", f"sin_cache{kind}"
        if names[0] not in self.writer.constants:
            angles = np.arange(n_positions)[:, None] * np.asarray(frequencies, np.float32)
            for name, table in zip(names, (np.cos(angles), np.sin(angles)), strict=True):
                values = (factor * table).astype(np.float32)
                self.writer.constant(name, values)
        return names

    def _embedding(self) -> str:
        table = self.writer.constant(
            "model.embed_tokens.weight", self.source.matrix("token_embd.weight")
        )
        x = self.writer.add("Gather", [table, "input_ids"], "/model/embed_tokens/Gather")
        return self._scaled(x, self.config.embedding_scale, "/model/embed_tokens/Mul")

    def _branch(self, x: str, prefix: str, kind: str, compute: Any) -> str:
        """x + residual_scale * norm(compute(norm(x))), with the norms that the model has."""
        config = self.config
        norm, post_norm = f"{prefix}{kind}_norm.weight", f"{prefix}post_{_LONG[kind]}_norm.weight"
        y = x if config.norm_placement == "post" else self._norm(x, norm)
        y = compute(prefix, y)
        if config.norm_placement != "pre":
            y = self._norm(y, post_norm)
        y = self._scaled(y, config.residual_scale, f"/{prefix}{kind}/scale")
        return self.writer.add("Add", [x, y], f"/{prefix}{kind}/Add")

    def _attend(self, prefix: str, x: str) -> str:
        layer = int(prefix.split(".")[1])
        q, k, v = (self.linear(x, f"{prefix}attn_{name}") for name in "qkv")
        if self.config.qk_norm != "none":
            q = self._qk_norm(q, f"{prefix}attn_q_norm.weight", self.config.n_heads)
            k = self._qk_norm(k, f"{prefix}attn_k_norm.weight", self.config.n_kv_heads)
        return self.linear(self.attention(layer, q, k, v), f"{prefix}attn_output")

    def _feed_forward(self, prefix: str, x: str) -> str:
        add = self.writer.add
        gate, up = self.linear(x, f"{prefix}ffn_gate"), self.linear(x, f"{prefix}ffn_up")
        if self.config.activation == "gelu_tanh":
            gate = add("Gelu", [gate], f"/{prefix}ffn_act", approximate="tanh")
        else:
            sigmoid = add("Sigmoid", [gate], f"/{prefix}ffn_act/Sigmoid")
            gate = add("Mul", [gate, sigmoid], f"/{prefix}ffn_act/Mul")
        product = add("Mul", [gate, up], f"/{prefix}ffn_product")
        return self.linear(product, f"{prefix}ffn_down")

    def linear(self, x: str, name: str) -> str:
        """x [.., inputs] times a weight of the file, plus its bias if there is one."""
        y = self._matmul(x, f"{name}.weight")
        if f"{name}.bias" not in self.source:
            return y
        bias = self.writer.constant(f"{name}.bias", self.source.vector(f"{name}.bias"))
        return self.writer.add("Add", [y, bias], f"/{name}/Add")

    def _matmul(self, x: str, name: str) -> str:
        operands = self.source.blocks(name)
        if operands is None:
            self.n_float += 1
            weight = self.writer.constant(name, self.source.matrix(name).T)
            return self.writer.add("MatMul", [x, weight], f"/{name}/MatMul")
        self.n_quantized += 1
        n_rows, n_blocks, _ = operands.quants.shape
        quants = self.writer.constant(f"{name}_quants", operands.quants)
        scales = self.writer.constant(f"{name}_scales", operands.scales)
        return self.writer.add(
            "MatMulNBits",
            [x, quants, scales],
            f"/{name}/MatMulNBits",
            domain=MICROSOFT,
            K=n_blocks * BLOCK_SIZE,
            N=n_rows,
            bits=operands.bits,
            block_size=BLOCK_SIZE,
            accuracy_level=INT8_ACTIVATIONS,
        )

    def _logits(self, x: str) -> None:
        config, add = self.config, self.writer.add
        name = "token_embd.weight" if config.tied_embeddings else "output.weight"
        if config.tied_embeddings and self.source.blocks(name) is None:
            # The table that the embedding reads, as it is.
            self.n_float += 1
            logits = add(
                "FusedMatMul",
                [x, "model.embed_tokens.weight"],
                "/lm_head/FusedMatMul",
                domain=MICROSOFT,
                transB=1,
            )
        else:
            logits = self._matmul(x, name)
        logits = self._scaled(logits, config.logit_scale, "/lm_head/Mul")
        if config.logit_soft_cap:
            cap = self.writer.constant(
                "logit_soft_cap", np.array(config.logit_soft_cap, np.float32)
            )
            logits = add("Div", [logits, cap], "/lm_head/Div")
            logits = add("Tanh", [logits], "/lm_head/Tanh")
            logits = add("Mul", [logits, cap], "/lm_head/Mul_1")
        add("Identity", [logits], "/lm_head/Identity", outputs=["logits"])

    def _norm(self, x: str, name: str) -> str:
        weight = self.writer.constant(name, self.source.vector(name))
        return self.writer.add(
            "SimplifiedLayerNormalization",
            [x, weight],
            f"/{name}/LayerNorm",
            axis=-1,
            epsilon=self.config.norm_eps,
            stash_type=1,
        )

    def _qk_norm(self, x: str, name: str, n_heads: int) -> str:
        if self.config.qk_norm == "projection":
            return self._norm(x, name)
        heads = self.writer.numbers(f"/heads_{n_heads}", [0, 0, n_heads, self.config.head_dim])
        width = n_heads * self.config.head_dim
        row = self.writer.numbers(f"/row_{width}", [0, 0, width])
        x = self.writer.add("Reshape", [x, heads], f"/{name}/Reshape")
        return self.writer.add("Reshape", [self._norm(x, name), row], f"/{name}/Reshape_1")

    def _scaled(self, x: str, factor: float, name: str) -> str:
        if factor == 1.0:
            return x
        constant = self.writer.constant(f"{name}_factor", np.array(factor, np.float32))
        return self.writer.add("Mul", [x, constant], name)


_LONG = {"attn": "attention", "ffn": "ffw"}
