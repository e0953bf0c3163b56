"""Architectures ``deepseek2``, ``mistral4``, ``deepseek32`` and ``glm-dsa``.

DeepSeek V2 and V3, and what others made after them (Mistral Small 4); the latter two with sparse
attention (DeepSeek V3.2, GLM-5). Queries of some grow with their position (Mistral Large 3).

Multi-head latent attention: the cache holds one row per token and layer, of which the keys and
values of all heads are products. All but the first layers are mixtures of experts, which files
without any leave out (Youtu-LLM). YaRN scales the logits of attention, not queries and keys. Files
of ``deepseek2`` may have a layer that guesses tokens ahead (MTP); those of the others are left out.
With sparse attention layers have indexers (``indexer.py``); those of GLM rotate neighbours, and
from GLM-5.2 on layers may share what one has chosen.
"""

from __future__ import annotations

from dataclasses import replace

from . import blocks
from .experts import ExpertRule
from .indexer import IndexRule
from .latent import LatentRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensors_of

_TENSORS = (
    *blocks.EMBEDDINGS,
    *blocks.PRE_NORMS,
    *tensors_of("dense", blocks.FEED_FORWARD),
    *tensors_of("experts", (*blocks.EXPERTS, *blocks.SHARED_EXPERT, *blocks.CHOICE_BIASES)),
)
_ROPE = RopeRule(has_log_multiplier=True, scales_logits=True)
_EXPERTS = ExpertRule(
    shared="count",
    gate="file",
    has_bias="optional",
    has_dense_layers=True,
    has_scales=True,
    is_optional=True,
)

for _name in ("deepseek2", "mistral4"):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="interleaved",
            activation="silu",
            rope=replace(_ROPE, has_temperature=True),
            latent=LatentRule(),
            experts=_EXPERTS,
            has_drafting_layers=True,
            can_draft=_name == "deepseek2",
            tensors=_TENSORS,
        )
    )
register_architecture(
    ArchitectureSpec(
        name="deepseek32",
        qk_row_order="interleaved",
        activation="silu",
        rope=_ROPE,
        latent=LatentRule(index=IndexRule()),
        experts=_EXPERTS,
        has_drafting_layers=True,
        tensors=_TENSORS,
    )
)
register_architecture(
    ArchitectureSpec(
        name="glm-dsa",
        qk_row_order="interleaved",
        activation="silu",
        rope=_ROPE,
        latent=LatentRule(index=IndexRule(is_interleaved=True, may_share=True)),
        experts=replace(_EXPERTS, gate="sigmoid", says_gate=False),
        has_drafting_layers=True,
        tensors=_TENSORS,
    )
)
