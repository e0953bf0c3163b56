"""The layers of a prompt in progress, in float64.

Query and key rows are used in the order of the file, where the two elements of a rotated pair are
neighbours (interleaved), or reordered to the half-split layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from tests.reference.dense import DenseLayer, alibi_slopes
from tests.reference.pairs import chunk_bounds
from tests.reference.softmax_state import Array

from .attention import AttentionBlocks
from .feed_forward import gelu
from .ffn_block import ffn_block
from .mixed_streams import MixedStreams
from .reading import ReferenceConfig, read_gguf
from .recurrent import RecurrentBlocks
from .rope import RopeLayout
from .rows import Rows
from .streams import correct, merge, predict
from .token_inputs import Tokens, first_streams, laurel, stream_modes, token_inputs
from .weight_names import Weights

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
            [self._make_layer(make_layer, layer) for layer in self.config.order],
            rope_layout=rope_layout if self.config.family.is_interleaved else "half_split",
            scale_block_of=scale_block_of,
            cache_type=cache_type,
        )

    def _make_layer(self, make_layer: Callable[..., AttentionLayer], layer: int) -> AttentionLayer:
        window = self.config.windows[layer]
        sliding_scale = self.config.sliding_scale if window is not None else 0.0
        options: dict[str, Any] = {
            "scale": sliding_scale or self.config.attention_scale,
            "soft_cap": self.config.attention_soft_cap,
        }
        if bias := self.config.max_alibi_bias:
            n_heads = (
                len(self.weights[f"blk.{layer}.attn_q.weight"]) // self.config.head_dims[layer]
            )
            options["slopes"] = alibi_slopes(n_heads, bias)
        sinks = self.weights.get(f"blk.{layer}.attn_sinks.weight")
        if sinks is not None:
            options["sinks"] = sinks.astype(np.float64)
        if window is None:
            return make_layer(**options)
        return DenseLayer(window=window, is_chunked=self.config.family.has_chunks, **options)


class DecoderRun:
    """One prompt in progress.

    Attributes:
        layers: attention state per layer.
        hidden: what the logits of the latest call's tokens were made of, [n_tokens, model_dim].
    """

    hidden: Array

    def __init__(
        self,
        decoder: ReferenceDecoder,
        layers: list[AttentionLayer],
        *,
        rope_layout: RopeLayout,
        scale_block_of: Callable[[str], int] | None,
        cache_type: str,
    ) -> None:
        self.layers = layers
        self.rows = Rows(
            decoder.config,
            decoder.weights,
            decoder.quantised,
            rope_layout=rope_layout,
            scale_block_of=scale_block_of,
        )
        self._adapter_numbers: list[int] = []
        self._attention = AttentionBlocks(self.rows, cache_type=cache_type)
        self._recurrent = RecurrentBlocks(self.rows)
        self._mixed = MixedStreams(self.rows)

    @property
    def position(self) -> int:
        """Number of tokens read so far."""
        return self._attention.position

    @property
    def chosen(self) -> list[Array]:
        """Of the last call's tokens what they read, of layers with indexers."""
        return self._attention.chosen

    @property
    def chosen_by_head(self) -> list[list[Array]]:
        """The same of every KV head, where these read other blocks."""
        return self._attention.chosen_by_head

    @property
    def margins(self) -> list[float]:
        """By which the scores of indexers decided, of every choice."""
        return self._attention.margins

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
        weights = self.rows.weights
        config = self.rows.config
        if config.family.mixes_streams:
            return self._run_mixed(tokens, attention)
        if config.adapter_tokens:
            tokens = self._choose_adapters(tokens)
        x = embedded = self._embed(tokens)
        positions = np.arange(self.position, self.position + len(tokens))[:, None]
        if "position_embd.weight" in weights:
            x = x + weights["position_embd.weight"][positions[:, 0]]
        has_states = config.family.has_two_stacks
        streams = first_streams(self.rows, x) if config.family.has_streams else None
        states = [weights["hrm.z_l_init"] + np.zeros_like(x), x] if has_states else []
        for number, layer in enumerate(self.layers):
            layer_idx = config.order[number]
            if has_states and layer_idx % (config.n_layers // 2) == 0:
                if number:
                    before = config.order[number - 1] // (config.n_layers // 2)
                    states[before] = self.rows.norm(config.family.output_norm, x)
                x = states[0] + states[1]
            elif config.norms_loops and number and layer_idx == 0:
                x = self.rows.norm(config.family.output_norm, x)
            prefix = f"blk.{layer_idx}."
            angles = positions * config.inv_freq[layer_idx]
            if streams is not None:
                streams = predict(streams, *stream_modes(self.rows, prefix, "predict", streams[0]))
                x = streams[0]
            if f"{prefix}shortconv.conv.weight" in weights:
                branch = self._recurrent.convolve(layer_idx, x)
            elif f"{prefix}ssm_f_a.weight" in weights:
                branch = self._recurrent.row_delta(layer_idx, x)
            elif f"{prefix}ssm_beta.weight" in weights or f"{prefix}ssm_ba.weight" in weights:
                branch = self._recurrent.delta(layer_idx, x)
            elif config.latent is not None:
                branch = self._attention.attend_latent(layer_idx, x, angles, attention(layer))
            else:
                branch = np.zeros_like(x)
            if f"{prefix}ssm_x.weight" in weights:
                is_per_head = weights[f"{prefix}ssm_a"].ndim == 1
                blocks = self._recurrent
                mamba = blocks.selecting_mamba2 if is_per_head else blocks.mamba1
                branch = branch + mamba(layer_idx, x)
            elif f"{prefix}ssm_in.weight" in weights:
                branch = branch + self._recurrent.mamba2(layer_idx, x)
            if f"{prefix}attn_output.weight" in weights and config.latent is None:
                branch = branch + self._attention.attend(layer_idx, x, angles, attention(layer))
            if f"{prefix}time_mix_decay.weight" in weights:
                branch = self._recurrent.time_mix6(layer_idx, x)
            elif f"{prefix}time_mix_key.weight" in weights:
                branch = self._recurrent.time_mix(layer_idx, x)
            layer_input = x
            x = x + config.residual_scale * self._post_norm(prefix + "post_attention_norm", branch)
            if f"{prefix}laurel_l.weight" in weights:
                x = (x + laurel(self.rows, prefix, layer_input)) / 2**0.5
            has_ffn = any(f"{prefix}{name}.weight" in weights for name in FFN_NAMES)
            ffn_input = layer_input if config.family.is_parallel else x
            branch = np.zeros_like(x)
            if has_ffn:
                branch = ffn_block(self.rows, prefix, ffn_input, layer_input)
            elif f"{prefix}channel_mix_key.weight" in weights:
                branch = self._recurrent.channel_mix(layer_idx, x)
            x = x + config.residual_scale * self._post_norm(prefix + "post_ffw_norm", branch)
            if config.rescale_every and (layer_idx + 1) % config.rescale_every == 0:
                x = 0.5 * x
            if streams is not None:
                streams = correct(streams, x, *stream_modes(self.rows, prefix, "correct", x))
                x = streams[0] * weights[f"{prefix}altup_correct_scale.weight"].astype(np.float64)
            if f"{prefix}inp_gate.weight" in weights:
                inputs = token_inputs(self.rows, layer_idx, tokens, embedded)
                gated_inputs = gelu(self.rows.linear(f"{prefix}inp_gate", x)) * inputs
                added = self.rows.norm(
                    f"{prefix}post_norm", self.rows.linear(f"{prefix}proj", gated_inputs)
                )
                if streams is None:
                    x = x + added
                else:
                    streams[1:] += added
            if config.family.norms_embedding:
                x = x + embedded * weights.get(f"{prefix}layer_output_scale.weight", 0.0)
            else:
                x = x * weights.get(f"{prefix}layer_output_scale.weight", 1.0)
        if streams is not None:
            x = merge(streams, weights["altup_unembd_proj.weight"].astype(np.float64))
        self._attention.position += len(tokens)
        output = "output" if "output.weight" in weights else "token_embd"
        self.hidden = normed = self.rows.norm(config.family.output_norm, x)
        logits = self.rows.linear(output, normed)
        if "output.bias" in weights and output != "output":  # of the embedding, which is the output
            logits = logits + weights["output.bias"]
        logits = logits * config.logit_scale
        cap = config.logit_soft_cap
        return logits if cap is None else cap * np.tanh(logits / cap)

    def _run_mixed(
        self,
        tokens: Tokens,
        attention: Callable[[AttentionLayer], Callable[[Array, Array, Array], Array]],
    ) -> Array:
        """The same of a model whose residual streams are mixed."""
        config, mixed = self.rows.config, self._mixed
        streams = mixed.begin(self._embed(tokens))
        positions = np.arange(self.position, self.position + len(tokens))[:, None]
        for layer in config.order:
            prefix = f"blk.{layer}."
            if config.ngrams is not None and layer == config.ngrams.layer:
                streams = mixed.add_ngrams(tokens, streams)
            x, shares = mixed.mix(prefix + "hc_attn", streams)
            if f"{prefix}ssm_beta.weight" in self.rows.weights:
                branch = self._recurrent.delta(layer, x)
            else:
                angles = positions * config.inv_freq[layer]
                branch = self._attention.attend(layer, x, angles, attention(self.layers[layer]))
            streams = streams + shares * branch[:, None]
            x, shares = mixed.mix(prefix + "hc_ffn", streams)
            streams = streams + shares * ffn_block(self.rows, prefix, x, x)[:, None]
        self._attention.position += len(tokens)
        output = "output" if "output.weight" in self.rows.weights else "token_embd"
        self.hidden, _ = mixed.mix("output_hc", streams)
        return self.rows.linear(output, self.hidden)

    def _choose_adapters(self, tokens: Tokens) -> Tokens:
        """What the tokens are read as; from those that choose an adapter on it counts.

        Where several have been read, a head that attends to them alone gives the mean of their
        numbers, which is rounded.
        """
        config = self.rows.config
        numbers = {token: i + 1 for i, (token, _) in enumerate(config.adapter_tokens)}
        chosen = []
        for token in np.asarray(tokens).tolist():
            self._adapter_numbers.append(numbers.get(token, 0))
            seen = np.array(self._adapter_numbers)
            weights = np.exp(np.where(seen > 0, 1.0, -1.0) * config.adapter_gain)
            chosen.append(int(np.float32(seen @ weights / weights.sum()) + np.float32(0.5)))
        self.rows.adapters = np.array(chosen)
        return [dict(config.adapter_tokens).get(token, token) for token in map(int, tokens)]

    def _embed(self, tokens: Tokens) -> Array:
        """What goes into the first layer, [n_tokens, model_dim]."""
        rows = self.rows.weights["token_embd.weight"][np.asarray(tokens)].astype(np.float64)
        config = self.rows.config
        embedded: Array = rows * config.embedding_scale
        if config.family.has_embedding_norm:
            return self.rows.norm("token_embd_norm", embedded)
        return self.rows.normalised(embedded) if config.family.norms_embedding else embedded

    def _post_norm(self, name: str, branch: Array) -> Array:
        """The norm of a branch's output, where the name is not that of an input's."""
        is_input = name.endswith(self.rows.config.family.ffn_norm)
        eps = self.rows.config.family.post_norm_eps
        return branch if is_input else self.rows.norm(name, branch, eps=eps)
