"""Blocks with a state that goes from token to token: convolutions, delta nets, Mamba."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.reference.softmax_state import Array

from .delta_net import delta_net
from .feed_forward import sigmoid, silu, softplus
from .mamba1 import selective_scan
from .mamba2 import ssd
from .rows import Rows
from .rwkv6 import linear_attention, wkv6
from .rwkv7 import wkv


class RecurrentBlocks:
    """The recurrent layers of one prompt in progress."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.config = rows.config
        self.weights = rows.weights
        self._conv_inputs: dict[int, Array] = {}  # of the last tokens, by layer
        self._delta_states: dict[int, Array] = {}  # [value_head, key, value], by layer
        self._ssd_states: dict[int, Array] = {}  # [head, row, value], by layer
        self._scan_states: dict[int, Array] = {}  # [channel, state], by layer
        self._wkv_states: dict[int, Array] = {}  # [head, value, key], by layer
        self._last_inputs: dict[str, Array] = {}  # of the last token, by the name of a norm
        self._first_values: Array  # of the first layer

    def convolve(self, layer: int, x: Array) -> Array:
        """A sum over the last tokens, for every channel, between two gates (LFM2)."""
        prefix = f"blk.{layer}.shortconv."
        taps = self.weights[prefix + "conv.weight"].astype(np.float64)  # [channels, taps]
        normed = self.rows.norm(f"blk.{layer}.attn_norm", x)
        first_gate, second_gate, inputs = np.split(
            self.rows.linear(prefix + "in_proj", normed), 3, 1
        )
        sums = self._convolved(layer, first_gate * inputs, taps)
        return self.rows.linear(prefix + "out_proj", second_gate * sums)

    def row_delta(self, layer: int, x: Array) -> Array:
        """A delta net whose rows decay by themselves (Kimi Linear, 2025)."""
        prefix, weights = f"blk.{layer}.", self.weights
        normed = self.rows.norm(prefix + "attn_norm", x)
        taps = [weights[f"{prefix}ssm_conv1d_{name}.weight"] for name in "qkv"]
        inputs = [self.rows.linear(f"{prefix}attn_{name}", normed) for name in "qkv"]
        a = weights[f"{prefix}ssm_a"].astype(np.float64).reshape(-1, 1)
        heads = silu(
            self._convolved(
                layer,
                np.concatenate(inputs, axis=1),
                np.concatenate([each.reshape(-1, each.shape[-1]) for each in taps]).astype(float),
            )
        ).reshape(len(x), 3, len(a), -1)
        q, k = (self._of_length_1(heads[:, i]) for i in range(2))
        steps, gates = (self._gate(prefix + name, normed) for name in ("ssm_f", "ssm_g"))
        steps = (steps + weights[f"{prefix}ssm_dt.bias"]).reshape(q.shape)
        if (floor := self.config.delta_log_floor) < 0.0:
            decays = np.exp(floor * sigmoid(a * steps))
        else:
            decays = np.exp(a * np.logaddexp(0.0, steps))
        rates = sigmoid(self.rows.linear(prefix + "ssm_beta", normed))
        state = self._delta_states.get(layer, np.zeros((len(a), q.shape[-1], q.shape[-1])))
        out, self._delta_states[layer] = delta_net(q, k, heads[:, 2], decays, rates, state)
        out = self.rows.norm(prefix + "ssm_norm", out.reshape(len(x), -1))
        return self.rows.linear(prefix + "attn_output", out * sigmoid(gates))

    def _gate(self, name: str, normed: Array) -> Array:
        """Of the rows, or of vectors that are made of them."""
        first = self.rows.linear(name + "_a", normed)
        has_vectors = f"{name}_b.weight" in self.weights
        return self.rows.linear(name + "_b", first) if has_vectors else first

    def delta(self, layer: int, x: Array) -> Array:
        """A gated delta net: see ``delta_net``."""
        prefix, weights = f"blk.{layer}.", self.weights
        exact = {
            name: weights[prefix + name].astype(np.float64)
            for name in ("ssm_conv1d.weight", "ssm_a", "ssm_dt.bias")
        }
        head_dim = len(weights[f"{prefix}ssm_norm.weight"])
        n_heads = len(exact["ssm_a"])
        normed = self.rows.norm(prefix + "attn_norm", x)
        qkv = self._convolved(
            layer, self.rows.linear(prefix + "attn_qkv", normed), exact["ssm_conv1d.weight"]
        )
        heads = silu(qkv).reshape(len(x), -1, head_dim)
        n_key_heads = (heads.shape[1] - n_heads) // 2
        q, k, v = np.split(heads, [n_key_heads, 2 * n_key_heads], axis=1)
        q, k = (self._of_length_1(part) for part in (q, k))
        repeats = n_heads // n_key_heads
        if self.config.family.has_grouped_heads:
            q, k = (np.repeat(part, repeats, axis=1) for part in (q, k))
            both = self.rows.linear(prefix + "ssm_ba", normed).reshape(
                len(x), n_key_heads, 2, repeats
            )
            rates, steps = (both[:, :, i].reshape(len(x), n_heads) for i in range(2))
        else:
            q, k = (np.tile(part, (1, repeats, 1)) for part in (q, k))
            rates = self.rows.linear(prefix + "ssm_beta", normed)
            steps = self.rows.linear(prefix + "ssm_alpha", normed)
        decays = np.exp(exact["ssm_a"] * softplus(steps + exact["ssm_dt.bias"]))
        state = self._delta_states.get(layer, np.zeros((n_heads, head_dim, head_dim)))
        out, self._delta_states[layer] = delta_net(q, k, v, decays, sigmoid(rates), state)
        out = self.rows.norm(prefix + "ssm_norm", out.reshape(len(x), -1))
        gates = self.rows.linear(prefix + "attn_gate", normed)
        factors = sigmoid(gates) if self.config.family.mixes_streams else silu(gates)
        return self.rows.linear(prefix + "ssm_out", out * factors)

    def mamba1(self, layer: int, x: Array) -> Array:
        """Mamba-1: see ``selective_scan``; what it selects by is normed."""
        prefix, weights = f"blk.{layer}.", self.weights
        names = ("ssm_conv1d.weight", "ssm_conv1d.bias", "ssm_a", "ssm_d")
        taps, biases, a, skips = (weights[prefix + n].astype(np.float64) for n in names)
        projected = self.rows.linear(prefix + "ssm_in", self.rows.norm(prefix + "attn_norm", x))
        inputs, z = np.split(projected, 2, axis=1)
        inputs = silu(self._convolved(layer, inputs, taps) + biases)
        rank = weights[f"{prefix}ssm_dt.weight"].shape[1]
        selected = np.split(
            self.rows.linear(prefix + "ssm_x", inputs), [rank, rank + a.shape[1]], axis=1
        )
        steps, b, c = (
            self.rows.norm(f"{prefix}ssm_{name}_norm", part)
            for name, part in zip(("dt", "b", "c"), selected, strict=True)
        )
        if self.config.has_plain_scan_norms:
            steps, b, c = (self.rows.normalised(part) for part in (steps, b, c))
        rates = softplus(self.rows.linear(prefix + "ssm_dt", steps))
        state = self._scan_states.get(layer, np.zeros_like(a))
        out, self._scan_states[layer] = selective_scan(inputs, rates, b, c, a, skips, state)
        return self.rows.linear(prefix + "ssm_out", out * silu(z))

    def time_mix(self, layer: int, x: Array) -> Array:
        """RWKV-7: see ``wkv``; all inputs have that of the token before in them."""
        prefix = f"blk.{layer}.time_mix_"
        linear = self.rows.linear
        vectors = {
            name: self.weights[f"{prefix}{name}.weight"].astype(np.float64)
            for name in ("w0", "a0", "k_k", "k_a", "r_k")
        }
        inputs = self._shifted(f"blk.{layer}.attn_norm", x)
        shares = (
            self.weights[prefix + "lerp_fused.weight"].astype(np.float64).reshape(-1, x.shape[1])
        )
        of_r, of_w, of_k, of_v, of_a, *of_g = (inputs(share) for share in shares)
        r, k, v = (
            linear(prefix + name, rows)
            for name, rows in (("receptance", of_r), ("key", of_k), ("value", of_v))
        )
        steps = vectors["w0"] + linear(prefix + "w2", np.tanh(linear(prefix + "w1", of_w)))
        decays = np.exp(-np.exp(-0.5) * sigmoid(steps))
        if layer == 0:
            self._first_values = v
        else:
            logits = linear(prefix + "v2", linear(prefix + "v1", of_v))
            share = sigmoid(logits + self.weights[prefix + "v0.weight"])
            v = share * self._first_values + (1.0 - share) * v
        rates = sigmoid(vectors["a0"] + linear(prefix + "a2", linear(prefix + "a1", of_a)))

        def heads(rows: Array) -> Array:
            return rows.reshape(len(rows), -1, self.config.wkv_head_dim)

        directions = heads(k * vectors["k_k"])
        directions = directions / np.linalg.norm(directions, axis=-1, keepdims=True)
        k = k * (1.0 + (rates - 1.0) * vectors["k_a"])
        parts = [heads(part) for part in (r, decays, k, v)]
        _, n_heads, dim = directions.shape
        state = self._wkv_states.get(layer, np.zeros((n_heads, dim, dim)))
        out, self._wkv_states[layer] = wkv(*parts, directions, heads(rates), state)
        own = np.sum(heads(r * k * vectors["r_k"]), axis=-1, keepdims=True) * heads(v)
        if f"{prefix}ln.weight" in self.weights:
            out = self._normed_heads(prefix, out)
        out = out.reshape(x.shape) + own.reshape(x.shape)
        if of_g:
            out = out * linear(prefix + "g2", sigmoid(linear(prefix + "g1", of_g[0])))
        return linear(prefix + "output", out)

    def _normed_heads(self, prefix: str, heads: Array) -> Array:
        """LayerNorm of every head [n, n_heads, dim], with the weights of a time mix."""
        heads = heads - heads.mean(axis=-1, keepdims=True)
        weight, bias = (
            self.weights[f"{prefix}ln.{kind}"].astype(np.float64) for kind in ("weight", "bias")
        )
        return self.rows.normalised(heads, eps=64e-5).reshape(len(heads), -1) * weight + bias

    def time_mix6(self, layer: int, x: Array) -> Array:
        """RWKV-6: see ``wkv6``; how much of the token before is in an input is made of both.

        Without weights of a token's own value it is ``linear_attention``.
        """
        prefix, linear = f"blk.{layer}.time_mix_", self.rows.linear
        shares, decay, first_share = (
            self.weights[f"{prefix}{name}.weight"].astype(np.float64)
            for name in ("lerp_fused", "decay", "lerp_x")
        )
        inputs = self._shifted(f"blk.{layer}.attn_norm", x)
        vectors = np.split(np.tanh(linear(prefix + "w1", inputs(first_share.ravel()))), 5, axis=1)
        names = [f"{prefix}w2.{i}" for i in range(5)]
        of_w, of_k, of_v, of_r, of_g = (
            inputs(share + linear(name, vector))
            for share, name, vector in zip(shares.reshape(5, -1), names, vectors, strict=True)
        )
        k, v, r, gate = (
            linear(prefix + name, rows)
            for name, rows in (("key", of_k), ("value", of_v), ("receptance", of_r), ("gate", of_g))
        )
        steps = decay + linear(prefix + "decay_w2", np.tanh(linear(prefix + "decay_w1", of_w)))

        def heads(rows: Array) -> Array:
            return rows.reshape(len(rows), -1, self.config.wkv_head_dim)

        parts = [heads(part) for part in (r, np.exp(-np.exp(steps)), k, v)]
        _, n_heads, dim = parts[0].shape
        state = self._wkv_states.get(layer, np.zeros((n_heads, dim, dim)))
        if f"{prefix}first.weight" not in self.weights:
            out, self._wkv_states[layer] = linear_attention(*parts, state)
            return linear(prefix + "output", out.reshape(x.shape) * sigmoid(gate))
        first = self.weights[f"{prefix}first.weight"].astype(np.float64)
        out, self._wkv_states[layer] = wkv6(*parts, first.reshape(n_heads, dim), state)
        return linear(prefix + "output", self._normed_heads(prefix, out) * silu(gate))

    def channel_mix(self, layer: int, x: Array) -> Array:
        """The network of RWKV, whose input has that of the token before in it."""
        prefix = f"blk.{layer}.channel_mix_"
        inputs = self._shifted(f"blk.{layer}.attn_norm_2", x)
        share = self.weights[prefix + "lerp_k.weight"].astype(np.float64).ravel()
        hidden = np.maximum(self.rows.linear(prefix + "key", inputs(share)), 0.0) ** 2
        out = self.rows.linear(prefix + "value", hidden)
        if f"{prefix}receptance.weight" not in self.weights:
            return out
        share = self.weights[prefix + "lerp_r.weight"].astype(np.float64).ravel()
        return out * sigmoid(self.rows.linear(prefix + "receptance", inputs(share)))

    def _shifted(self, norm: str, x: Array) -> Callable[[Array], Array]:
        """Normed rows with a share of the difference to the token before."""
        normed = self.rows.norm(norm, x)
        before = self._last_inputs.get(norm, np.zeros_like(normed[:1]))
        self._last_inputs[norm] = normed[-1:]
        differences = np.concatenate([before, normed[:-1]]) - normed
        return lambda share: normed + share * differences

    def mamba2(self, layer: int, x: Array) -> Array:
        """Mamba-2: see ``ssd``; the gate goes before the norm, which is one of every group."""
        prefix, weights = f"blk.{layer}.", self.weights
        names = ("ssm_conv1d.weight", "ssm_conv1d.bias", "ssm_a", "ssm_d", "ssm_dt.bias")
        taps, biases, a, skips, rate_biases = (
            weights[prefix + n].astype(np.float64) for n in names
        )
        n, n_heads, inner = len(x), len(a), weights[f"{prefix}ssm_out.weight"].shape[1]
        groups = self.config.n_ssd_groups
        projected = self.rows.linear(prefix + "ssm_in", self.rows.norm(prefix + "attn_norm", x))
        z, rows, rates = np.split(projected, [inner, len(projected[0]) - n_heads], axis=1)
        rows = silu(self._convolved(layer, rows, taps) + biases)
        inputs, b, c = np.split(rows, [inner, (inner + len(rows[0])) // 2], axis=1)
        b, c = (np.repeat(part.reshape(n, groups, -1), n_heads // groups, 1) for part in (b, c))
        rates = softplus(rates + rate_biases)
        decays = np.exp(a.ravel() * rates)
        state = self._ssd_states.get(layer, np.zeros((n_heads, b.shape[2], inner // n_heads)))
        heads = inputs.reshape(n, n_heads, -1)
        out, self._ssd_states[layer] = ssd(heads, b, c, decays, rates, skips.ravel(), state)
        gated_rows = (out.reshape(n, inner) * silu(z)).reshape(n, groups, -1)
        if f"{prefix}ssm_norm.weight" in weights:
            norm = weights[f"{prefix}ssm_norm.weight"].astype(np.float64).reshape(groups, -1)
            gated_rows = self.rows.normalised(gated_rows) * norm
        return self.rows.linear(prefix + "ssm_out", gated_rows.reshape(n, inner))

    def selecting_mamba2(self, layer: int, x: Array) -> Array:
        """Mamba-2 whose rates, and what writes to the state and reads it, are made of its channels
        and normed (PLaMo 2); one of the latter is of all heads."""
        prefix, weights = f"blk.{layer}.", self.weights
        names = ("ssm_conv1d.weight", "ssm_a", "ssm_d")
        taps, a, skips = (weights[prefix + n].astype(np.float64) for n in names)
        n, n_heads = len(x), len(a)
        projected = self.rows.linear(prefix + "ssm_in", self.rows.norm(prefix + "attn_norm", x))
        z, inputs = projected.reshape(n, n_heads, 2, -1).transpose(2, 0, 1, 3).reshape(2, n, -1)
        inputs = silu(self._convolved(layer, inputs, taps))
        n_rows = len(weights[f"{prefix}ssm_b_norm.weight"])
        selected = np.split(
            self.rows.linear(prefix + "ssm_x", inputs), [n_rows, 2 * n_rows], axis=1
        )
        b, c, steps = (
            self.rows.norm(f"{prefix}ssm_{name}_norm", part)
            for name, part in zip(("b", "c", "dt"), selected, strict=True)
        )
        rates = softplus(self.rows.linear(prefix + "ssm_dt", steps))
        b, c = (np.repeat(part[:, None], n_heads, axis=1) for part in (b, c))
        heads = inputs.reshape(n, n_heads, -1)
        state = self._ssd_states.get(layer, np.zeros((n_heads, n_rows, heads.shape[2])))
        out, self._ssd_states[layer] = ssd(heads, b, c, np.exp(a * rates), rates, skips, state)
        return self.rows.linear(prefix + "ssm_out", out.reshape(n, -1) * silu(z))

    def _convolved(self, layer: int, inputs: Array, taps: Array) -> Array:
        """Sums over the last tokens [n, channels], weighted by taps [channels, n_taps]."""
        n_before = taps.shape[1] - 1
        before = self._conv_inputs.get(layer, np.zeros((n_before, inputs.shape[1])))
        all_inputs = np.concatenate([before, inputs])
        self._conv_inputs[layer] = all_inputs[len(all_inputs) - n_before :]
        parts = (taps[:, j] * all_inputs[j : j + len(inputs)] for j in range(taps.shape[1]))
        return np.sum(list(parts), axis=0)

    def _of_length_1(self, heads: Array) -> Array:
        squares = np.sum(heads * heads, axis=-1, keepdims=True)
        return heads / np.sqrt(squares + self.config.norm_eps)
