"""Architecture ``dots3note``: dots3-note (288B-A19B, texts), latent attention with windows.

Files say which layers have a window; these have heads of other sizes and numbers, and a RoPE base
of their own, the others indexers as in ``deepseek32``. The part of keys that is rotated is normed,
and heads have a gate each. All but the first layers are mixtures of experts, as in ``deepseek2``.
Layers that guess tokens ahead (MTP) are left out.
"""

from __future__ import annotations

from . import blocks
from .experts import BIASED_RULE
from .indexer import IndexRule
from .latent import LatentRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="dots3note",
        qk_row_order="interleaved",
        activation="silu",
        windows=SlidingWindows(is_required=True, rope_base=10000.0, has_plain_rope=True),
        latent=LatentRule(has_sliding_heads=True, norms_keys=True, index=IndexRule(only_full=True)),
        experts=BIASED_RULE,
        has_drafting_layers=True,
        output_gate="per_head",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            tensor("blk.{layer}.attn_gate.weight", "model_dim", "n_heads"),
            *blocks.BIASED_EXPERTS,
        ),
    )
)
