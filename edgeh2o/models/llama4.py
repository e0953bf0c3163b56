"""Architecture ``llama4``: Llama 4 Scout and Maverick (texts).

Three of four layers see the chunk of 8,192 tokens that a token is in, the fourth everything,
without positions; there queries grow with theirs. Heads are normed without weights where they are
rotated, but for Maverick's. A token goes through one expert, whose input is multiplied by its
share, and through one that all share; in Maverick every other layer has one network.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensors_of
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="llama4",
        qk_row_order="interleaved",
        rope=RopeRule(only_windows=True, unrotated_temperature=(0.1, 8192)),
        rope_factors="rope_freqs.weight",
        activation="silu",
        norms_rotated=True,
        n_unnormed_experts=128,
        windows=SlidingWindows(full_every=4, default=8192, is_chunked=True),
        experts=ExpertRule(
            shared="equal",
            gate="sigmoid",
            says_gate=False,
            is_normalised=False,
            goes_by_steps=True,
            scales_inputs=True,
        ),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of(
                "experts",
                (*blocks.EXPERTS, *blocks.required(blocks.SHARED_EXPERT)),
            ),
        ),
    )
)
