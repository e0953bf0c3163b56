"""Architecture ``exaone-moe``: K-EXAONE, a mixture of experts with windows.

Queries and keys are normed per head. Layers without a window have no positions. Experts are chosen
as in ``deepseek2``. Files may have a layer that guesses tokens ahead (MTP): they do not say whether
it has a window, and its network is one; SGLang takes it for the first of the layers, which has one.
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
        name="exaone-moe",
        qk_row_order="half_split",
        rope=RopeRule(only_windows=True),
        rope_factors="rope_freqs.weight",
        qk_norm="head",
        activation="silu",
        windows=SlidingWindows(is_required=True),
        experts=ExpertRule(
            shared="required",
            gate="sigmoid",
            has_bias="optional",
            has_dense_layers=True,
            has_scales=True,
        ),
        has_drafting_layers=True,
        can_draft=True,
        drafts_as_first=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.HEAD_NORMS,
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of(
                "experts",
                (
                    *blocks.EXPERTS,
                    *blocks.required(blocks.SHARED_EXPERT),
                    *blocks.CHOICE_BIASES,
                ),
            ),
        ),
    )
)
