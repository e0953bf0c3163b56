"""Architecture ``mimo2``: MiMo-V2-Flash and V2.5, mixtures of experts with windows.

Files say which layers have a window; these have sinks, KV heads of another number and a RoPE base
of their own. Values of heads are narrower than their keys, and are multiplied by a factor where
files have one. Shares of experts are sigmoids that add up to 1; layers without a router have one
network. Layers that guess tokens ahead (MTP), of which there are three, are left out.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="mimo2",
        qk_row_order="half_split",
        activation="silu",
        windows=SlidingWindows(is_required=True, rope_base=10000.0, has_plain_rope=True),
        experts=ExpertRule(
            gate="sigmoid", says_gate=False, has_bias="optional", goes_by_tensors=True
        ),
        scales={"value_scale": "attention.value_scale"},
        has_sinks="optional",
        has_other_values=True,
        has_drafting_layers=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            tensor("blk.{layer}.attn_sinks.weight", "n_heads", required=False),
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of("experts", (*blocks.EXPERTS, *blocks.CHOICE_BIASES)),
        ),
    )
)
