"""Float64 references of what drafts for one model, in files of its own.

An assistant of Gemma 4: x = pre [E(t); h] of the embedding E of a token in the model, and of the h
that the model's logits before it were made of, goes through layers like the model's, whose queries
read the model's keys and values before the token's position, and nothing else. Its normed output u
makes logits, and post u is the h of the next guess, at the same position.

EAGLE-3 (Li et al., 2025): g_p = fc [x_a; x_b; x_c] of the model's residual stream at p before three
layers. The row beside token p + 1 is g_p, or the output of its own layer at p. Attention reads
[norm(E(t)); norm(g)], what it gives is added to g, and the network is as any.

DFlash makes keys and values of all its layers of norm(fc [x_a; x_b; ...]) of every token that the
model has read. The latest token, and masks behind it, go through the layers together: they see all
of these keys, and each other. What comes out at a mask is the guess of its token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tests.reference.decoder.feed_forward import gelu, silu
from tests.reference.decoder.rope import rotate
from tests.reference.dense import causal_attention
from tests.reference.softmax_state import Array

Weights = Mapping[str, Array]


def _norm(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight
    return normed


def guess_by_cache(
    weights: Weights,
    embedded: Array,
    hidden: Array,
    cached: Sequence[tuple[Array, Array]],
    inv_freqs: Sequence[Array],
    windows: Sequence[int | None],
    *,
    position: int,
    eps: float,
) -> tuple[Array, Array]:
    """Logits [vocab_size] of an assistant, and the next h [dim].

    Args:
        weights: in float64, by their names in the file.
        embedded, hidden: [dim] of the model.
        cached: keys and values [n_kv_heads, position, head_dim] that each layer reads.
        inv_freqs: of each layer.
        windows: positions that its queries see, the token's own included; None for all.
        position: of the token.
        eps: of norms.
    """
    x = weights["nextn.pre_projection.weight"] @ np.concatenate([embedded, hidden])
    for layer, ((k, v), inv_freq, window) in enumerate(
        zip(cached, inv_freqs, windows, strict=True)
    ):
        own = {
            name.removeprefix(f"blk.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"blk.{layer}.")
        }
        q = own["attn_q.weight"] @ _norm(x, own["attn_norm.weight"], eps)
        heads = _norm(q.reshape(-1, 1, k.shape[2]), own["attn_q_norm.weight"], eps)
        heads = rotate(heads, position * inv_freq[None], "half_split")
        seen = slice(0 if window is None else max(0, position - window + 1), position)
        attended = causal_attention(heads, k[:, seen], v[:, seen], scale=1.0).reshape(-1)
        branch = own["attn_output.weight"] @ attended
        x = x + _norm(branch, own["post_attention_norm.weight"], eps)
        normed = _norm(x, own["ffn_norm.weight"], eps)
        inner = gelu(own["ffn_gate.weight"] @ normed) * (own["ffn_up.weight"] @ normed)
        branch = own["ffn_down.weight"] @ inner
        x = x + _norm(branch, own["post_ffw_norm.weight"], eps)
        x = x * own["layer_output_scale.weight"]
    normed = _norm(x, weights["output_norm.weight"], eps)
    return weights["token_embd.weight"] @ normed, weights["nextn.post_projection.weight"] @ normed


def encode(weights: Weights, features: Array, *, eps: float, norms_after: bool = False) -> Array:
    """g [n, dim] of rows [n, n_layers * dim] of the model; DFlash norms what comes out."""
    norm = weights.get("enc.output_norm.weight")
    if norms_after:
        assert norm is not None
        return _norm(features @ weights["fc.weight"].T, norm, eps)
    rows = features if norm is None else _norm(features, norm, eps)
    encoded: Array = rows @ weights["fc.weight"].T
    return encoded


class Eagle3Run:
    """A text that EAGLE-3 reads; see the module. ``rows`` [n, 2 * dim] are what it has read."""

    def __init__(
        self, weights: Weights, *, head_dim: int, inv_freq: Array, eps: float, norms_residual: bool
    ) -> None:
        self._weights = weights
        self._head_dim, self._inv_freq, self._eps = head_dim, inv_freq, eps
        self._norms_residual = norms_residual
        self._k: Array | None = None
        self._v: Array | None = None

    def read(self, embedded: Array, before: Array) -> tuple[Array, Array]:
        """Logits [n, n_guessed] and rows of the next guess [n, dim]; both arguments [n, dim]."""
        w, eps = self._weights, self._eps
        normed = _norm(before, w["blk.0.attn_norm_2.weight"], eps)
        pair = np.concatenate([_norm(embedded, w["blk.0.attn_norm.weight"], eps), normed], axis=1)
        first = 0 if self._k is None else self._k.shape[1]
        angles = np.arange(first, first + len(pair))[:, None] * self._inv_freq

        def heads(letter: str) -> Array:
            rows = pair @ w[f"blk.0.attn_{letter}.weight"].T
            return rows.reshape(len(pair), -1, self._head_dim).transpose(1, 0, 2)

        q, k = (rotate(heads(letter), angles, "interleaved") for letter in "qk")
        v = heads("v")
        self._k = k if self._k is None else np.concatenate([self._k, k], axis=1)
        self._v = v if self._v is None else np.concatenate([self._v, v], axis=1)
        attended = causal_attention(q, self._k, self._v).transpose(1, 0, 2).reshape(len(pair), -1)
        x = (normed if self._norms_residual else before) + attended @ w[
            "blk.0.attn_output.weight"
        ].T
        inner = _norm(x, w["blk.0.ffn_norm.weight"], eps)
        gated = silu(inner @ w["blk.0.ffn_gate.weight"].T) * (inner @ w["blk.0.ffn_up.weight"].T)
        x = x + gated @ w["blk.0.ffn_down.weight"].T
        return _norm(x, w["output_norm.weight"], eps) @ w["output.weight"].T, x


def guess_block(
    weights: Weights,
    embedded: Array,
    encoded: Array,
    *,
    n_layers: int,
    head_dim: int,
    inv_freq: Array,
    windows: Sequence[int | None],
    eps: float,
) -> Array:
    """Logits [n, n_guessed] of DFlash for a block of tokens.

    Args:
        weights: in float64, by their names in the file.
        embedded: [n, dim] of the tokens.
        encoded: [n_before, dim] rows of the tokens before.
        n_layers: how many it has.
        head_dim: of its heads.
        inv_freq: of all layers.
        windows: positions before it that a token of each sees, its own included; None for all.
        eps: of norms.
    """
    n_before, x = len(encoded), embedded
    positions = np.arange(n_before + len(x))
    for layer in range(n_layers):
        prefix = f"blk.{layer}."

        def heads(letter: str, rows: Array, first: int, prefix: str = prefix) -> Array:
            made = rows @ weights[f"{prefix}attn_{letter}.weight"].T
            made = made.reshape(len(rows), -1, head_dim).transpose(1, 0, 2)
            if letter == "v":
                return made
            made = _norm(made, weights[f"{prefix}attn_{letter}_norm.weight"], eps)
            angles = np.arange(first, first + len(rows))[:, None] * inv_freq
            return rotate(made, angles, "half_split")

        normed = _norm(x, weights[prefix + "attn_norm.weight"], eps)
        q = heads("q", normed, n_before)
        k, v = (
            np.concatenate([heads(letter, encoded, 0), heads(letter, normed, n_before)], axis=1)
            for letter in "kv"
        )
        group = len(q) // len(k)
        logits = np.einsum("hqd,hkd->hqk", q, np.repeat(k, group, axis=0)) / head_dim**0.5
        window = windows[layer]
        if window is not None:
            distance = positions[n_before:, None] - positions[None]
            logits = np.where(distance < window, logits, -np.inf)
        shares = np.exp(logits - logits.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        attended = np.einsum("hqk,hkd->qhd", shares, np.repeat(v, group, axis=0))
        x = x + attended.reshape(len(x), -1) @ weights[prefix + "attn_output.weight"].T
        inner = _norm(x, weights[prefix + "ffn_norm.weight"], eps)
        gate, up = (inner @ weights[f"{prefix}ffn_{name}.weight"].T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ weights[prefix + "ffn_down.weight"].T
    guessed: Array = _norm(x, weights["output_norm.weight"], eps) @ weights["output.weight"].T
    return guessed
