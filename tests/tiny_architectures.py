"""What tiny models of each architecture have beside the matrices of a llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Tensors and metadata in which an architecture differs.

    Attributes:
        pre_norms, post_norms: the input and the output of a branch are normed.
        qk_norm: "head" or "projection": queries and keys are normed.
        qkv_biases: Q, K and V have biases.
        ffn_norm: name of the norm of the feed-forward network's input.
        fused_qkv, fused_gate_up: Q, K and V are one matrix; gate and up are.
        has_experts: the feed-forward network is a mixture of experts.
        has_expert_width: a key says how wide an expert is, not feed_forward_length.
        shared_gate: the shared expert has a gate.
        has_shared_width: there is a shared expert, and a key says how wide it is.
        is_gpt_oss: attention has sinks, and experts and their router have biases.
        is_gemma4: windows are an array, pairs are rotated in part, layers may share keys and values
            and have inputs per token.
        is_gemma3n: windows are an array, tokens have several residual streams, layers a branch of
            low rank and inputs per token, and may share keys and values.
        has_short_conv: layers without KV heads, by default every other one, have a convolution.
        has_delta_net: every other layer has a gated delta net, and attention has a gate.
        has_grouped_heads: neighbouring value heads of a delta net share a key head, and its gates
            are one matrix.
        has_row_decays: every other layer has a delta net whose rows decay by themselves.
        mamba2: layers have Mamba-2: "other" than those with KV heads, by default every other one;
            "beside" attention; or "single", by turns with attention and feed-forward networks
            without a gate, of which a layer has one.
        has_mamba1: layers without KV heads, by default every other one, have Mamba-1.
        has_only_mamba1: all layers are that and nothing else.
        goes_by_turns: every other layer has experts, the second first, as no key says.
        is_ungated: the feed-forward network has no gate, but the square of ReLU.
        has_layer_norm, has_norm_biases: norms are LayerNorm; norms of either kind have biases.
        has_norm_weights: norms have weights.
        has_parallel_norm: the network beside attention has a norm of its own, if there are two.
        has_joint_bias: Q, K and V of one matrix have one vector of biases.
        has_network_biases: matrices of networks have biases.
        has_output_biases, has_logit_biases: the output of attention has a bias, and logits have.
        is_parallel: the feed-forward network has the normed input of attention.
        has_xielu: activations are xIELU.
        has_expert_scales: files say how experts are chosen and weighted, as those of deepseek2.
        has_softmax_gate: shares of experts are a softmax, also of those with biases.
        normalises_experts: files say that the shares of a token's experts add up to 1.
        has_dense_layers: the first layer has one feed-forward network, without biases of experts.
        has_expert_bias: a bias counts in the choice of experts, whose shares are sigmoids, and the
            first layer has one feed-forward network.
        has_only_experts: the first layer has experts too.
        expert_bias_name: name of the biases that count in the choice of experts.
        output_norm: name of the norm behind the last layer.
        is_latent: attention is of the latent kind (``tools/tiny_models/latent.py``).
        is_indexed: its layers have indexers, which choose what is read.
        has_sections: rotated pairs are parted among axes.
        has_window_pattern: files say which layers have a window.
        has_sinks: attention has sinks.
        has_fused_experts: gate and up of experts are one matrix.
        output_gate: the output of attention has a gate by a matrix of its own, "per_output" or
            "per_head".
        has_position_table: positions are rows of a table.
        has_gate_limits: files give a limit of the gates of every layer.
        lacks_mixers: layers without KV heads, by default the second, have no mixer.
        has_file_gate: files say how shares are made of a router's logits.
        has_joint_width: files give the widths of gate and up together.
        has_sub_norms: what attention gives, and what the activation, is normed.
        keys: float metadata after the architecture's name. Scales and caps are far from 1 and
            small enough to show in the logits.
    """

    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: str | None = None
    qkv_biases: bool = False
    ffn_norm: str = "ffn_norm"
    fused_qkv: bool = False
    fused_gate_up: bool = False
    has_experts: bool = False
    has_expert_width: bool = True
    shared_gate: bool = False
    has_shared_width: bool = False
    is_gpt_oss: bool = False
    is_gemma4: bool = False
    is_gemma3n: bool = False
    has_short_conv: bool = False
    has_delta_net: bool = False
    has_grouped_heads: bool = False
    has_row_decays: bool = False
    mamba2: Literal["other", "beside", "single"] | None = None
    has_mamba1: bool = False
    has_only_mamba1: bool = False
    goes_by_turns: bool = False
    has_expert_bias: bool = False
    is_ungated: bool = False
    has_layer_norm: bool = False
    has_norm_biases: bool = False
    has_norm_weights: bool = True
    has_parallel_norm: bool = False
    has_joint_bias: bool = False
    has_network_biases: bool = False
    has_output_biases: bool = False
    has_logit_biases: bool = False
    is_parallel: bool = False
    has_xielu: bool = False
    has_expert_scales: bool = False
    has_softmax_gate: bool = False
    normalises_experts: bool = True
    has_dense_layers: bool = False
    has_only_experts: bool = False
    expert_bias_name: str = "exp_probs_b.bias"
    output_norm: str = "output_norm"
    is_latent: bool = False
    is_indexed: bool = False
    has_sections: bool = False
    has_window_pattern: bool = False
    has_sinks: bool = False
    has_fused_experts: bool = False
    output_gate: Literal["per_output", "per_head"] | None = None
    has_position_table: bool = False
    has_gate_limits: bool = False
    lacks_mixers: bool = False
    has_file_gate: bool = False
    has_joint_width: bool = False
    has_sub_norms: bool = False
    keys: Mapping[str, float] = field(default_factory=dict)

    @property
    def begins_dense(self) -> bool:
        """Whether the first layers of a mixture of experts have one feed-forward network."""
        return (self.has_dense_layers or self.has_expert_bias) and not self.has_only_experts

    @property
    def is_hybrid(self) -> bool:
        """Whether the first layer does not attend, but the second does."""
        has_mamba = self.has_mamba1 or self.mamba2 in ("other", "single")
        has_delta_net = self.has_delta_net or self.has_row_decays
        return self.has_short_conv or has_delta_net or has_mamba

    @property
    def is_recurrent(self) -> bool:
        return self.is_hybrid or self.mamba2 is not None


CODESHELL = Family(
    has_layer_norm=True,
    has_norm_biases=True,
    is_ungated=True,
    qkv_biases=True,
    has_joint_bias=True,
    has_output_biases=True,
    has_network_biases=True,
)
GPT2 = replace(CODESHELL, has_position_table=True, fused_qkv=True)
COHERE2 = Family(has_layer_norm=True, is_parallel=True, keys={"logit_scale": 0.4})
SCALES: Mapping[str, float] = {"logit_scale": 4.0, "residual_scale": 0.4, "embedding_scale": 6.0}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "deepseek2": Family(
        is_latent=True,
        has_experts=True,
        has_expert_bias=True,
        keys={"rope.scaling.yarn_log_multiplier": 0.08},
    ),
    "deepseek32": Family(
        is_latent=True,
        is_indexed=True,
        has_experts=True,
        has_expert_bias=True,
        keys={"rope.scaling.yarn_log_multiplier": 0.1},
    ),
    "glm-dsa": Family(is_latent=True, is_indexed=True, has_experts=True, has_expert_bias=True),
    "minicpm3": Family(is_latent=True),
    "plm": Family(is_latent=True, is_ungated=True),
    "afmoe": Family(
        post_norms=True,
        qk_norm="head",
        output_gate="per_output",
        has_experts=True,
        has_expert_bias=True,
        has_expert_scales=True,
    ),
    "laguna": Family(
        qk_norm="head",
        output_gate="per_head",
        has_experts=True,
        has_expert_bias=True,
        has_expert_scales=True,
        has_shared_width=True,
    ),
    "muse-glimmer": Family(
        post_norms=True,
        qk_norm="head",
        output_gate="per_output",
        has_window_pattern=True,
        keys={"logit_scale": 0.6, "final_logit_softcapping": 3.0},
    ),
    "spark2_5": Family(output_gate="per_head", has_window_pattern=True),
    "apertus": Family(qk_norm="head", is_ungated=True, has_xielu=True),
    "arcee": Family(is_ungated=True),
    "nanbeige": Family(),
    "command-r": COHERE2,
    "cohere2": COHERE2,
    "cohere2moe": replace(COHERE2, has_experts=True, has_dense_layers=True, has_expert_scales=True),
    "stablelm": Family(has_layer_norm=True, has_norm_biases=True),
    "starcoder2": Family(has_layer_norm=True, has_norm_biases=True, is_ungated=True),
    "baichuan": Family(),
    "bitnet": Family(has_sub_norms=True),
    "xverse": Family(),
    "codeshell": CODESHELL,
    "gpt2": GPT2,
    "starcoder": GPT2,
    "plamo": Family(is_parallel=True),
    "minimax-m2": Family(
        qk_norm="projection",
        has_experts=True,
        has_expert_bias=True,
        has_only_experts=True,
    ),
    "qwen": Family(fused_qkv=True, qkv_biases=True, has_joint_bias=True, has_joint_width=True),
    "bailingmoe2": Family(
        qk_norm="head",
        fused_qkv=True,
        has_experts=True,
        has_expert_bias=True,
        has_expert_scales=True,
    ),
    "bailingmoe3": Family(
        is_latent=True,
        has_row_decays=True,
        output_gate="per_head",
        has_experts=True,
        has_expert_bias=True,
        has_shared_width=True,
    ),
    "bailingmoe": Family(has_experts=True, has_expert_scales=True, has_softmax_gate=True),
    "deepseek": Family(
        has_experts=True,
        has_expert_scales=True,
        has_softmax_gate=True,
        has_dense_layers=True,
        normalises_experts=False,
    ),
    "dots1": Family(qk_norm="head", has_experts=True, has_expert_bias=True, has_expert_scales=True),
    "chatglm": Family(qkv_biases=True, fused_gate_up=True),
    "ernie4_5": Family(),
    "ernie4_5-moe": Family(has_experts=True, has_expert_bias=True, has_softmax_gate=True),
    "exaone": Family(),
    "exaone-moe": Family(
        qk_norm="head",
        has_experts=True,
        has_expert_bias=True,
        has_expert_scales=True,
        has_shared_width=True,
        has_window_pattern=True,
    ),
    "internlm2": Family(),
    "mistral3": Family(
        keys={"attention.temperature_scale": 0.3, "rope.scaling.yarn_log_multiplier": 0.8}
    ),
    "smallthinker": Family(has_experts=True, has_file_gate=True),
    "smollm3": Family(),
    "minicpm": Family(keys=SCALES),
    "seed_oss": Family(qkv_biases=True, ffn_norm="post_attention_norm"),
    "gemma": Family(),
    "lfm2": Family(qk_norm="head", has_short_conv=True, output_norm="token_embd_norm"),
    "lfm2moe": Family(
        qk_norm="head",
        has_short_conv=True,
        output_norm="token_embd_norm",
        has_experts=True,
        has_expert_bias=True,
    ),
    "hunyuan-dense": Family(qk_norm="head"),
    "hunyuan_vl": Family(qk_norm="head", has_sections=True, keys={"rope.scaling.alpha": 50.0}),
    "hy_v3": Family(
        qk_norm="head",
        has_experts=True,
        has_expert_bias=True,
        has_expert_scales=True,
        has_shared_width=True,
        expert_bias_name="exp_probs_b",
    ),
    "hunyuan-moe": Family(qk_norm="head", has_experts=True, has_shared_width=True),
    "maincoder": Family(qk_norm="head"),
    "mamba": Family(has_mamba1=True, has_only_mamba1=True),
    "maple": Family(
        qk_norm="head", has_experts=True, has_window_pattern=True, has_gate_limits=True
    ),
    "deci": Family(lacks_mixers=True),
    "mellum": Family(qk_norm="head", has_experts=True),
    "qwen2": Family(qkv_biases=True),
    "qwen2vl": Family(qkv_biases=True, has_sections=True),
    "qwen2moe": Family(qkv_biases=True, has_experts=True, shared_gate=True),
    "qwen3": Family(qk_norm="head"),
    "qwen3moe": Family(qk_norm="head", has_experts=True),
    "qwen3vl": Family(qk_norm="head", has_sections=True),
    "qwen3vlmoe": Family(qk_norm="head", has_experts=True, has_sections=True),
    "qwen35": Family(
        qk_norm="head",
        has_delta_net=True,
        has_sections=True,
        ffn_norm="post_attention_norm",
    ),
    "qwen35moe": Family(
        qk_norm="head",
        has_delta_net=True,
        has_sections=True,
        ffn_norm="post_attention_norm",
        has_experts=True,
        shared_gate=True,
    ),
    "qwen3next": Family(
        qk_norm="head",
        has_delta_net=True,
        has_grouped_heads=True,
        ffn_norm="post_attention_norm",
        has_experts=True,
        shared_gate=True,
    ),
    "olmo": Family(has_layer_norm=True, has_norm_weights=False, keys={"attention.clamp_kqv": 0.9}),
    "openelm": Family(qk_norm="head", fused_qkv=True),
    "orion": Family(has_layer_norm=True, has_norm_biases=True),
    "pangu-embedded": Family(qkv_biases=True, has_output_biases=True),
    "phi2": Family(
        has_layer_norm=True,
        has_norm_biases=True,
        is_parallel=True,
        is_ungated=True,
        qkv_biases=True,
        has_output_biases=True,
        has_logit_biases=True,
        has_network_biases=True,
    ),
    "gptneox": Family(
        has_layer_norm=True,
        has_norm_biases=True,
        has_parallel_norm=True,
        is_ungated=True,
        fused_qkv=True,
        qkv_biases=True,
        has_joint_bias=True,
        has_output_biases=True,
        has_network_biases=True,
    ),
    "falcon": Family(
        has_layer_norm=True,
        has_norm_biases=True,
        is_parallel=True,
        has_parallel_norm=True,
        is_ungated=True,
        fused_qkv=True,
    ),
    "olmoe": Family(qk_norm="projection", has_experts=True, has_expert_width=False),
    "phi3": Family(fused_qkv=True, fused_gate_up=True),
    "phimoe": Family(
        has_norm_biases=True,
        qkv_biases=True,
        has_output_biases=True,
        has_logit_biases=True,
        has_experts=True,
        has_expert_width=False,
    ),
    "granite": Family(keys={**SCALES, "attention.scale": 0.35}),
    "granitemoe": Family(
        keys={**SCALES, "attention.scale": 0.35}, has_experts=True, has_expert_width=False
    ),
    "granite_swa": Family(
        keys={**SCALES, "attention.scale": 0.35},
        has_experts=True,
        has_expert_width=False,
        has_window_pattern=True,
        has_sinks=True,
        has_fused_experts=True,
    ),
    "granitehybrid": Family(
        keys={**SCALES, "attention.scale": 0.35},
        mamba2="other",
        has_experts=True,
        has_expert_width=False,
    ),
    "falcon-h1": Family(mamba2="beside"),
    "jamba": Family(has_mamba1=True, has_experts=True, has_expert_width=False, goes_by_turns=True),
    "nemotron": Family(has_layer_norm=True, has_norm_biases=True, is_ungated=True),
    "jais2": Family(
        has_layer_norm=True,
        has_norm_biases=True,
        is_ungated=True,
        qkv_biases=True,
        has_output_biases=True,
        has_network_biases=True,
    ),
    "nemotron_h": Family(mamba2="single"),
    "nemotron_h_moe": Family(mamba2="single", has_experts=True, has_expert_bias=True),
    "gpt-oss": Family(
        qkv_biases=True,
        ffn_norm="post_attention_norm",
        has_experts=True,
        is_gpt_oss=True,
    ),
    "glm4moe": Family(
        qk_norm="head",
        qkv_biases=True,
        ffn_norm="post_attention_norm",
        has_experts=True,
        has_expert_bias=True,
        has_expert_scales=True,
    ),
    "glm4": Family(post_norms=True, qkv_biases=True, fused_gate_up=True),
    "exaone4": Family(pre_norms=False, post_norms=True, qk_norm="head"),
    "olmo2": Family(pre_norms=False, post_norms=True, qk_norm="projection"),
    "gemma2": Family(
        post_norms=True, keys={"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    ),
    "gemma3": Family(post_norms=True, qk_norm="head"),
    # llama.cpp does not read the cap.
    "gemma3n": Family(
        post_norms=True, qk_norm="head", is_gemma3n=True, keys={"final_logit_softcapping": 30.0}
    ),
    "gemma4": Family(
        post_norms=True, qk_norm="head", is_gemma4=True, keys={"final_logit_softcapping": 9.0}
    ),
}
