"""Models whose tokens read those behind them too, in float64: hidden rows of a text.

Of GGUF files as llama.cpp's converter writes them: ``gemma-embedding``, ``llama-embed``, ``bert``,
``nomic-bert``, ``nomic-bert-moe``, ``jina-bert-v2``, ``jina-bert-v3``, ``eurobert``, ``neo-bert``
and ``modern-bert``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

from tests.reference.decoder.rope import RopeLayout, frequencies, rotate
from tests.reference.dense import alibi_slopes, causal_attention
from tests.reference.softmax_state import Array

_INTERLEAVED = ("llama-embed", "neo-bert")


def gelu(x: Array) -> Array:
    """By its tanh, as llama.cpp has it."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


class ReferenceEncoder:
    """The model of a file.

    Attributes:
        weights: float64 [rows, cols] or [n] by their names in the file.
    """

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self.architecture: str = self._fields["general.architecture"]
        self.weights: dict[str, Array] = {
            tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        self.n_layers: int = self._key("block_count")
        self.n_heads: int = self._key("attention.head_count")
        self.n_kv_heads: int = self._key("attention.head_count_kv", self.n_heads)
        dim = self.weights["token_embd.weight"].shape[1]
        self.head_dim: int = self._key("attention.key_length", dim // self.n_heads)
        self.is_bert = "token_embd_norm.bias" in self.weights
        self.is_gemma = self.architecture == "gemma-embedding"
        self.is_modern = self.architecture == "modern-bert"

    def rows(self, tokens: Any) -> Array:
        """Hidden rows [n, dim] of token ids."""
        w, n = self.weights, len(tokens)
        x = w["token_embd.weight"][np.asarray(tokens)]
        if self.is_gemma:
            x = x * np.sqrt(x.shape[1])
        if "token_types.weight" in w:
            x = x + w["token_types.weight"].reshape(-1, x.shape[1])[0]
        if "position_embd.weight" in w:
            x = x + w["position_embd.weight"][:n]
        x = self._norm("token_embd_norm", x)
        for layer in range(self.n_layers):
            prefix = f"blk.{layer}."
            if self.is_bert:  # norms are of the sums
                attended = self._norm(f"{prefix}attn_output_norm", x + self._attend(layer, x))
                if f"{prefix}attn_norm_2.weight" in w:
                    attended = self._norm(f"{prefix}attn_norm_2", attended + x)
                x = attended
                x = self._norm(f"{prefix}layer_output_norm", x + self._feed_forward(prefix, x))
                continue
            attended = self._attend(layer, self._norm(f"{prefix}attn_norm", x))
            x = x + self._norm(f"{prefix}post_attention_norm", attended)
            fed = self._feed_forward(prefix, self._norm(f"{prefix}ffn_norm", x))
            x = x + self._norm(f"{prefix}post_ffw_norm", fed)
        return self._norm("enc.output_norm", self._norm("output_norm", x))

    def vector(self, tokens: Any, pooling: str) -> Array:
        """What is made of them, by the matrices behind the pooling too."""
        rows = self.rows(tokens)
        made = {"none": rows, "mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1]}[pooling]
        for name in ("dense_2.weight", "dense_3.weight"):
            if name in self.weights:
                made = made @ self.weights[name].T
        return made

    def scores(self, tokens: Any) -> Array:
        """Logits of labels: a head as RoBERTa's, or ModernBERT's."""
        rows, w = self.rows(tokens), self.weights
        x = rows.mean(axis=0) if self.is_modern else rows[0]
        if "cls.weight" in w:
            x = self._linear("cls", x)
            x = gelu(x) if self.is_modern else np.tanh(x)
            x = self._norm("cls.norm", x[None])[0]
        return self._linear("cls.output", x)

    def _key(self, name: str, default: Any = None) -> Any:
        return self._fields.get(f"{self.architecture}.{name}", default)

    def _norm(self, name: str, x: Array) -> Array:
        """LayerNorm or RMS norm by the file's weights; nothing where there are none."""
        weight = self.weights.get(f"{name}.weight")
        if weight is None:
            return x
        if not (self.is_bert or self.is_modern):
            eps = self._key("attention.layer_norm_rms_epsilon")
            return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)
        normed = centred / np.sqrt(variance + self._key("attention.layer_norm_epsilon")) * weight
        return normed + self.weights.get(f"{name}.bias", 0.0)

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def _mix(self, prefix: str, x: Array) -> Array:
        """Experts without a gate; the shares of the best are not made to add up to 1."""
        up, down = (self.weights[f"{prefix}ffn_{name}_exps.weight"] for name in ("up", "down"))
        logits = self._linear(f"{prefix}ffn_gate_inp", x)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        best = np.argsort(-shares, axis=1)[:, : self._key("expert_used_count")]
        out = np.zeros_like(x)
        for row, chosen in enumerate(best):
            for e in chosen:
                out[row] += shares[row, e] * (down[e] @ gelu(up[e] @ x[row]))
        return out

    def _window(self, layer: int) -> int:
        """Positions that a query sees to either side, its own included; 0: all."""
        width = self._key("attention.sliding_window", 0)
        if not width or not (self.is_gemma or self.is_modern):
            return 0
        pattern = self._key("attention.sliding_window_pattern", 6 if self.is_gemma else 3)
        if isinstance(pattern, list):
            has_window = pattern[layer]
        else:
            has_window = layer % pattern != (0 if self.is_modern else pattern - 1)
        return width // 2 + 1 if has_window else 0

    def _attend(self, layer: int, x: Array) -> Array:
        prefix, n, window = f"blk.{layer}.", len(x), self._window(layer)
        if f"{prefix}attn_qkv.weight" in self.weights:
            sizes = np.array([self.n_heads, self.n_kv_heads, self.n_kv_heads]) * self.head_dim
            parts = np.split(self._linear(f"{prefix}attn_qkv", x), np.cumsum(sizes)[:-1], axis=1)
        else:
            parts = [self._linear(f"{prefix}attn_{letter}", x) for letter in "qkv"]
        if self.is_bert:
            parts[:2] = [
                self._norm(f"{prefix}attn_{letter}_norm", part)
                for letter, part in zip("qk", parts[:2], strict=True)
            ]
        q, k, v = (
            part.reshape(n, -1, self.head_dim).transpose(1, 0, 2).astype(np.float64)
            for part in parts
        )
        if self.is_gemma:
            q, k = self._norm(f"{prefix}attn_q_norm", q), self._norm(f"{prefix}attn_k_norm", k)
        has_alibi = self.architecture == "jina-bert-v2"
        if self.architecture != "bert" and not has_alibi:
            base = self._key("rope.freq_base", 10000.0)
            if window:
                base = self._key("rope.freq_base_swa", 10000.0)
            angles = np.arange(n)[:, None] * frequencies(self.head_dim, base)
            layout: RopeLayout = (
                "interleaved" if self.architecture in _INTERLEAVED else "half_split"
            )
            q, k = rotate(q, angles, layout), rotate(k, angles, layout)
        slopes = alibi_slopes(self.n_heads) if has_alibi else None
        out = causal_attention(q, k, v, window=window or None, is_causal=False, slopes=slopes)
        return self._linear(f"{prefix}attn_output", out.transpose(1, 0, 2).reshape(n, -1))

    def _feed_forward(self, prefix: str, x: Array) -> Array:
        if f"{prefix}ffn_gate_inp.weight" in self.weights:
            return self._mix(prefix, x)
        width = self.weights[f"{prefix}ffn_down.weight"].shape[1]
        is_fused = len(self.weights[f"{prefix}ffn_up.weight"]) == 2 * width
        if f"{prefix}ffn_gate.weight" not in self.weights and not is_fused:
            return self._linear(f"{prefix}ffn_down", gelu(self._linear(f"{prefix}ffn_up", x)))
        if is_fused:
            gate, up = np.split(self._linear(f"{prefix}ffn_up", x), 2, axis=1)
        else:
            gate = self._linear(f"{prefix}ffn_gate", x)
            up = self._linear(f"{prefix}ffn_up", x)
        is_silu = self._key("hidden_activation") in ("silu", "swiglu") or not (
            self.is_gemma or self.is_modern or self.architecture == "jina-bert-v2"
        )
        return self._linear(f"{prefix}ffn_down", (silu(gate) if is_silu else gelu(gate)) * up)
