"""The layers of a prompt in progress, in float64.

Query and key rows are used in the order of the file, where the two elements of a rotated pair are
neighbours (interleaved), or reordered to the half-split layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.reference.cached_rows import stored
from tests.reference.dense import DenseLayer
from tests.reference.indexer import choose_tokens, index_scores, layer_norm, margin_of
from tests.reference.pairs import chunk_bounds
from tests.reference.quant import dequantise_q8_rows, quantise_q8_rows
from tests.reference.softmax_state import Array

from .delta_net import delta_net
from .feed_forward import (
    ACTIVATIONS,
    by_cutoff,
    by_xielu,
    gated,
    gelu,
    mixture,
    sigmoid,
    silu,
    softmax,
)
from .latent import absorbed_queries, absorbed_values
from .mamba2 import ssd
from .reading import ReferenceConfig, Weights, read_gguf
from .rope import RopeLayout, half_split_row_order, rotate
from .streams import correct, merge, predict, spread

Tokens = Sequence[int] | NDArray[np.integer]
# Of the residual stream.
_NORMS = ("attn_norm", "ffn_norm", "output_norm")
FFN_NAMES = ("ffn_up", "ffn_gate_inp")


class AttentionLayer(Protocol):
    """Attention state of one layer: `DenseLayer` or `H2OLayer`."""

    def prefill(self, q: Array, k: Array, v: Array) -> Array: ...

    def decode(self, q: Array, k: Array, v: Array) -> Array: ...


class ReferenceDecoder:
    """Weights and sizes of a model, immutable.

    Attributes:
        config: sizes.
        weights: dequantised float32 arrays [rows, cols] or [n] by GGUF tensor name.
        quantised: type names of the tensors that the file stores in a block format.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        weights: Weights,
        quantised: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.weights = weights
        self.quantised = quantised

    @classmethod
    def from_gguf(cls, path: Path) -> ReferenceDecoder:
        """Reads a GGUF file of one of the FAMILIES."""
        return cls(*read_gguf(path))

    def start(
        self,
        make_layer: Callable[..., AttentionLayer],
        *,
        rope_layout: RopeLayout = "interleaved",
        scale_block_of: Callable[[str], int] | None = None,
        cache_type: str = "f64",
    ) -> DecoderRun:
        """Begins a prompt.

        Args:
            make_layer: builds the attention state of a layer without a window, from its scale
                and soft_cap.
            rope_layout: order of the query and key rows inside the computation; files that are
                in half-split order stay as they are.
            scale_block_of: rounds the inputs of block-quantised matrices to 8 bits, as the integer
                kernels do, by the type of the matrix with a scale per 32 or per 256 of them;
                everything else stays exact.
            cache_type: type that keys and values are rounded to, see `stored`.
        """
        return DecoderRun(
            self,
            [self._make_layer(make_layer, i) for i in range(self.config.n_layers)],
            rope_layout=rope_layout if self.config.family.is_interleaved else "half_split",
            scale_block_of=scale_block_of,
            cache_type=cache_type,
        )

    def _make_layer(self, make_layer: Callable[..., AttentionLayer], layer: int) -> AttentionLayer:
        window = self.config.windows[layer]
        options: dict[str, Any] = {
            "scale": self.config.attention_scale,
            "soft_cap": self.config.attention_soft_cap,
        }
        sinks = self.weights.get(f"blk.{layer}.attn_sinks.weight")
        if sinks is not None:
            options["sinks"] = sinks.astype(np.float64)
        return make_layer(**options) if window is None else DenseLayer(window=window, **options)


class DecoderRun:
    """One prompt in progress.

    Attributes:
        layers: attention state per layer.
        position: number of tokens read so far.
    """

    def __init__(
        self,
        decoder: ReferenceDecoder,
        layers: list[AttentionLayer],
        *,
        rope_layout: RopeLayout,
        scale_block_of: Callable[[str], int] | None,
        cache_type: str,
    ) -> None:
        self._decoder = decoder
        self._rope_layout: RopeLayout = rope_layout
        self._scale_block_of = scale_block_of
        self._cache_type = cache_type
        self.layers = layers
        self.position = 0
        self._conv_inputs: dict[int, Array] = {}  # of the last tokens, by layer
        self._delta_states: dict[int, Array] = {}  # [value_head, key, value], by layer
        self._ssd_states: dict[int, Array] = {}  # [head, row, value], by layer
        self._kv: dict[int, tuple[Array, Array]] = {}  # of the layers of the present call
        self._index_keys: dict[int, Array] = {}  # of the tokens before, by layer
        self._rows: dict[int, Array] = {}  # of indexed layers, the same
        self.chosen: list[Array] = []  # of the present call's tokens: what they read
        self.margins: list[float] = []  # by which the scores decided it, of every choice

    def prefill(self, tokens: Tokens) -> Array:
        """Runs one logical batch layer by layer; returns logits [n_tokens, vocab_size]."""
        return self._run(tokens, lambda layer: layer.prefill)

    def prefill_chunk_major(self, tokens: Tokens, *, chunk_size: int) -> Array:
        """Runs the whole network chunk by chunk; must equal `prefill`."""
        bounds = chunk_bounds(len(tokens), chunk_size=chunk_size)
        return np.concatenate([self.prefill(tokens[start:stop]) for start, stop in bounds])

    def decode(self, token: int) -> Array:
        """Appends one token with full attention; returns logits [vocab_size]."""
        return self._run([token], lambda layer: layer.decode)[0]

    def _run(
        self,
        tokens: Tokens,
        attention: Callable[[AttentionLayer], Callable[[Array, Array, Array], Array]],
    ) -> Array:
        weights = self._decoder.weights
        config = self._decoder.config
        x = weights["token_embd.weight"][np.asarray(tokens)].astype(np.float64)
        x = embedded = x * config.embedding_scale
        positions = np.arange(self.position, self.position + len(tokens))[:, None]
        streams = self._spread(x) if config.family.has_streams else None
        for layer_idx, layer in enumerate(self.layers):
            prefix = f"blk.{layer_idx}."
            angles = positions * config.inv_freq[layer_idx]
            if streams is not None:
                streams = predict(streams, *self._modes(prefix, "predict", streams[0]))
                x = streams[0]
            if f"{prefix}shortconv.conv.weight" in weights:
                branch = self._conv_block(layer_idx, x)
            elif f"{prefix}ssm_beta.weight" in weights or f"{prefix}ssm_ba.weight" in weights:
                branch = self._delta_block(layer_idx, x)
            elif config.latent is not None:
                branch = self._latent_block(layer_idx, x, angles, attention(layer))
            else:
                branch = np.zeros_like(x)
            if f"{prefix}ssm_in.weight" in weights:
                branch = branch + self._mamba_block(layer_idx, x)
            if f"{prefix}attn_output.weight" in weights and config.latent is None:
                branch = branch + self._attention_block(layer_idx, x, angles, attention(layer))
            layer_input = x
            x = x + config.residual_scale * self._post_norm(prefix + "post_attention_norm", branch)
            if f"{prefix}laurel_l.weight" in weights:
                x = (x + self._laurel(prefix, layer_input)) / 2**0.5
            has_ffn = any(f"{prefix}{name}.weight" in weights for name in FFN_NAMES)
            ffn_input = layer_input if config.family.is_parallel else x
            branch = self._ffn_block(prefix, ffn_input) if has_ffn else np.zeros_like(x)
            x = x + config.residual_scale * self._post_norm(prefix + "post_ffw_norm", branch)
            if streams is not None:
                streams = correct(streams, x, *self._modes(prefix, "correct", x))
                x = streams[0] * weights[f"{prefix}altup_correct_scale.weight"].astype(np.float64)
            if f"{prefix}inp_gate.weight" in weights:
                inputs = self._token_inputs(layer_idx, tokens, embedded)
                gated_inputs = gelu(self._linear(f"{prefix}inp_gate", x)) * inputs
                added = self._norm(
                    f"{prefix}post_norm", self._linear(f"{prefix}proj", gated_inputs)
                )
                if streams is None:
                    x = x + added
                else:
                    streams[1:] += added
            x = x * weights.get(f"{prefix}layer_output_scale.weight", 1.0)
        if streams is not None:
            x = merge(streams, weights["altup_unembd_proj.weight"].astype(np.float64))
        self.position += len(tokens)
        output = "output" if "output.weight" in weights else "token_embd"
        normed = self._norm(config.family.output_norm, x)
        logits = self._linear(output, normed)
        if "output.bias" in weights and output != "output":  # of the embedding, which is the output
            logits = logits + weights["output.bias"]
        logits = logits * config.logit_scale
        cap = config.logit_soft_cap
        return logits if cap is None else cap * np.tanh(logits / cap)

    def _attention_block(
        self,
        layer: int,
        x: Array,
        angles: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> Array:
        prefix = f"blk.{layer}."
        normed = self._norm(prefix + "attn_norm", x)
        q = self._rotated(layer, "q", normed, angles) * self._temperatures(len(x))
        source = self._decoder.config.kv_layers[layer]
        if source == layer:
            k = self._rotated(layer, "k", normed, angles)
            v = self._heads(layer, self._limited(self._linear(f"{prefix}attn_v", normed)))
            if self._decoder.config.family.is_gemma4:
                v = self._normalised(v)
            self._kv[layer] = stored(k, self._cache_type), stored(v, self._cache_type)
        output = attend(q, *self._kv[source]).transpose(1, 0, 2).reshape(len(x), -1)
        if self._decoder.config.family.is_delta_net:
            output = output * sigmoid(self._query_halves(layer, normed)[1])
        return self._linear(prefix + "attn_output", output)

    def _latent_block(
        self,
        layer: int,
        x: Array,
        angles: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> Array:
        """In the space of the cached rows: see ``latent``."""
        prefix, sizes = f"blk.{layer}.", self._decoder.config.latent
        assert sizes is not None
        w_k, w_v = (
            self._decoder.weights[f"{prefix}attn_{letter}_b.weight"].astype(np.float64)
            for letter in "kv"
        )
        normed = self._norm(prefix + "attn_norm", x)
        if f"{prefix}attn_q_a.weight" in self._decoder.weights:
            vectors = self._norm(
                f"{prefix}attn_q_a_norm", self._linear(f"{prefix}attn_q_a", normed)
            )
            rows = self._linear(f"{prefix}attn_q_b", vectors)
        else:
            rows = self._linear(f"{prefix}attn_q", normed)
        q = rows.reshape(len(x), len(w_k), -1).transpose(1, 0, 2)
        row = self._linear(f"{prefix}attn_kv_a_mqa", normed)
        latent = self._norm(f"{prefix}attn_kv_a_norm", row[:, : sizes.rank])
        rotated_q, rotated_k = (
            rotate(self._ordered(part, angles), angles, self._rope_layout)
            for part in (q[..., sizes.nope_dim :], row[None, :, sizes.rank :])
        )
        q = np.concatenate([q[..., : sizes.nope_dim], rotated_q], axis=-1)
        keys = stored(np.concatenate([latent[None], rotated_k], axis=-1), self._cache_type)
        if self._decoder.config.index_top_k:
            if f"{prefix}indexer.proj.weight" in self._decoder.weights:
                self._choose(layer, normed, vectors, angles)
            attended = self._attend_chosen(layer, absorbed_queries(q, w_k), keys[0])
        else:
            attended = attend(absorbed_queries(q, w_k), keys, keys[..., : sizes.rank])
        values = absorbed_values(attended, w_v)
        return self._linear(prefix + "attn_output", values.transpose(1, 0, 2).reshape(len(x), -1))

    def _choose(self, layer: int, normed: Array, vectors: Array, angles: Array) -> None:
        """What every token of the call reads: see ``tests.reference.indexer``."""
        prefix, config, n = f"blk.{layer}.indexer.", self._decoder.config, len(normed)
        weights = self._linear(f"{prefix}proj", normed)
        n_heads, names = weights.shape[1], (f"{prefix}k_norm.weight", f"{prefix}k_norm.bias")
        norm = (self._decoder.weights[name].astype(np.float64) for name in names)
        layout: RopeLayout = (
            "interleaved" if config.family.has_interleaved_indexer else "half_split"
        )
        q = self._linear(f"{prefix}attn_q_b", vectors).reshape(n, n_heads, -1).transpose(1, 0, 2)
        q = rotate(q, angles, layout)
        keys = layer_norm(self._linear(f"{prefix}attn_k", normed), *norm)[None]
        keys = rotate(keys, angles, layout)
        cache_type = "f16" if self._cache_type == "q8_0" else self._cache_type
        before = self._index_keys.get(layer, np.zeros((0, keys.shape[-1])))
        keys = np.concatenate([before, stored(keys, cache_type)[0]])
        self._index_keys[layer] = keys
        scores = index_scores(
            q.transpose(1, 0, 2), weights / (n_heads * keys.shape[1]) ** 0.5, keys
        )
        self.chosen = [
            choose_tokens(row, config.index_top_k, self.position + i)
            for i, row in enumerate(scores)
        ]
        self.margins += [
            margin_of(row[: self.position + i + 1], config.index_top_k)
            for i, row in enumerate(scores)
        ]

    def _attend_chosen(self, layer: int, q: Array, rows: Array) -> Array:
        """Attention of q [heads, n, row_dim] to the rows that their tokens read."""
        config = self._decoder.config
        assert config.latent is not None
        before = self._rows.get(layer, np.zeros((0, rows.shape[1])))
        self._rows[layer] = rows = np.concatenate([before, rows])
        out = [
            softmax(config.attention_scale * q[:, i] @ rows[chosen].T)
            @ rows[chosen, : config.latent.rank]
            for i, chosen in enumerate(self.chosen)
        ]
        return np.stack(out, axis=1)

    def _query_halves(self, layer: int, normed: Array) -> tuple[Array, Array]:
        """Queries and gates, both [n, q_dim], which the matrix has by turns, head by head."""
        heads = self._heads(layer, self._linear(f"blk.{layer}.attn_q", normed))
        rows = heads.transpose(1, 0, 2)
        return rows[:, ::2].reshape(len(rows), -1), rows[:, 1::2].reshape(len(rows), -1)

    def _conv_block(self, layer: int, x: Array) -> Array:
        """A sum over the last tokens, for every channel, between two gates (LFM2)."""
        prefix = f"blk.{layer}.shortconv."
        taps = self._decoder.weights[prefix + "conv.weight"].astype(np.float64)  # [channels, taps]
        normed = self._norm(f"blk.{layer}.attn_norm", x)
        first_gate, second_gate, inputs = np.split(self._linear(prefix + "in_proj", normed), 3, 1)
        sums = self._convolved(layer, first_gate * inputs, taps)
        return self._linear(prefix + "out_proj", second_gate * sums)

    def _convolved(self, layer: int, inputs: Array, taps: Array) -> Array:
        """Sums over the last tokens [n, channels], weighted by taps [channels, n_taps]."""
        n_before = taps.shape[1] - 1
        before = self._conv_inputs.get(layer, np.zeros((n_before, inputs.shape[1])))
        all_inputs = np.concatenate([before, inputs])
        self._conv_inputs[layer] = all_inputs[len(all_inputs) - n_before :]
        parts = (taps[:, j] * all_inputs[j : j + len(inputs)] for j in range(taps.shape[1]))
        return np.sum(list(parts), axis=0)

    def _delta_block(self, layer: int, x: Array) -> Array:
        """A gated delta net: see ``delta_net``."""
        prefix, weights = f"blk.{layer}.", self._decoder.weights
        exact = {
            name: weights[prefix + name].astype(np.float64)
            for name in ("ssm_conv1d.weight", "ssm_a", "ssm_dt.bias")
        }
        head_dim = len(weights[f"{prefix}ssm_norm.weight"])
        n_heads = len(exact["ssm_a"])
        normed = self._norm(prefix + "attn_norm", x)
        qkv = self._convolved(
            layer, self._linear(prefix + "attn_qkv", normed), exact["ssm_conv1d.weight"]
        )
        heads = silu(qkv).reshape(len(x), -1, head_dim)
        n_key_heads = (heads.shape[1] - n_heads) // 2
        q, k, v = np.split(heads, [n_key_heads, 2 * n_key_heads], axis=1)
        q, k = (self._of_length_1(part) for part in (q, k))
        repeats = n_heads // n_key_heads
        if self._decoder.config.family.has_grouped_heads:
            q, k = (np.repeat(part, repeats, axis=1) for part in (q, k))
            both = self._linear(prefix + "ssm_ba", normed).reshape(len(x), n_key_heads, 2, repeats)
            rates, steps = (both[:, :, i].reshape(len(x), n_heads) for i in range(2))
        else:
            q, k = (np.tile(part, (1, repeats, 1)) for part in (q, k))
            rates = self._linear(prefix + "ssm_beta", normed)
            steps = self._linear(prefix + "ssm_alpha", normed)
        decays = np.exp(exact["ssm_a"] * np.log1p(np.exp(steps + exact["ssm_dt.bias"])))
        state = self._delta_states.get(layer, np.zeros((n_heads, head_dim, head_dim)))
        out, self._delta_states[layer] = delta_net(q, k, v, decays, sigmoid(rates), state)
        out = self._norm(prefix + "ssm_norm", out.reshape(len(x), -1))
        return self._linear(
            prefix + "ssm_out", out * silu(self._linear(prefix + "attn_gate", normed))
        )

    def _mamba_block(self, layer: int, x: Array) -> Array:
        """Mamba-2: see ``ssd``; the gate goes before the norm, which is one of every group."""
        prefix, weights = f"blk.{layer}.", self._decoder.weights
        names = ("ssm_conv1d.weight", "ssm_conv1d.bias", "ssm_a", "ssm_d", "ssm_dt.bias")
        taps, biases, a, skips, rate_biases = (
            weights[prefix + n].astype(np.float64) for n in names
        )
        n, n_heads, inner = len(x), len(a), weights[f"{prefix}ssm_out.weight"].shape[1]
        groups = self._decoder.config.n_ssd_groups
        projected = self._linear(prefix + "ssm_in", self._norm(prefix + "attn_norm", x))
        z, rows, rates = np.split(projected, [inner, len(projected[0]) - n_heads], axis=1)
        rows = silu(self._convolved(layer, rows, taps) + biases)
        inputs, b, c = np.split(rows, [inner, (inner + len(rows[0])) // 2], axis=1)
        b, c = (np.repeat(part.reshape(n, groups, -1), n_heads // groups, 1) for part in (b, c))
        rates = np.log1p(np.exp(rates + rate_biases))
        decays = np.exp(a.ravel() * rates)
        state = self._ssd_states.get(layer, np.zeros((n_heads, b.shape[2], inner // n_heads)))
        heads = inputs.reshape(n, n_heads, -1)
        out, self._ssd_states[layer] = ssd(heads, b, c, decays, rates, skips.ravel(), state)
        gated_rows = (out.reshape(n, inner) * silu(z)).reshape(n, groups, -1)
        if f"{prefix}ssm_norm.weight" in weights:
            norm = weights[f"{prefix}ssm_norm.weight"].astype(np.float64).reshape(groups, -1)
            gated_rows = self._normalised(gated_rows) * norm
        return self._linear(prefix + "ssm_out", gated_rows.reshape(n, inner))

    def _of_length_1(self, heads: Array) -> Array:
        squares = np.sum(heads * heads, axis=-1, keepdims=True)
        return heads / np.sqrt(squares + self._decoder.config.norm_eps)

    def _spread(self, embedded: Array) -> Array:
        return spread(embedded, self._decoder.weights["altup_proj.weight"].astype(np.float64))

    def _modes(self, prefix: str, what: str, rows: Array) -> tuple[Array, Array]:
        """Of a layer, by the first stream; and the matrix of the factors that they make."""
        normed = self._norm(f"{prefix}altup_router_norm", rows)
        modes = np.tanh(self._linear(f"{prefix}altup_router", normed) / rows.shape[1])
        return modes, self._decoder.weights[f"{prefix}altup_{what}_coef.weight"].astype(np.float64)

    def _laurel(self, prefix: str, x: Array) -> Array:
        """The normed input and what two matrices of low rank make of it (Menghani et al. 2024)."""
        normed = self._norm(f"{prefix}attn_norm", x)
        low = self._linear(f"{prefix}laurel_r", self._linear(f"{prefix}laurel_l", normed))
        return normed + self._norm(f"{prefix}laurel_post_norm", low)

    def _token_inputs(self, layer: int, tokens: Tokens, embedded: Array) -> Array:
        """The layer's own input of every token [n, width]."""
        weights = self._decoder.weights
        width = len(weights["per_layer_proj_norm.weight"])
        own = slice(layer * width, (layer + 1) * width)
        table = weights["per_layer_token_embd.weight"][np.asarray(tokens), own].astype(np.float64)
        rows = self._linear("per_layer_model_proj", embedded / embedded.shape[1] ** 0.5)[:, own]
        return (table * width**0.5 + self._norm("per_layer_proj_norm", rows)) / 2**0.5

    def _rotated(self, layer: int, letter: str, normed: Array, angles: Array) -> Array:
        """Queries or keys [n_heads, n, head_dim]: normed, if the model does that, and rotated."""
        config = self._decoder.config
        name = f"blk.{layer}.attn_{letter}"
        if letter == "q" and config.family.is_delta_net:
            rows = self._query_halves(layer, normed)[0]
        else:
            rows = self._limited(self._linear(name, normed))
        if not config.family.norms_after_rope:
            rows = self._norm(name + "_norm", rows)
        heads = self._ordered(self._heads(layer, rows), angles)
        rotated_dim = 2 * angles.shape[1]
        heads[..., :rotated_dim] *= config.rope_factor
        heads = rotate(heads, angles, self._rope_layout)
        if not config.family.norms_after_rope:
            return heads
        weight = self._decoder.weights[name + "_norm.weight"].astype(np.float64)
        return self._normalised(heads) * self._ordered(weight, angles)

    def _limited(self, rows: Array) -> Array:
        limit = self._decoder.config.qkv_limit
        return rows if limit is None else np.clip(rows, -limit, limit)

    def _temperatures(self, n: int) -> Array:
        """Factors [n, 1] of the queries of the next n positions."""
        config = self._decoder.config
        positions = np.arange(self.position, self.position + n)[:, None]
        periods = positions // max(config.original_context, 1)
        return 1.0 + config.temperature_scale * np.log(1.0 + periods)

    def _ffn_block(self, prefix: str, x: Array) -> Array:
        config = self._decoder.config
        if config.family.activation == "xielu":
            activate = by_xielu(*config.xielu[int(prefix.split(".")[1])])
        else:
            activate = ACTIVATIONS[config.family.activation]
        normed = self._norm(prefix + config.family.ffn_norm, x)
        if f"{prefix}pre_ffw_norm_2.weight" in self._decoder.weights:
            out = gated(self._linear, prefix, "", normed, activate=activate)
            return self._norm(prefix + "post_ffw_norm_1", out) + self._norm(
                prefix + "post_ffw_norm_2",
                mixture(
                    self._linear,
                    prefix,
                    self._norm(prefix + "pre_ffw_norm_2", x),
                    n_used=config.n_experts_used,
                    is_normalised=True,
                    activate=activate,
                    router_input=self._norm(prefix + "router_norm", x) / np.sqrt(x.shape[1]),
                    factors=self._decoder.weights[f"{prefix}ffn_down_exps.scale"],
                ),
            )
        if f"{prefix}ffn_gate_inp.weight" not in self._decoder.weights:
            if config.gate_cutoffs:
                activate = by_cutoff(config.gate_cutoffs[int(prefix.split(".")[1])], activate)
            return gated(self._linear, prefix, "", normed, activate=activate)
        out = mixture(
            self._linear,
            prefix,
            normed,
            n_used=config.n_experts_used,
            is_normalised=config.normalises_experts,
            activate=activate,
            gate=sigmoid if config.has_sigmoid_gate else softmax,
            biases=self._decoder.weights.get(f"{prefix}exp_probs_b.bias", 0.0),
            n_groups=config.n_expert_groups,
            n_groups_used=config.n_expert_groups_used,
        )
        out = out * config.expert_scale
        if f"{prefix}ffn_up_shexp.weight" in self._decoder.weights:
            shared = gated(self._linear, prefix, "_shexp", normed, activate=activate)
            out = out + self._shared_shares(prefix, normed) * shared
        return out

    def _shared_shares(self, prefix: str, normed: Array) -> Array | float:
        """Weights [n, 1] of the shared expert, 1 if it has no gate."""
        gate = self._decoder.weights.get(f"{prefix}ffn_gate_inp_shexp.weight")
        if gate is None:
            return 1.0
        return sigmoid((normed @ gate.astype(np.float64))[:, None])

    def _post_norm(self, name: str, branch: Array) -> Array:
        """The norm of a branch's output, where the name is not that of an input's."""
        is_input = name.endswith(self._decoder.config.family.ffn_norm)
        return branch if is_input else self._norm(name, branch)

    def _norm(self, name: str, x: Array) -> Array:
        """RMS norm of groups of as many elements as the weight has; x if there is no weight.

        In some families it is LayerNorm: without the mean, and with a bias if there is one.
        """
        family, weight = self._decoder.config.family, self._decoder.weights.get(name + ".weight")
        if weight is None and (family.has_norm_weights or not name.endswith(_NORMS)):
            return x
        weight = np.ones(x.shape[-1]) if weight is None else weight.astype(np.float64)
        groups = x.reshape(*x.shape[:-1], -1, len(weight))
        if self._decoder.config.family.has_layer_norm:
            groups = groups - groups.mean(axis=-1, keepdims=True)
        bias = self._decoder.weights.get(name + ".bias", np.float32(0.0)).astype(np.float64)
        return (self._normalised(groups) * weight + bias).reshape(x.shape)

    def _normalised(self, groups: Array) -> Array:
        """Rows of a mean square of 1."""
        mean_square = np.mean(groups * groups, axis=-1, keepdims=True)
        return groups / np.sqrt(mean_square + self._decoder.config.norm_eps)

    def _linear(self, name: str, x: Array) -> Array:
        """x [n, cols] times the rows of a matrix, plus its bias if the file has one."""
        weights = self._decoder.weights
        stored = re.sub(r"_exps\.\d+", "_exps", name) + ".weight"
        if self._scale_block_of and stored in self._decoder.quantised:
            scale_block = self._scale_block_of(self._decoder.quantised[stored])
            x = dequantise_q8_rows(*quantise_q8_rows(x, scale_block))
        out = x @ weights[name + ".weight"].astype(np.float64).T
        bias = weights.get(name + ".bias")
        return out if bias is None else out + bias

    def _heads(self, layer: int, rows: Array) -> Array:
        """A projection [n, n_heads * head_dim] as [n_heads, n, head_dim]."""
        head_dim = self._decoder.config.head_dims[layer]
        return rows.reshape(len(rows), -1, head_dim).transpose(1, 0, 2)

    def _ordered(self, x: Array, angles: Array) -> Array:
        """Puts the elements of each head into the layout that this run rotates in."""
        config = self._decoder.config
        if self._rope_layout == "interleaved" or not config.family.is_interleaved:
            return x.copy()
        return x[..., half_split_row_order(1, x.shape[-1], 2 * angles.shape[1])]
