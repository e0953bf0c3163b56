"""Float64 reference of a layer that guesses tokens ahead (MTP, NextN).

h_p is what the logits of token p were made of. Of token x_p and h_{p-1}, zeros for the first, comes
``eh_proj [enorm(embedding(x_p)); hnorm(h_{p-1})]``, which goes through a layer like those of the
model. Its normed output is the h of the next guess, and makes the logits of x_{p+1}.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.reference.decoder import DecoderRun, ReferenceDecoder
from tests.reference.dense import DenseLayer
from tests.reference.softmax_state import Array

_NAMES = {
    "nextn.eh_proj.weight": "hidden_proj.weight",
    "nextn.enorm.weight": "embedding_norm.weight",
    "nextn.hnorm.weight": "hidden_norm.weight",
    "nextn.shared_head_norm.weight": "output_norm.weight",
}


def drafting_decoder(main: ReferenceDecoder) -> ReferenceDecoder:
    """The layer behind those of ``main``, as a model of one layer."""
    config, n_layers = main.config, main.config.n_layers
    prefix = f"blk.{n_layers}."
    shared = {name: main.weights[name] for name in main.weights if not name.startswith("blk.")}
    weights, quantised = dict(shared), {}
    for name, values in main.weights.items():
        if not name.startswith(prefix):
            continue
        rest = name.removeprefix(prefix)
        own = _NAMES.get(rest, f"blk.0.{rest}")
        weights[own] = values
        if name in main.quantised:
            quantised[own] = main.quantised[name]
    quantised |= {name: main.quantised[name] for name in shared if name in main.quantised}
    like = 0 if config.family.drafts_as_first else n_layers - 1
    one = replace(
        config,
        n_layers=1,
        head_dims=(config.head_dims[like],),
        kv_layers=(0,),
        inv_freq=(config.inv_freq[like],),
        windows=(config.windows[like],),
    )
    return ReferenceDecoder(one, weights, quantised)


class DraftingRun(DecoderRun):
    """A text that the layer reads, and goes on writing."""

    _before: Array  # h of the token before each of the call's

    def read(self, tokens: Array, hidden: Array) -> Array:
        """Logits [n_tokens, vocab_size] behind tokens with what goes before each, [n, dim]."""
        self._before = np.asarray(hidden, np.float64)
        return self.prefill(tokens)

    def _embed(self, tokens: Array) -> Array:
        parts = [
            self.rows.norm("embedding_norm", super()._embed(tokens)),
            self.rows.norm("hidden_norm", self._before),
        ]
        return self.rows.linear("hidden_proj", np.concatenate(parts, axis=1))


def start_drafting(decoder: ReferenceDecoder, **options: object) -> DraftingRun:
    """Begins a text; options as those of ``DecoderRun``."""
    layer = DenseLayer(
        scale=decoder.config.attention_scale,
        soft_cap=decoder.config.attention_soft_cap,
        window=decoder.config.windows[0],
    )
    settings: dict[str, object] = {"scale_block_of": None, "cache_type": "f64"}
    layout = "interleaved" if decoder.config.family.is_interleaved else "half_split"
    return DraftingRun(decoder, [layer], rope_layout=layout, **{**settings, **options})  # type: ignore[arg-type]
