"""Architecture ``qwen4exp``: Qwen3.8-Flash-Next.

The layers of ``qwen35moe``, without norms of their own: every token has several residual streams,
which are mixed anew before every branch (hyper-connections). In layers with attention an indexer
scores blocks of tokens, and queries read the best of them (Qwen sparse attention). Before one
layer rows of a large table are looked up by the last tokens together (per-layer embeddings). The
gates of delta nets are sigmoids. Images are not read.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .hybrids import HybridRule
from .mixed_stream_tensors import NGRAMS, STREAM_MIXERS
from .qwen35 import DELTA_NET, GATED_ATTENTION, QWEN_EXPERTS
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="qwen4exp",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        norm_placement="none",
        rope=RopeRule(has_sections=True),
        hybrid=HybridRule(mixer="delta_net", has_sigmoid=True),
        experts=ExpertRule(shared="gated"),
        output_gate="of_queries",
        mixes_streams=True,
        scores_blocks=True,
        tensors=(
            *(rule for rule in blocks.EMBEDDINGS if rule.name != "output_norm.weight"),
            *STREAM_MIXERS,
            *GATED_ATTENTION,
            *blocks.INDEXER,
            *DELTA_NET,
            *NGRAMS,
            *QWEN_EXPERTS,
        ),
    )
)
