"""What architectures have that no tensor or key of a file tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        is_interleaved: the two elements of a rotated pair are neighbours in the file.
        has_interleaved_indexer: so are those of indexers, not half a rotated part apart.
        window_period: every so many layers one has no window; 0: all have one.
        is_full_first: the first of a period has none, not the last.
        sliding_base: RoPE base of layers with a window, which have no scaling; None: as others.
        rotates_windows_only: of a model with windows, other layers have no rotary embedding.
        no_rope_period: every so many layers the last has no rotary embedding; 0: all have one.
        norms_after_rope: queries and keys are normed when they have been rotated.
        has_gelu, has_relu: the gate is a GELU, or ReLU.
        normalises_experts: the weights of a token's experts add up to 1.
        is_gemma4: values are normed without weights, attention logits are not scaled, layers with
            a window have a rotary embedding and heads of their own.
        has_streams: tokens have several residual streams.
        mixes_streams: tokens have several residual streams, which are mixed before every branch;
            gates of delta nets are sigmoids.
        has_clamped_gate: the gate is that of gpt-oss.
        limits_activations: limits of gates are of what comes out of the activation.
        drafts_as_first: the layer that guesses tokens ahead is as the first, not as the last.
        halves_full_rotary: layers without a window rotate half of what files say.
        output_norm: name of the norm behind the last layer.
        has_sigmoid_gate: a token's experts have the sigmoid of their logit as their share, and are
            chosen by this and a bias.
        is_delta_net: layers without a Q matrix have a gated delta net, and attention has a gate.
        has_softplus_gate: what multiplies the heads of attention is no sigmoid.
        routes_by_input: routers of experts read what a layer gets, without a norm.
        rotates_dense: layers without experts have a rotary embedding.
        halves_shared: the sum of experts with a shared one is halved.
        scales_embedding: embeddings are multiplied by sqrt(model_dim).
        norms_embedding: embeddings are normed, without weights.
        has_embedding_norm: they are normed, as rows are elsewhere.
        post_norm_eps: epsilon of norms of what branches give; None: that of all.
        has_grouped_heads: neighbouring value heads of a delta net share a key head, and its gates
            are one matrix.
        depth_scales: factors of embeddings, of branches times sqrt(n_layers), and of logits times
            model_dim; None: files say them.
        ffn_norm: name of the norm of the feed-forward network's input.
        is_ungated: feed-forward networks have no gate, but the square of ReLU.
        ungated: another activation of such networks.
        has_layer_norm: norms are LayerNorm.
        scales_logits: their scale is a factor, not a divisor.
        has_norm_weights: norms of the residual stream have weights.
        is_parallel: attention and the feed-forward network have the same normed input.
        default_window: width of windows where files do not say; 0: none.
        has_chunks: windows begin at the last multiple of their width.
        norms_rotated: heads of queries and keys are normed without weights where they are rotated.
        scales_expert_inputs: shares of experts are factors of their inputs.
        unrotated_temperature: queries of other layers grow with their position, by this scale and
            period unless files say others.
        has_two_stacks: the first half of the layers is gone through several times, then the second
            once, and so on; each has a state.
        max_alibi_bias: slopes of biases by distance (ALiBi) go down to 2 to the power of minus
            that, unless files say so themselves; 0: none.
        alibi_depth: models with so many layers alone have them, and are not rotated.
        divides_by_head_dim: logits of attention are divided by the size of heads, not its root.
        mamba2_is_single: a layer is Mamba-2, attention or a feed-forward network, which has no gate
            and the square of ReLU.
    """

    is_interleaved: bool = False
    has_interleaved_indexer: bool = False
    window_period: int = 0
    is_full_first: bool = False
    sliding_base: float | None = None
    rotates_windows_only: bool = False
    no_rope_period: int = 0
    norms_after_rope: bool = False
    has_gelu: bool = False
    normalises_experts: bool = True
    is_gemma4: bool = False
    has_streams: bool = False
    mixes_streams: bool = False
    has_clamped_gate: bool = False
    limits_activations: bool = False
    halves_full_rotary: bool = False
    drafts_as_first: bool = False
    output_norm: str = "output_norm"
    has_sigmoid_gate: bool = False
    is_delta_net: bool = False
    has_softplus_gate: bool = False
    rotates_dense: bool = False
    halves_shared: bool = False
    scales_embedding: bool = False
    norms_embedding: bool = False
    post_norm_eps: float | None = None
    has_embedding_norm: bool = False
    routes_by_input: bool = False
    has_relu: bool = False
    has_grouped_heads: bool = False
    depth_scales: tuple[float, float, float] | None = None
    ffn_norm: str = "ffn_norm"
    mamba2_is_single: bool = False
    is_ungated: bool = False
    ungated: str = ""
    has_layer_norm: bool = False
    has_norm_weights: bool = True
    is_parallel: bool = False
    scales_logits: bool = False
    default_window: int = 0
    has_chunks: bool = False
    norms_rotated: bool = False
    scales_expert_inputs: bool = False
    unrotated_temperature: tuple[float, int] | None = None
    has_two_stacks: bool = False
    max_alibi_bias: float = 0.0
    alibi_depth: int = 0
    divides_by_head_dim: bool = False

    @property
    def activation(self) -> str:
        if self.mamba2_is_single or self.is_ungated:
            return self.ungated or "relu"
        if self.has_clamped_gate:
            return "clamped"
        if self.has_relu:
            return "relu"
        return "gelu" if self.has_gelu else "silu"


GPT2 = Family(no_rope_period=1, is_ungated=True, ungated="ungated_gelu", has_layer_norm=True)
COMMAND_R = Family(
    is_interleaved=True,
    has_layer_norm=True,
    is_parallel=True,
    scales_logits=True,
    ffn_norm="attn_norm",
)
COHERE2 = replace(COMMAND_R, window_period=4, rotates_windows_only=True)

FAMILIES: Mapping[str, Family] = {
    "afmoe": Family(
        window_period=4, no_rope_period=4, rotates_windows_only=True, scales_embedding=True
    ),
    "apertus": Family(is_ungated=True, ungated="xielu"),
    "arcee": Family(is_interleaved=True, is_ungated=True),
    "baichuan": Family(is_interleaved=True, max_alibi_bias=8.0, alibi_depth=40),
    "bailingmoe": Family(is_interleaved=True),
    "bailingmoe2": Family(),
    "bailingmoe3": Family(is_interleaved=True),
    "kimi-linear": Family(no_rope_period=1),
    "bitnet": Family(),
    "bloom": replace(GPT2, has_embedding_norm=True, max_alibi_bias=8.0),
    "chatglm": Family(is_interleaved=True),
    "codeshell": Family(is_ungated=True, ungated="ungated_gelu", has_layer_norm=True),
    "cohere2": COHERE2,
    "cohere2moe": replace(COHERE2, is_full_first=True, rotates_dense=True, halves_shared=True),
    "command-r": COMMAND_R,
    "nanbeige": Family(is_interleaved=True),
    "deci": Family(is_interleaved=True),
    "deepseek": Family(is_interleaved=True),
    "deepseek2": Family(is_interleaved=True),
    "deepseek32": Family(is_interleaved=True),
    "mistral4": Family(is_interleaved=True),
    "dots3note": Family(is_interleaved=True, sliding_base=10000.0, has_sigmoid_gate=True),
    "glm-dsa": Family(is_interleaved=True, has_interleaved_indexer=True, has_sigmoid_gate=True),
    "dots1": Family(),
    "ernie4_5": Family(is_interleaved=True),
    "ernie4_5-moe": Family(is_interleaved=True),
    "exaone": Family(),
    "exaone4": Family(window_period=4, rotates_windows_only=True),
    "exaone-moe": Family(rotates_windows_only=True, drafts_as_first=True),
    "gemma": Family(has_gelu=True, scales_embedding=True),
    "gemma2": Family(window_period=2, has_gelu=True, scales_embedding=True),
    "gemma3": Family(window_period=6, sliding_base=10000.0, has_gelu=True, scales_embedding=True),
    "gemma3n": Family(
        is_gemma4=True, has_streams=True, sliding_base=10000.0, has_gelu=True, scales_embedding=True
    ),
    "gemma4": Family(is_gemma4=True, sliding_base=10000.0, has_gelu=True, scales_embedding=True),
    "falcon": Family(
        is_ungated=True, ungated="ungated_gelu", has_layer_norm=True, is_parallel=True
    ),
    "falcon-h1": Family(),
    "glm4moe": Family(ffn_norm="post_attention_norm", has_sigmoid_gate=True),
    "glm4": Family(is_interleaved=True),
    "gpt-oss": Family(window_period=2, has_clamped_gate=True, ffn_norm="post_attention_norm"),
    # Or not parallel: files say so.
    "gptneox": Family(
        is_ungated=True, ungated="ungated_gelu", has_layer_norm=True, is_parallel=True
    ),
    "gpt2": GPT2,
    "granite": Family(is_interleaved=True),
    "granite_swa": Family(is_interleaved=True),
    "graniteswitch": Family(is_interleaved=True),
    "granitehybrid": Family(is_interleaved=True),
    "granitemoe": Family(is_interleaved=True),
    "hrm_text": Family(has_norm_weights=False, has_two_stacks=True),
    "hunyuan-dense": Family(norms_after_rope=True),
    "hunyuan-moe": Family(norms_after_rope=True),
    "hunyuan_vl": Family(norms_after_rope=True),
    "hy_v3": Family(),
    "internlm2": Family(is_interleaved=True),
    "jais": Family(no_rope_period=1, has_layer_norm=True, divides_by_head_dim=True),
    "jais2": Family(is_ungated=True, has_layer_norm=True),
    "jamba": Family(no_rope_period=1, normalises_experts=False),
    "laguna": Family(
        window_period=4, is_full_first=True, sliding_base=10000.0, has_softplus_gate=True
    ),
    "lfm2": Family(output_norm="token_embd_norm"),
    "lfm2moe": Family(output_norm="token_embd_norm", has_sigmoid_gate=True),
    "llama": Family(is_interleaved=True),
    "llama4": Family(
        is_interleaved=True,
        window_period=4,
        default_window=8192,
        has_chunks=True,
        rotates_windows_only=True,
        norms_rotated=True,
        has_sigmoid_gate=True,
        normalises_experts=False,
        scales_expert_inputs=True,
        unrotated_temperature=(0.1, 8192),
    ),
    "maincoder": Family(is_interleaved=True, norms_after_rope=True),
    "mamba": Family(no_rope_period=1),
    "mamba2": Family(no_rope_period=1),
    "maple": Family(rotates_windows_only=True),
    "mellum": Family(window_period=4, sliding_base=10000.0),
    "mimo2": Family(sliding_base=10000.0, has_sigmoid_gate=True),
    "minicpm": Family(is_interleaved=True),
    "minicpm3": Family(depth_scales=(12.0, 1.4, 256.0)),
    "minimax-m2": Family(),
    "minimax-m3": Family(has_clamped_gate=True),
    "mistral3": Family(is_interleaved=True),
    "mpt": GPT2,
    "muse-glimmer": Family(
        is_interleaved=True,
        sliding_base=10000.0,
        rotates_windows_only=True,
        norms_embedding=True,
        post_norm_eps=1e-8,
        scales_logits=True,
    ),
    "nemotron": Family(is_ungated=True, has_layer_norm=True),
    "nemotron_h": Family(no_rope_period=1, mamba2_is_single=True, ffn_norm="attn_norm"),
    "nemotron_h_moe": Family(
        no_rope_period=1, mamba2_is_single=True, ffn_norm="attn_norm", has_sigmoid_gate=True
    ),
    "olmo": Family(is_interleaved=True, has_layer_norm=True, has_norm_weights=False),
    "olmo2": Family(window_period=4, sliding_base=10000.0),
    "olmoe": Family(normalises_experts=False),
    "openelm": Family(),
    "orion": Family(has_layer_norm=True),
    "pangu-embedded": Family(),
    "phi2": Family(
        is_ungated=True,
        ungated="ungated_gelu",
        has_layer_norm=True,
        is_parallel=True,
        ffn_norm="attn_norm",
    ),
    "phi3": Family(),
    "phimoe": Family(),
    "plamo": Family(is_parallel=True, ffn_norm="attn_norm"),
    "plamo2": Family(),
    "plamo3": Family(window_period=8, sliding_base=10000.0),
    "plm": Family(is_interleaved=True, is_ungated=True),
    "qwen": Family(),
    "qwen2": Family(),
    "qwen2moe": Family(normalises_experts=False),
    "qwen2vl": Family(),
    "qwen3": Family(),
    "qwen3moe": Family(),
    "qwen3vl": Family(),
    "qwen3vlmoe": Family(),
    "qwen35": Family(is_delta_net=True, ffn_norm="post_attention_norm"),
    "qwen35moe": Family(is_delta_net=True, ffn_norm="post_attention_norm"),
    "qwen3next": Family(is_delta_net=True, has_grouped_heads=True, ffn_norm="post_attention_norm"),
    "qwen4exp": Family(is_delta_net=True, mixes_streams=True),
    "refact": Family(no_rope_period=1, max_alibi_bias=8.0),
    "rwkv6": Family(no_rope_period=1, has_layer_norm=True, has_embedding_norm=True),
    "arwkv7": Family(no_rope_period=1),
    "grovemoe": Family(),
    "rwkv6qwen2": Family(no_rope_period=1),
    "rwkv7": Family(no_rope_period=1, has_layer_norm=True, has_embedding_norm=True),
    "seed_oss": Family(ffn_norm="post_attention_norm"),
    "smallthinker": Family(
        window_period=4,
        is_full_first=True,
        rotates_windows_only=True,
        routes_by_input=True,
        has_relu=True,
    ),
    "smollm3": Family(is_interleaved=True, no_rope_period=4),
    "spark2_5": Family(sliding_base=10000.0, has_gelu=True),
    "stablelm": Family(has_layer_norm=True),
    "starcoder": GPT2,
    "step35": Family(
        sliding_base=10000.0,
        has_sigmoid_gate=True,
        normalises_experts=False,
        limits_activations=True,
        halves_full_rotary=True,
    ),
    "talkie": Family(
        norms_after_rope=True, has_norm_weights=False, norms_embedding=True, scales_logits=True
    ),
    "starcoder2": Family(is_ungated=True, ungated="ungated_gelu", has_layer_norm=True),
    "xverse": Family(is_interleaved=True),
}
