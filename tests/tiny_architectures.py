"""What tiny models of each architecture have beside the matrices of a llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tests.tiny_family import Family

CODESHELL = Family(
    has_layer_norm=True,
    has_norm_biases=True,
    is_ungated=True,
    qkv_biases=True,
    has_output_biases=True,
    has_network_biases=True,
)
ALIBI = "attention.max_alibi_bias"
GPT2 = replace(CODESHELL, has_position_table=True, fused_qkv=True)
COHERE2 = Family(has_layer_norm=True, is_parallel=True, keys={"logit_scale": 0.4})
SCALES: Mapping[str, float] = {"logit_scale": 4.0, "residual_scale": 0.4, "embedding_scale": 6.0}

BERT = Family(
    pre_norms=False,
    has_sum_norms=True,
    has_layer_norm=True,
    is_ungated=True,
    qkv_biases=True,
    has_output_biases=True,
    has_network_biases=True,
)

# Those that write none: their tokens read those behind them too.
ENCODERS: Mapping[str, Family] = {
    "gemma-embedding": Family(post_norms=True, qk_norm="head", needs_window=True),
    "llama-embed": Family(),
    "bert": replace(BERT, has_position_table=True),
    "jina-bert-v2": replace(
        BERT, is_ungated=False, has_network_biases=False, has_down_bias=True, qk_norm="layer"
    ),
    "jina-bert-v3": replace(BERT, fused_qkv=True),
    "nomic-bert-moe": replace(
        BERT, fused_qkv=True, has_experts=True, has_expert_width=False, goes_by_turns=True
    ),
    "eurobert": Family(),
    "neo-bert": Family(fused_qkv=True, fused_gate_up=True, output_norm="enc.output_norm"),
    "nomic-bert": Family(pre_norms=False, has_sum_norms=True, has_layer_norm=True, fused_qkv=True),
    "modern-bert": Family(
        has_layer_norm=True, fused_qkv=True, fused_gate_up=True, lacks_first_norm=True
    ),
}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "llama4": Family(has_experts=True, has_equal_shared=True),
    "deepseek2": Family(
        is_latent=True,
        has_experts=True,
        has_expert_bias=True,
        keys={"rope.scaling.yarn_log_multiplier": 0.08},
    ),
    "mistral4": Family(
        is_latent=True,
        has_experts=True,
        has_expert_bias=True,
        has_temperature_length=True,
        keys={"rope.scaling.yarn_log_multiplier": 0.1, "attention.temperature_scale": 0.3},
    ),
    "deepseek32": Family(
        is_latent=True,
        is_indexed=True,
        has_experts=True,
        has_expert_bias=True,
        keys={"rope.scaling.yarn_log_multiplier": 0.1},
    ),
    "dots3note": Family(
        is_latent=True,
        has_sliding_latent=True,
        is_indexed=True,
        has_experts=True,
        has_expert_bias=True,
        output_gate="per_head",
        has_window_pattern=True,
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
    "nanbeige": Family(has_loops=True),
    "hrm_text": Family(
        has_norm_weights=False,
        output_gate="per_output",
        has_two_stacks=True,
        keys={"embedding_scale": 6.0},
    ),
    "command-r": COHERE2,
    "cohere2": COHERE2,
    "cohere2moe": replace(COHERE2, has_experts=True, has_dense_layers=True, has_expert_scales=True),
    "stablelm": Family(has_layer_norm=True, has_norm_biases=True),
    "starcoder2": Family(has_layer_norm=True, has_norm_biases=True, is_ungated=True),
    "baichuan": Family(),
    "bloom": replace(CODESHELL, fused_qkv=True, has_embedding_norm=True, has_distance_bias=True),
    "mpt": Family(
        has_layer_norm=True,
        is_ungated=True,
        fused_qkv=True,
        qk_norm="layer",
        has_distance_bias=True,
        keys={ALIBI: 8.0, "attention.clamp_kqv": 0.9},
    ),
    "refact": Family(has_distance_bias=True),
    "jais": replace(
        CODESHELL, is_ungated=False, fused_qkv=True, has_distance_bias=True, keys={ALIBI: 8.0}
    ),
    "bitnet": Family(has_sub_norms=True),
    "xverse": Family(),
    "codeshell": CODESHELL,
    "gpt2": GPT2,
    "starcoder": GPT2,
    "plamo": Family(is_parallel=True),
    "mimo2": Family(
        has_experts=True,
        has_expert_bias=True,
        hides_dense=True,
        has_window_pattern=True,
        has_window_sinks=True,
        has_other_values=True,
        keys={"attention.value_scale": 0.6},
    ),
    "minimax-m2": Family(
        qk_norm="projection",
        has_experts=True,
        has_expert_bias=True,
        has_only_experts=True,
    ),
    "minimax-m3": Family(
        qk_norm="head",
        has_experts=True,
        has_expert_bias=True,
        has_expert_scales=True,
        chooses_by_head=True,
    ),
    "qwen": Family(fused_qkv=True, qkv_biases=True, has_joint_width=True),
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
    "kimi-linear": Family(
        is_latent=True,
        has_row_decays=True,
        has_decay_vectors=True,
        has_experts=True,
        has_expert_bias=True,
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
        drafts_dense=True,
        has_experts=True,
        has_expert_bias=True,
        has_expert_scales=True,
        has_shared_width=True,
        has_window_pattern=True,
    ),
    "internlm2": Family(),
    "talkie": Family(has_norm_weights=False, has_head_gains=True, keys={"logit_scale": 0.6}),
    "mistral3": Family(
        keys={"attention.temperature_scale": 0.3, "rope.scaling.yarn_log_multiplier": 0.8}
    ),
    "smallthinker": Family(has_experts=True, has_file_gate=True),
    "smollm3": Family(),
    "step35": Family(
        qk_norm="head",
        output_gate="per_head",
        has_experts=True,
        has_expert_bias=True,
        has_expert_scales=True,
        has_shared_width=True,
        has_window_pattern=True,
        has_gate_limits=True,
        has_shared_limits=True,
    ),
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
    "mamba2": Family(mamba2="only"),
    "rwkv6": Family(
        has_rwkv6=True, has_layer_norm=True, has_norm_biases=True, ffn_norm="attn_norm_2"
    ),
    "rwkv6qwen2": Family(has_rwkv6=True, has_plain_networks=True),
    "rwkv7": Family(
        has_rwkv7=True, has_layer_norm=True, has_norm_biases=True, ffn_norm="attn_norm_2"
    ),
    "arwkv7": Family(has_rwkv7=True, has_plain_networks=True),
    "grovemoe": Family(qk_norm="head", has_experts=True, has_adjugates=True),
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
    "qwen4exp": Family(
        pre_norms=False,
        qk_norm="head",
        has_delta_net=True,
        has_sections=True,
        has_experts=True,
        shared_gate=True,
        mixes_streams=True,
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
    "plamo2": Family(
        post_norms=True,
        post_norm_suffix="",
        qk_norm="own_head",
        fused_qkv=True,
        fused_gate_up=True,
        mamba2="other",
        has_selecting_mamba2=True,
    ),
    "plamo3": Family(
        post_norms=True,
        post_norm_suffix="",
        qk_norm="head",
        fused_qkv=True,
        fused_gate_up=True,
    ),
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
    "graniteswitch": Family(
        fused_qkv=True, keys={**SCALES, "attention.scale": 0.35}, chooses_adapters=True
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
