"""Architecture ``smallthinker``: SmallThinker 4B-A0.6B and 21B-A3B, mixtures of experts.

The router reads what a layer gets, before attention and without a norm, so that experts can be
fetched meanwhile; gates of experts are ReLU. In the larger model three of four layers have a
window, the first neither that nor positions. The width of windows is that of the file, where
llama.cpp takes 4,096.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="smallthinker",
        qk_row_order="half_split",
        activation="relu",
        rope=RopeRule(only_windows=True),
        windows=SlidingWindows(full_every=4, is_full_first=True),
        experts=ExpertRule(gate="file", reads_layer_input=True),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.EXPERTS,
        ),
    )
)
