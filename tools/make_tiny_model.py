"""Writes a small seeded GGUF model, for tests and benches.

    python -m tools.make_tiny_model tiny.gguf --architecture qwen3 --tensor-type Q4_0 --seed 1

The weights are random, scaled so that attention is peaked and the logits depend on the
whole context. The vocabulary is a byte-level BPE in the style of SmolLM2: three control
tokens, 256 bytes, a few merges. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from gguf import (
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    TokenType,
)
from gguf.quants import quantize
from numpy.typing import NDArray

from tests.reference.codebook_quants import CODEBOOK_TYPES, quantize_codebook
from tests.reference.k_quants import K_TYPES, quantize_k
from tests.tiny_architectures import FAMILIES, Family
from tests.tokenizer.vocabularies import byte_characters
from tools.tiny_models import gemma3n, gemma4, recurrent
from tools.tiny_models.latent import add_expert_metadata, add_latent_metadata, add_latent_tensors

PerLayer = int | tuple[int, ...]
LAYER_OPTIONS = ("n_heads", "n_kv_heads", "ffn_dim")

FLOAT_TYPES = ("F32", "F16", "BF16")
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", *K_TYPES, *CODEBOOK_TYPES)
TENSOR_TYPES = FLOAT_TYPES + BLOCK_TYPES
ROPE_SCALINGS = ("linear", "llama3", "yarn", "longrope")
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Left and right part of each merge, in order of priority; "_" stands for the space byte.
MERGES = (
    "_ t,_ a,i n,h e,r e,o n,e r,_t he,a t,_ s,_ o,e n,_ c,i t,i s,_ w,o r,a l,_ p,in g,_ f,a n,"
    "_a n,_an d,_o f,e s,_ b,e d,_t o,_ in,_ m,_ d,l l,o u,_ is,_ h,a r,_t h,_th at,_f or,"
    "a s,_w as,w as,_ on,_ he,t h,th e,e l,i c,_ l"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Logits of attention get about this standard deviation: peaked, yet many keys count.
ATTENTION_LOGIT_STD = 1.5
LLAMA3_FACTOR, LLAMA3_LOW, LLAMA3_HIGH = 8.0, 1.0, 4.0
LINEAR_FACTOR = 4.0
LONGROPE_FACTORS = {"short": (1.0, 1.5), "long": (1.0, 8.0)}  # of the fastest and slowest pair
LONGROPE_ATTENTION_FACTOR = 1.2
ROUTER_SUFFIX = ".ffn_gate_inp.weight"
ROUTER = "blk.{}" + ROUTER_SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """What to write.

    Attributes:
        tensor_type: type of every matrix, one of TENSOR_TYPES; vectors are F32.
        embedding_type: type of the token embedding and output; None for tensor_type.
        n_heads, n_kv_heads, ffn_dim: of all layers, or a tuple with a number per layer; no KV heads
            for a convolution.
        has_qk_norm: queries and keys are normed, in families that may.
        n_conv_taps: tokens of a convolution.
        n_delta_key_heads, n_delta_value_heads, delta_head_dim: of a delta net.
        n_ssd_heads, ssd_head_dim, n_ssd_groups, ssd_state_dim, has_ssm_norm: of Mamba-2.
        n_dense_layers: first layers without experts, in families that have some.
        n_experts, n_experts_used: of a layer and of a token, in families that have experts. None
            make a dense model of granitehybrid and granite_swa.
        is_mixture: layers have experts, of llama.
        rope_pattern: which layers are rotated, of granite_swa; None for no key.
        shared_ffn_dim: width of the expert that every token goes through; None for no key, which
            means none, or one of ffn_dim where it has a gate or must be there.
        n_expert_groups, n_expert_groups_used: of experts, and of those a token's are of, where the
            file says so.
        n_shared_experts: how many experts wide the shared one is, where the file says so.
        has_softmax_gate: experts without biases are weighted by a softmax, of deepseek2.
        kv_rank, q_rank, nope_dim, rope_dim, value_dim: of latent attention; a q_rank of 0 is none.
        index_heads, index_key_dim, index_top_k: of indexers, which every so many layers
            (indexer_period) have one of.
        has_matrices_per_head: its keys and values have matrices per head, of deepseek2.
        rotary_dim: rotated elements per head; None for head_dim.
        rotates: there is a rotary embedding, of granitehybrid.
        rope_scaling: None, "linear" or "yarn" (a factor in the metadata), "llama3" (a factor per
            frequency in the tensor rope_freqs.weight), or "longrope" (two such tensors).
        original_context: positions of the first training, for "yarn" and "longrope".
        sliding_window: positions that a query sees in layers with a window; None for no key.
        sliding_window_pattern: every so many layers one has full attention; None for no key.
        head_dim_sliding: head size of layers with a window, of gemma4.
        has_values_of_keys: layers with full attention have no matrix of values, of gemma4.
        expert_ffn_dim: width of experts beside every layer's network, of gemma4; 0 for none.
        n_shared_kv: last layers that read the keys and values of others, of gemma4 and gemma3n.
        token_input_dim: width of every layer's input per token, of gemma4 and gemma3n.
        n_cut_layers: first layers whose gates are cut off, of gemma3n; None for ten or all.
        rope_base_sliding: base of the layers with a window; None for no key.
        tied: the token embedding is also the output matrix.
        biases: the seven matrices of a layer have biases.
        has_two_norms: attention and the network beside it have one each, of falcon.
        is_sequential: the network is behind attention, of gptneox.
        is_fused: Q, K and V are one matrix, of phi2 and chatglm.
    """

    architecture: str = "llama"
    seed: int = 0
    tensor_type: str = "F32"
    embedding_type: str | None = None
    n_layers: int = 3
    model_dim: int = 256
    n_heads: PerLayer = 8
    n_kv_heads: PerLayer = 2
    head_dim: int = 32
    ffn_dim: PerLayer = 512
    n_conv_taps: int = 3
    n_delta_key_heads: int = 2
    n_delta_value_heads: int = 4
    delta_head_dim: int = 32
    n_ssd_heads: int = 8
    ssd_head_dim: int = 16
    n_ssd_groups: int = 2
    ssd_state_dim: int = 32
    has_ssm_norm: bool = True
    n_dense_layers: int = 1
    n_experts: int = 6
    n_experts_used: int = 2
    shared_ffn_dim: int | None = None
    n_expert_groups: int = 1
    n_expert_groups_used: int = 1
    n_shared_experts: int = 1
    has_softmax_gate: bool = False
    kv_rank: int = 48
    q_rank: int = 40
    nope_dim: int = 16
    rope_dim: int = 16
    value_dim: int = 24
    index_heads: int = 8
    index_key_dim: int = 32
    index_top_k: int = 24
    indexer_period: int = 1
    has_matrices_per_head: bool = True
    vocab_size: int = 320
    context_length: int = 2048
    norm_eps: float = 1e-5
    tied: bool = True
    biases: bool = False
    has_two_norms: bool = False
    is_sequential: bool = False
    has_qk_norm: bool = True
    is_mixture: bool = False
    rope_pattern: tuple[bool, ...] | None = None
    is_fused: bool = False
    rotary_dim: int | None = None
    rotates: bool = False
    rope_base: float = 10000.0
    rope_scaling: str | None = None
    original_context: int | None = None
    sliding_window: int | None = None
    sliding_window_pattern: int | None = None
    rope_base_sliding: float | None = None
    head_dim_sliding: int | None = None
    has_values_of_keys: bool = False
    expert_ffn_dim: int = 0
    n_shared_kv: int = 0
    token_input_dim: int = 0
    n_cut_layers: int | None = None

    @property
    def family(self) -> Family:
        family = FAMILIES[self.architecture]
        if self.is_mixture:
            return replace(family, has_experts=True, has_expert_width=False)
        return family

    @property
    def layers(self) -> list[tuple[int, ...]]:
        """LAYER_OPTIONS of every layer."""
        values = (getattr(self, name) for name in LAYER_OPTIONS)
        rows = [value if isinstance(value, tuple) else (value,) * self.n_layers for value in values]
        goes_by_turns = self.family.has_short_conv or self.family.mamba2 == "other"
        if goes_by_turns and not isinstance(self.n_kv_heads, tuple):
            rows[1] = tuple(self.n_kv_heads * (layer % 2) for layer in range(self.n_layers))
        if self.family.mamba2 == "single" and not isinstance(self.n_kv_heads, tuple):
            # Mamba-2, attention and a feed-forward network by turns.
            rows[1] = tuple(self.n_kv_heads * (layer % 3 == 1) for layer in range(self.n_layers))
            rows[2] = tuple(n * (layer % 3 == 2) for layer, n in enumerate(rows[2]))
        return list(zip(*rows, strict=True))

    def mixer(self, layer: int) -> str:
        """As in ``LayerConfig``."""
        if self.family.has_delta_net and (layer + 1) % recurrent.DELTA_NET_PERIOD:
            return "delta_net"
        _, n_kv_heads, ffn_dim = self.layers[layer]
        if n_kv_heads:
            return "attention_mamba2" if self.family.mamba2 == "beside" else "attention"
        if self.family.mamba2 is None:
            return "short_conv"
        return "none" if self.family.mamba2 == "single" and ffn_dim else "mamba2"

    def has_experts(self, layer: int) -> bool:
        if self.family.mamba2 == "single":
            return self.family.has_experts and self.layers[layer][2] > 0
        return (self.family.has_experts and self.n_experts > 0) and (
            not self.family.begins_dense or layer >= self.n_dense_layers
        )

    def has_indexer(self, layer: int) -> bool:
        return self.family.is_indexed and layer % self.indexer_period == 0

    @property
    def pattern(self) -> list[bool]:
        """Which layers have a window, for families whose files say so layer by layer."""
        period = self.sliding_window_pattern or 3
        return [layer % period < period - 1 for layer in range(self.n_layers)]

    @property
    def input_dim(self) -> int:
        """Width of every layer's input per token, which gemma3n always has."""
        return self.token_input_dim or gemma3n.TOKEN_INPUT_DIM * self.family.is_gemma3n

    @property
    def head_dims(self) -> list[int]:
        """The head size of every layer."""
        sliding = self.head_dim_sliding or self.head_dim
        return [sliding if has_window else self.head_dim for has_window in self.pattern]

    @property
    def n_pairs(self) -> int:
        """Rotated pairs of a head."""
        if self.family.is_latent:
            return self.rope_dim // 2
        return (self.rotary_dim or self.head_dim) // 2

    def __post_init__(self) -> None:
        for name in (self.tensor_type, self.embedding_type or self.tensor_type):
            if name not in TENSOR_TYPES:
                raise ValueError(f"{name} is not one of {', '.join(TENSOR_TYPES)}")
        if self.architecture not in FAMILIES:
            raise ValueError(f"architecture is one of {', '.join(FAMILIES)}")
        if self.rope_scaling not in (None, *ROPE_SCALINGS):
            raise ValueError(f"rope_scaling is None or one of {', '.join(ROPE_SCALINGS)}")
        for name in LAYER_OPTIONS:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != self.n_layers:
                raise ValueError(f"{name} is one number, or one for each of {self.n_layers} layers")
        if any(n_kv_heads and n_heads % n_kv_heads for n_heads, n_kv_heads, _ in self.layers):
            raise ValueError("n_heads must be a multiple of n_kv_heads")
        smallest = len(_vocabulary()[0])
        if self.vocab_size < smallest:
            raise ValueError(f"vocab_size must be at least {smallest}")


def _vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (control, bytes, merges) and merges of the smallest vocabulary."""
    characters = byte_characters()
    merges = MERGES.replace("_", characters[ord(" ")]).split(",")
    tokens = [*CONTROL_TOKENS, *characters, *(merge.replace(" ", "") for merge in merges)]
    return list(dict.fromkeys(tokens)), merges


def write_tiny_model(path: Path | str, **options: object) -> Path:
    """Writes the model that `TinyModel(**options)` describes; returns the path.

    Raises:
        ValueError: if an option is out of range, or a width does not fit the tensor type.
    """
    model = TinyModel(**options)  # type: ignore[arg-type]
    path = Path(path)
    writer = GGUFWriter(path, model.architecture)
    _add_metadata(writer, model)
    _add_tokenizer(writer, model.vocab_size)
    for name, values in _random_tensors(model).items():
        _add_tensor(writer, name, values, _type_of(name, values, model))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    writer.add_name("tiny")
    writer.add_block_count(model.n_layers)
    writer.add_context_length(model.context_length)
    writer.add_embedding_length(model.model_dim)
    if model.family.mamba2 == "single":
        writer.add_feed_forward_length([ffn_dim for _, _, ffn_dim in model.layers])
    else:
        writer.add_feed_forward_length(model.ffn_dim)
    if model.family.has_experts and model.n_experts:
        writer.add_expert_count(model.n_experts)
        writer.add_expert_used_count(model.n_experts_used)
        if model.family.has_expert_width:
            writer.add_expert_feed_forward_length(model.ffn_dim)
        shared_ffn_dim = model.shared_ffn_dim
        if shared_ffn_dim is None and model.family.has_shared_width:
            shared_ffn_dim = max(ffn_dim for _, _, ffn_dim in model.layers)
        if shared_ffn_dim is not None:
            writer.add_expert_shared_feed_forward_length(shared_ffn_dim)
    if model.family.has_sections:
        writer.add_rope_dimension_sections(rope_sections(model.n_pairs))
    writer.add_head_count(model.n_heads)
    if model.family.is_latent:
        add_latent_metadata(writer, model)
    elif model.family.has_expert_scales:
        add_expert_metadata(writer, model)
    elif model.family.has_softmax_gate:
        writer.add_leading_dense_block_count(model.n_dense_layers)
        writer.add_interleave_moe_layer_step(1)
    elif model.family.has_expert_bias and model.family.mamba2 is None:
        writer.add_leading_dense_block_count(model.n_dense_layers)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if model.family.has_short_conv or model.family.mamba2 in ("other", "single"):
        writer.add_head_count_kv([n_kv_heads for _, n_kv_heads, _ in model.layers])
    elif not model.family.is_latent:
        writer.add_head_count_kv(model.n_kv_heads)
    recurrent.add_metadata(writer, model)
    if model.family.mamba2 == "other":
        writer.add_rope_scaling_finetuned(model.rotates)
    if not model.family.is_latent:
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(2 * model.n_pairs)
    writer.add_rope_freq_base(model.rope_base)
    if model.family.has_layer_norm:
        writer.add_layer_norm_eps(model.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(model.norm_eps)
    if model.family.has_xielu:
        numbers = np.linspace(0.3, 0.9, model.n_layers)
        writer.add_xielu_alpha_p(numbers.tolist())
        writer.add_xielu_alpha_n((numbers[::-1] - 0.5).tolist())
        writer.add_xielu_beta((0.5 * numbers).tolist())
        writer.add_xielu_eps([-1e-6] * model.n_layers)
    if model.architecture == "gptneox":
        writer.add_parallel_residual(not model.is_sequential)
    writer.add_vocab_size(model.vocab_size)
    if model.rope_scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(model.rope_scaling))
        writer.add_rope_scaling_factor(LINEAR_FACTOR)
    if model.rope_scaling == "longrope":
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(LONGROPE_ATTENTION_FACTOR)
    if model.original_context is not None:
        writer.add_rope_scaling_orig_ctx_len(model.original_context)
    window = model.sliding_window
    family = model.family
    has_pattern = family.is_gemma4 or family.is_gemma3n or family.has_window_pattern
    if window is None and has_pattern:
        window = 24  # the key must be there
    if window is not None:
        writer.add_sliding_window(window)
    if model.family.is_gemma4:
        gemma4.add_metadata(writer, model)
    elif model.family.is_gemma3n:
        gemma3n.add_metadata(writer, model)
    elif model.family.has_window_pattern:
        writer.add_sliding_window_pattern(model.pattern)
    elif model.sliding_window_pattern is not None:
        writer.add_sliding_window_pattern(model.sliding_window_pattern)
    if model.rope_pattern is not None:
        key = f"{model.architecture}.attention.rope_pattern"
        writer.add_array(key, list(model.rope_pattern))
    if model.rope_base_sliding is not None:
        writer.add_rope_freq_base_swa(model.rope_base_sliding)
    for key, value in model.family.keys.items():
        writer.add_float32(f"{model.architecture}.{key}", value)


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    tokens, merges = _vocabulary()
    reserved = [f"<|reserved_{idx}|>" for idx in range(vocab_size - len(tokens))]
    n_control = len(CONTROL_TOKENS)
    types = [TokenType.CONTROL] * n_control + [TokenType.NORMAL] * (len(tokens) - n_control)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens + reserved)
    writer.add_token_types(types + [TokenType.CONTROL] * len(reserved))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(CONTROL_TOKENS.index("<|im_start|>"))
    writer.add_eos_token_id(CONTROL_TOKENS.index("<|im_end|>"))
    writer.add_unk_token_id(CONTROL_TOKENS.index("<|endoftext|>"))
    writer.add_pad_token_id(CONTROL_TOKENS.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _random_tensors(model: TinyModel) -> dict[str, NDArray[np.float32]]:
    """All tensors by GGUF name, as float32 [rows, cols] or [n]."""
    rng = np.random.default_rng(model.seed)
    tensors: dict[str, NDArray[np.float32]] = {}

    def normal(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        values = mean + std * rng.standard_normal(shape)
        tensors[name] = values.astype(np.float32)

    width = model.model_dim
    # Rows of unit-variance input: a standard deviation of cols**-0.5 keeps the variance.
    qk_std = (ATTENTION_LOGIT_STD / width) ** 0.5
    embedding_std = 2.0 * width**-0.5
    normal("token_embd.weight", model.vocab_size, width, std=embedding_std)
    if not model.tied:
        normal("output.weight", model.vocab_size, width, std=embedding_std)
    family = model.family
    if family.has_logit_biases:
        normal("output.bias", model.vocab_size, std=0.5)
    if family.has_norm_weights:
        normal(f"{family.output_norm}.weight", width, std=0.1, mean=1.0)
    if family.has_norm_biases:
        normal(f"{family.output_norm}.bias", width, std=0.2)
    if model.rope_scaling == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(
            rope_base=model.rope_base,
            n_pairs=model.n_pairs,
            trained_context=model.context_length / LLAMA3_FACTOR,
            factor=LLAMA3_FACTOR,
        )
    if model.rope_scaling == "longrope":
        for name, (fastest, slowest) in LONGROPE_FACTORS.items():
            factors = np.linspace(fastest, slowest, model.n_pairs, dtype=np.float32)
            tensors[f"rope_factors_{name}.weight"] = factors
    if family.is_gemma4:
        factors = np.ones(model.n_pairs, np.float32)
        factors[model.n_pairs // 4 :] = 1e30
        tensors["rope_freqs.weight"] = factors
    if family.is_gemma3n:
        gemma3n.add_stacks(normal, width)
    if model.input_dim:
        inputs = model.n_layers * model.input_dim
        std = model.input_dim**-0.5
        normal("per_layer_token_embd.weight", model.vocab_size, inputs, std=std)
        normal("per_layer_model_proj.weight", inputs, width, std=1.0)
        normal("per_layer_proj_norm.weight", model.input_dim, std=0.1, mean=1.0)
    for layer_idx, (n_heads, n_kv_heads, ffn_dim) in enumerate(model.layers):
        prefix = f"blk.{layer_idx}."
        head_dim = model.head_dims[layer_idx]
        heads_dim, kv_dim = n_heads * head_dim, n_kv_heads * head_dim
        qk_norm_dims = {
            None: (),
            "head": (head_dim, head_dim),
            "projection": (heads_dim, kv_dim),
        }[family.qk_norm]
        for name, is_there in (
            ("attn_norm", family.pre_norms and family.has_norm_weights),
            (
                "attn_norm_2",
                family.is_parallel and family.has_parallel_norm and model.has_two_norms,
            ),
            (
                family.ffn_norm,
                family.pre_norms
                and family.has_norm_weights
                and family.mamba2 != "single"
                and not family.is_parallel,
            ),
            ("post_attention_norm", family.post_norms),
            ("post_ffw_norm", family.post_norms),
        ):
            if is_there:
                normal(f"{prefix}{name}.weight", width, std=0.1, mean=1.0)
                if family.has_norm_biases:
                    normal(f"{prefix}{name}.bias", width, std=0.2)
        matrices = [
            ("attn_q", heads_dim, width, qk_std),
            ("attn_k", kv_dim, width, qk_std),
            ("attn_v", kv_dim, width, width**-0.5),
            ("attn_output", width, heads_dim, heads_dim**-0.5),
        ]
        mixer = model.mixer(layer_idx)
        if family.is_latent:
            matrices = add_latent_tensors(normal, prefix, model, qk_std**2 * width)
        elif mixer.startswith("attention"):
            if family.has_delta_net:  # a query and a gate per head
                matrices[0] = ("attn_q", 2 * heads_dim, width, qk_std)
            for name, size in zip(("attn_q_norm", "attn_k_norm"), qk_norm_dims, strict=False):
                if not model.has_qk_norm:
                    continue
                normal(f"{prefix}{name}.weight", size, std=0.1, mean=1.0)
        else:
            matrices = []
        matrices += recurrent.add_layer(normal, prefix, model, mixer)
        if ffn_dim:
            matrices += [
                ("ffn_gate", ffn_dim, width, width**-0.5),
                ("ffn_up", ffn_dim, width, width**-0.5),
                ("ffn_down", width, ffn_dim, ffn_dim**-0.5),
            ][family.mamba2 == "single" or family.is_ungated :]
        for name, rows, cols, std in matrices:
            normal(f"{prefix}{name}.weight", rows, cols, std=std)
            has_bias = model.biases and not name.startswith("ssm")
            has_bias |= family.qkv_biases and name in ("attn_q", "attn_k", "attn_v")
            has_bias |= family.has_output_biases and name == "attn_output"
            has_bias |= family.has_network_biases and name.startswith("ffn_")
            if has_bias:
                normal(f"{prefix}{name}.bias", rows, std=0.2)
        if family.mamba2 == "beside":  # its norm has a name of its own
            tensors[f"{prefix}ffn_norm"] = tensors.pop(f"{prefix}ffn_norm.weight")
        if family.is_gemma4:  # logits are not divided by the root of the head size
            tensors[f"{prefix}attn_q_norm.weight"] *= np.float32(head_dim**-0.5)
            normal(f"{prefix}layer_output_scale.weight", 1, std=0.1, mean=0.9)
            if model.expert_ffn_dim:
                gemma4.add_experts(normal, prefix, model)
            if model.has_values_of_keys and not model.pattern[layer_idx]:
                del tensors[f"{prefix}attn_v.weight"]
            if layer_idx >= model.n_layers - model.n_shared_kv:
                for name in ("attn_k", "attn_v", "attn_k_norm"):
                    del tensors[f"{prefix}{name}.weight"]
        if family.is_gemma3n:  # layers that share keys and values have matrices for nothing
            tensors[f"{prefix}attn_q_norm.weight"] *= np.float32(head_dim**-0.5)
            gemma3n.add_layer(normal, prefix, width)
        if dim := model.input_dim:
            normal(f"{prefix}inp_gate.weight", dim, width, std=width**-0.5)
            normal(f"{prefix}proj.weight", width, dim, std=dim**-0.5)
            normal(f"{prefix}post_norm.weight", width, std=0.1, mean=1.0)
        if model.has_experts(layer_idx):
            if family.has_expert_bias and not model.has_softmax_gate:
                normal(f"{prefix}exp_probs_b.bias", model.n_experts, std=0.3)
            normal(ROUTER.format(layer_idx), model.n_experts, width, std=2.0 * width**-0.5)
            for name, rows, cols in (
                ("ffn_gate", ffn_dim, width),
                ("ffn_up", ffn_dim, width),
                ("ffn_down", width, ffn_dim),
            ):
                if tensors.pop(f"{prefix}{name}.weight", None) is None:
                    continue
                stacked = f"{prefix}{name}_exps.weight"
                normal(stacked, model.n_experts, rows, cols, std=cols**-0.5)
            if family.is_gpt_oss:
                normal(ROUTER.format(layer_idx).replace("weight", "bias"), model.n_experts, std=0.3)
                normal(f"{prefix}attn_sinks.weight", n_heads, std=1.0, mean=1.0)
                normal(f"{prefix}attn_output.bias", width, std=0.2)
                for name, rows in (("gate", ffn_dim), ("up", ffn_dim), ("down", width)):
                    normal(f"{prefix}ffn_{name}_exps.bias", model.n_experts, rows, std=0.2)
            # Without a key, one with a gate is as wide as feed_forward_length says.
            has_gate = family.mamba2 != "single"
            n_shared = int(family.shared_gate or family.has_shared_width or not has_gate)
            if family.is_latent or family.has_expert_scales:
                n_shared = model.n_shared_experts
            shared = model.shared_ffn_dim or n_shared * ffn_dim
            if shared:
                if has_gate:
                    normal(f"{prefix}ffn_gate_shexp.weight", shared, width, std=width**-0.5)
                normal(f"{prefix}ffn_up_shexp.weight", shared, width, std=width**-0.5)
                normal(f"{prefix}ffn_down_shexp.weight", width, shared, std=shared**-0.5)
            if family.shared_gate:
                normal(f"{prefix}ffn_gate_inp_shexp.weight", width, std=2.0 * width**-0.5)
            if family.has_fused_experts:
                halves = [tensors.pop(f"{prefix}ffn_{name}_exps.weight") for name in ("gate", "up")]
                tensors[f"{prefix}ffn_gate_up_exps.weight"] = np.concatenate(halves, axis=1)
                if shared:
                    _fuse(tensors, prefix, "ffn_up_shexp", ("ffn_gate_shexp", "ffn_up_shexp"))
        if family.has_sinks:
            normal(f"{prefix}attn_sinks.weight", n_heads, std=1.0, mean=1.0)
        if family.fused_qkv or model.is_fused:
            _fuse(tensors, prefix, "attn_qkv", ("attn_q", "attn_k", "attn_v"))
        if family.fused_gate_up:
            _fuse(tensors, prefix, "ffn_up", ("ffn_gate", "ffn_up"))
    return tensors


def _fuse(
    tensors: dict[str, NDArray[np.float32]], prefix: str, name: str, parts: Sequence[str]
) -> None:
    """Replaces some matrices of a layer, and biases, by one that holds the rows of all."""
    for kind in ("weight", "bias"):
        if f"{prefix}{parts[0]}.{kind}" in tensors:
            rows = [tensors.pop(f"{prefix}{part}.{kind}") for part in parts]
            tensors[f"{prefix}{name}.{kind}"] = np.concatenate(rows)


def rope_sections(n_pairs: int) -> list[int]:
    """Pairs of time, height and width, interleaved or not, and none of a fourth axis."""
    return [(n_pairs + 2) // 3, (n_pairs + 1) // 3, n_pairs // 3, 0]


def llama3_factors(
    *, rope_base: float, n_pairs: int, trained_context: float, factor: float
) -> NDArray[np.float32]:
    """Divisors [n_pairs] of the rotation frequencies as Llama 3.1 defines them: 1 for short
    waves, ``factor`` for waves longer than the trained context, smooth between."""
    frequency = rope_base ** (-np.arange(n_pairs) / n_pairs)
    turns = trained_context * frequency / (2.0 * np.pi)
    smooth = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def _type_of(name: str, values: NDArray[np.float32], model: TinyModel) -> str:
    vectors = (ROUTER_SUFFIX, *recurrent.VECTOR_SUFFIXES, *gemma3n.VECTOR_SUFFIXES, ".bias")
    if values.ndim == 1 or name.endswith(vectors):
        return "F32"
    if name.endswith(gemma3n.FLOAT_MATRICES) or name in gemma3n.STACKS:
        return model.tensor_type if model.tensor_type in FLOAT_TYPES else "F16"
    if name in ("token_embd.weight", "output.weight"):
        return model.embedding_type or model.tensor_type
    return model.tensor_type


def _add_tensor(writer: GGUFWriter, name: str, values: NDArray[np.float32], type_name: str) -> None:
    if type_name in K_TYPES or type_name in CODEBOOK_TYPES:
        quantize_rows = quantize_k if type_name in K_TYPES else quantize_codebook
        rows = quantize_rows(values.reshape(-1, values.shape[-1]), type_name)
        data = rows.reshape(*values.shape[:-1], -1)
    else:
        data = quantize(values, GGMLQuantizationType[type_name])
    writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[type_name])


def _per_layer(text: str) -> PerLayer:
    numbers = tuple(map(int, text.split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line, named like the fields of TinyModel."""
    parser = argparse.ArgumentParser(prog="make_tiny_model", description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--architecture", choices=FAMILIES, default="llama")
    parser.add_argument("--tensor-type", choices=TENSOR_TYPES, default="F32")
    parser.add_argument("--embedding-type", choices=TENSOR_TYPES)
    for item in fields(TinyModel):
        flag, kind = "--" + item.name.replace("_", "-"), str(item.type).partition(" ")[0]
        if kind == "PerLayer":
            parser.add_argument(flag, type=_per_layer, default=item.default, metavar="N[,N...]")
        elif kind in ("int", "float"):
            number = int if kind == "int" else float
            parser.add_argument(flag, type=number, default=item.default, metavar=number.__name__)
    parser.add_argument("--rope-scaling", choices=ROPE_SCALINGS)
    parser.add_argument("--untied", dest="tied", action="store_false", help="own output matrix")
    parser.add_argument("--biases", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    options = vars(parse_arguments(arguments))
    path = options.pop("path")
    try:
        write_tiny_model(path, **options)
    except (OSError, ValueError) as error:
        print(f"make_tiny_model: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
