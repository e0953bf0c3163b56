"""Float64 reference of the decoder, to be read.

``families`` says what no tensor or key of a file tells, ``reading`` makes a configuration and
weights of a GGUF file, ``rows`` has products and norms, ``attention``, ``recurrent`` and
``ffn_block`` have the blocks of a layer (with the rotary embedding of ``rope`` and the formulas of
``latent``, ``delta_net``, ``mamba1``, ``mamba2`` and ``feed_forward``), ``token_inputs`` what
Gemma 3n and 4 have besides, and ``run`` the layers of a prompt in progress.
"""

from __future__ import annotations

from .rope import half_split_row_order, rotate
from .run import AttentionLayer, DecoderRun, ReferenceDecoder

__all__ = [
    "AttentionLayer",
    "DecoderRun",
    "ReferenceDecoder",
    "half_split_row_order",
    "rotate",
]
