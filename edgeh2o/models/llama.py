"""Architecture ``llama``: Llama 1 to 3, Mistral, TinyLlama, SmolLM and their fine-tunes.

Converters store the rows of Q and K in interleaved pair order; Llama 3.1 and later bring their
RoPE scaling as ``rope_freqs.weight``; small models have no ``output.weight`` and tie it to the
embedding.
"""

from __future__ import annotations

from .spec import ArchitectureSpec, register_architecture, tensor

register_architecture(
    ArchitectureSpec(
        name="llama",
        qk_row_order="interleaved",
        rope_factors="rope_freqs.weight",
        activation="silu",
        tensors=(
            tensor("token_embd.weight", "model_dim", "vocab_size"),
            tensor("output_norm.weight", "model_dim"),
            tensor("output.weight", "model_dim", "vocab_size", required=False),
            tensor("blk.{layer}.attn_norm.weight", "model_dim"),
            tensor("blk.{layer}.attn_q.weight", "model_dim", "q_dim", rotated=True),
            tensor("blk.{layer}.attn_k.weight", "model_dim", "kv_dim", rotated=True),
            tensor("blk.{layer}.attn_v.weight", "model_dim", "kv_dim"),
            tensor("blk.{layer}.attn_output.weight", "q_dim", "model_dim"),
            tensor("blk.{layer}.attn_q.bias", "q_dim", rotated=True, required=False),
            tensor("blk.{layer}.attn_k.bias", "kv_dim", rotated=True, required=False),
            tensor("blk.{layer}.attn_v.bias", "kv_dim", required=False),
            tensor("blk.{layer}.attn_output.bias", "model_dim", required=False),
            tensor("blk.{layer}.ffn_norm.weight", "model_dim"),
            tensor("blk.{layer}.ffn_gate.weight", "model_dim", "ffn_dim"),
            tensor("blk.{layer}.ffn_up.weight", "model_dim", "ffn_dim"),
            tensor("blk.{layer}.ffn_down.weight", "ffn_dim", "model_dim"),
            tensor("blk.{layer}.ffn_gate.bias", "ffn_dim", required=False),
            tensor("blk.{layer}.ffn_up.bias", "ffn_dim", required=False),
            tensor("blk.{layer}.ffn_down.bias", "model_dim", required=False),
        ),
    )
)
