"""Blocks of attention: queries and keys normed and rotated, latent rows, what indexers choose."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.reference.cached_rows import stored
from tests.reference.indexer import choose_tokens, index_scores, layer_norm, margin_of
from tests.reference.softmax_state import Array

from .feed_forward import sigmoid, softmax, softplus
from .latent import absorbed_queries, absorbed_values
from .rope import RopeLayout, rotate
from .rows import Rows

# Of q, k and v [heads, n, head_dim], the output in that shape.
Attend = Callable[[Array, Array, Array], Array]


class AttentionBlocks:
    """The layers with attention of one prompt in progress.

    Attributes:
        position: number of tokens read before the present call.
        chosen: of the present call's tokens what they read, of layers with indexers.
        chosen_by_head: the same of every KV head, where these read other blocks.
        margins: by which the scores decided it, of every choice.
    """

    def __init__(self, rows: Rows, *, cache_type: str) -> None:
        self.rows = rows
        self.config = rows.config
        self.weights = rows.weights
        self.position = 0
        self.chosen: list[Array] = []
        self.chosen_by_head: list[list[Array]] = []
        self.margins: list[float] = []
        self._cache_type = cache_type
        self._kv: dict[int, tuple[Array, Array]] = {}  # of the layers of the present call
        self._index_keys: dict[int, Array] = {}  # of the tokens before, by layer
        self._latent_rows: dict[int, Array] = {}  # of indexed layers, the same
        self._listed_rows: dict[int, tuple[Array, Array]] = {}  # keys and values, likewise

    def attend(
        self,
        layer: int,
        x: Array,
        angles: Array,
        run: Attend,
    ) -> Array:
        prefix, config = f"blk.{layer}.", self.config
        normed = self.rows.norm(prefix + "attn_norm", x)
        q = self._rotated(layer, "q", normed, angles) * self._temperatures(layer, len(x))
        source = self.config.kv_layers[layer]
        if source == layer:
            k = self._rotated(layer, "k", normed, angles)
            v = self._limited(self.rows.linear(f"{prefix}attn_v", normed))
            v = v.reshape(len(x), len(k), -1).transpose(1, 0, 2)
            if self.config.family.is_gemma4:
                v = self.rows.normalised(v)
            self._kv[layer] = stored(k, self._cache_type), stored(v, self._cache_type)
        if config.index_blocks and config.index_blocks[layer]:
            if config.n_local_blocks < 0:
                self._choose_blocks(layer, normed, angles)
            else:
                self._choose_by_head(layer, normed, angles)
            heads = self._attend_listed(layer, q, *self._kv[source])
        else:
            heads = run(q, *self._kv[source])
        output = heads.transpose(1, 0, 2).reshape(len(x), -1)
        if self.config.family.is_delta_net:
            output = output * sigmoid(self._query_halves(layer, normed)[1])
        if f"{prefix}attn_gate.weight" in self.weights:
            gates = self.rows.linear(prefix + "attn_gate", normed)
            factors = softplus(gates) if self.config.family.has_softplus_gate else sigmoid(gates)
            output = output * np.repeat(factors, output.shape[1] // gates.shape[1], axis=1)
        output = self.rows.norm(prefix + "attn_sub_norm", output)
        return self.config.value_scale * self.rows.linear(prefix + "attn_output", output)

    def attend_latent(
        self,
        layer: int,
        x: Array,
        angles: Array,
        run: Attend,
    ) -> Array:
        """In the space of the cached rows: see ``latent``."""
        prefix = f"blk.{layer}."
        w_k, w_v = (
            self.weights[f"{prefix}attn_{letter}_b.weight"].astype(np.float64) for letter in "kv"
        )
        nope_dim, rank = w_k.shape[1:]
        normed = self.rows.norm(prefix + "attn_norm", x)
        if f"{prefix}attn_q_a.weight" in self.weights:
            vectors = self.rows.norm(
                f"{prefix}attn_q_a_norm", self.rows.linear(f"{prefix}attn_q_a", normed)
            )
            rows = self.rows.linear(f"{prefix}attn_q_b", vectors)
        else:
            rows = self.rows.linear(f"{prefix}attn_q", normed)
        q = rows.reshape(len(x), len(w_k), -1).transpose(1, 0, 2)
        row = self.rows.linear(f"{prefix}attn_kv_a_mqa", normed)
        latent = self.rows.norm(f"{prefix}attn_kv_a_norm", row[:, :rank])
        rotated_row = self.rows.norm(f"{prefix}attn_k_norm", row[:, rank:])
        rotated_q, rotated_k = (
            rotate(self.rows.ordered(part, angles), angles, self.rows.rope_layout)
            for part in (q[..., nope_dim:], rotated_row[None])
        )
        q = np.concatenate([q[..., :nope_dim], rotated_q], axis=-1)
        q = q * self._temperatures(layer, len(x))
        keys = stored(np.concatenate([latent[None], rotated_k], axis=-1), self._cache_type)
        if self.config.index_top_k and self.config.windows[layer] is None:
            if f"{prefix}indexer.proj.weight" in self.weights:
                self._choose(layer, normed, vectors, angles)
            attended = self._attend_chosen(layer, absorbed_queries(q, w_k), keys[0])
        else:
            attended = run(absorbed_queries(q, w_k), keys, keys[..., :rank])
        values = absorbed_values(attended, w_v)
        if f"{prefix}attn_gate.weight" in self.weights:
            values = values * sigmoid(self.rows.linear(prefix + "attn_gate", normed)).T[..., None]
        return self.rows.linear(
            prefix + "attn_output", values.transpose(1, 0, 2).reshape(len(x), -1)
        )

    def _choose(self, layer: int, normed: Array, vectors: Array, angles: Array) -> None:
        """What every token of the call reads: see ``tests.reference.indexer``."""
        prefix, config, n = f"blk.{layer}.indexer.", self.config, len(normed)
        weights = self.rows.linear(f"{prefix}proj", normed)
        n_heads, names = weights.shape[1], (f"{prefix}k_norm.weight", f"{prefix}k_norm.bias")
        norm = (self.weights[name].astype(np.float64) for name in names)
        layout: RopeLayout = (
            "interleaved" if config.family.has_interleaved_indexer else "half_split"
        )
        q = (
            self.rows.linear(f"{prefix}attn_q_b", vectors)
            .reshape(n, n_heads, -1)
            .transpose(1, 0, 2)
        )
        q = rotate(q, angles, layout)
        keys = layer_norm(self.rows.linear(f"{prefix}attn_k", normed), *norm)[None]
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

    def _choose_blocks(self, layer: int, normed: Array, angles: Array) -> None:
        """The same where blocks have one score each, by the mean of their keys: those of the best
        blocks before a token or with it, and what lies behind the last of them."""
        prefix, config, n = f"blk.{layer}.indexer.", self.config, len(normed)
        size, layout = config.index_blocks[layer], self.rows.rope_layout
        key_dim = self.weights[f"{prefix}k_proj.weight"].shape[0]

        def rotated(name: str, rows: Array, at: Array) -> Array:
            heads = self.rows.norm(prefix + name, rows).reshape(len(rows), -1, key_dim)
            heads = heads.transpose(1, 0, 2).copy()
            heads[..., : 2 * at.shape[1]] *= config.rope_factor
            return rotate(heads, at, layout)

        q = rotated("q_norm", self.rows.linear(f"{prefix}q_proj", normed), angles)
        cache_type = "f16" if self._cache_type == "q8_0" else self._cache_type
        before = self._index_keys.get(layer, np.zeros((0, key_dim)))
        keys = stored(self.rows.linear(f"{prefix}k_proj", normed)[None], cache_type)[0]
        self._index_keys[layer] = keys = np.concatenate([before, keys])
        n_blocks = len(keys) // size
        means = keys[: n_blocks * size].reshape(n_blocks, size, key_dim).mean(axis=1)
        starts = np.arange(n_blocks)[:, None] * size * config.inv_freq[layer]
        blocks = stored(rotated("k_norm", means, starts), cache_type)[0]
        scores = index_scores(q.transpose(1, 0, 2), np.ones((n, len(q))), blocks)
        self.chosen = []
        for i, row in enumerate(scores):
            end = self.position + i + 1
            n_whole, n_read = end // size, config.index_top_k // size
            best = choose_tokens(row, n_read, n_whole - 1) if n_whole else np.zeros(0, np.int32)
            of_blocks = (best[:, None] * size + np.arange(size)).ravel()
            self.chosen.append(np.concatenate([of_blocks, np.arange(n_whole * size, end)]))
            self.margins.append(margin_of(row[:n_whole], n_read))

    def _choose_by_head(self, layer: int, normed: Array, angles: Array) -> None:
        """The same where every KV head has a query of its own: the blocks of the tokens that it
        scores best, and the last ones, as many as are read at the most."""
        prefix, config, n = f"blk.{layer}.indexer.", self.config, len(normed)
        size, n_read = config.index_blocks[layer], config.index_top_k // config.index_blocks[layer]
        key_dim = self.weights[f"{prefix}k_proj.weight"].shape[0]

        def rotated(name: str) -> Array:
            rows = self.rows.linear(f"{prefix}{name}_proj", normed).reshape(n, -1, key_dim)
            heads = self.rows.norm(f"{prefix}{name}_norm", rows).transpose(1, 0, 2)
            return rotate(heads, angles, self.rows.rope_layout)

        q, cache_type = rotated("q"), "f16" if self._cache_type == "q8_0" else self._cache_type
        before = self._index_keys.get(layer, np.zeros((0, key_dim)))
        keys = np.concatenate([before, stored(rotated("k"), cache_type)[0]])
        self._index_keys[layer] = keys
        self.chosen_by_head = []
        for i in range(n):
            end = self.position + i + 1
            n_blocks = -(-end // size)
            of_heads = []
            for scores in q[:, i] @ keys[:end].T:
                padded = np.full(n_blocks * size, -np.inf)
                padded[:end] = scores
                best = padded.reshape(n_blocks, size).max(axis=1)
                best[max(n_blocks - config.n_local_blocks, 0) :] = np.inf
                self.margins.append(margin_of(best, n_read))
                read = choose_tokens(best, n_read, n_blocks - 1)
                tokens = (read[:, None] * size + np.arange(size)).ravel()
                of_heads.append(tokens[tokens < end])
            self.chosen_by_head.append(of_heads)
        self.chosen = [of_heads[0] for of_heads in self.chosen_by_head]

    def _attend_listed(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Attention of q [heads, n, head_dim] to the positions that their tokens read."""
        before = self._listed_rows.get(layer)
        if before is not None:
            k, v = (np.concatenate(pair, axis=1) for pair in zip(before, (k, v), strict=True))
        self._listed_rows[layer] = k, v
        group = len(q) // len(k)
        keys, values = (np.repeat(rows, group, axis=0) for rows in (k, v))
        out = np.zeros((len(q), q.shape[1], v.shape[2]))
        lists = self.chosen_by_head or [[chosen] for chosen in self.chosen]
        for i, of_heads in enumerate(lists):
            heads = np.split(np.arange(len(q)), len(of_heads))
            for chosen, own in zip(of_heads, heads, strict=True):
                read = np.ix_(own, chosen)
                logits = np.einsum("hd,hkd->hk", q[own, i], keys[read])
                weights = softmax(self.config.attention_scale * logits)
                out[own, i] = np.einsum("hk,hkd->hd", weights, values[read])
        return out

    def _attend_chosen(self, layer: int, q: Array, rows: Array) -> Array:
        """Attention of q [heads, n, row_dim] to the rows that their tokens read."""
        config = self.config
        assert config.latent is not None
        before = self._latent_rows.get(layer, np.zeros((0, rows.shape[1])))
        self._latent_rows[layer] = rows = np.concatenate([before, rows])
        out = [
            softmax(config.attention_scale * q[:, i] @ rows[chosen].T)
            @ rows[chosen, : config.latent.rank]
            for i, chosen in enumerate(self.chosen)
        ]
        return np.stack(out, axis=1)

    def _query_halves(self, layer: int, normed: Array) -> tuple[Array, Array]:
        """Queries and gates, both [n, q_dim], which the matrix has by turns, head by head."""
        heads = self.rows.heads(layer, self.rows.linear(f"blk.{layer}.attn_q", normed))
        rows = heads.transpose(1, 0, 2)
        return rows[:, ::2].reshape(len(rows), -1), rows[:, 1::2].reshape(len(rows), -1)

    def _rotated(self, layer: int, letter: str, normed: Array, angles: Array) -> Array:
        """Queries or keys [n_heads, n, head_dim]: normed, if the model does that, and rotated."""
        config = self.config
        name = f"blk.{layer}.attn_{letter}"
        if letter == "q" and config.family.is_delta_net:
            rows = self._query_halves(layer, normed)[0]
        else:
            rows = self._limited(self.rows.linear(name, normed))
        if not config.family.norms_after_rope:
            rows = self.rows.norm(name + "_norm", rows)
        heads = self.rows.ordered(self.rows.heads(layer, rows), angles)
        if config.family.norms_rotated and config.inv_freq[layer].any():
            heads = self.rows.normalised(heads)
        rotated_dim = 2 * angles.shape[1]
        heads[..., :rotated_dim] *= config.rope_factor
        heads = rotate(heads, angles, self.rows.rope_layout)
        if not config.family.norms_after_rope:
            return heads
        if not config.family.has_norm_weights:  # but heads of queries have a factor each
            gains = self.weights.get(name + "_norm.weight", np.ones(1, np.float32))
            return self.rows.normalised(heads) * gains.reshape(-1, 1, 1)
        weight = self.weights[name + "_norm.weight"].astype(np.float64)
        return self.rows.normalised(heads) * self.rows.ordered(weight, angles)

    def _limited(self, rows: Array) -> Array:
        limit = self.config.qkv_limit
        return rows if limit is None else np.clip(rows, -limit, limit)

    def _temperatures(self, layer: int, n: int) -> Array:
        """Factors [n, 1] of the queries of the next n positions."""
        config = self.config
        positions = np.arange(self.position, self.position + n)[:, None]
        if config.family.unrotated_temperature is not None:
            if config.inv_freq[layer].any():
                return np.ones((n, 1))
            positions = positions + 1
        periods = positions // max(config.temperature_period, 1)
        return 1.0 + config.temperature_scale * np.log(1.0 + periods)
