"""Float64 reference of the decoder, to be read.

``families`` says what no tensor or key of a file tells, ``reading`` makes a configuration and
weights of a GGUF file, ``rope`` has the rotary embedding, ``feed_forward`` the feed-forward
networks, and ``run`` the layers of a prompt in progress.
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
