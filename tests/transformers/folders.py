"""Tiny models as folders of safetensors: the weights of a tiny GGUF file by their other names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from edgeh2o.formats.gguf import open_gguf
from edgeh2o.tokenizer import build_tokenizer
from edgeh2o.tokenizer.tokenizer_json import dump_tokenizer

from .safetensors_files import write_safetensors

# In the order in which they are tried.
_NAMES = (
    (r"token_embd", "model.embed_tokens"),
    (r"output_norm", "model.norm"),
    (r"output", "lm_head"),
    (r"blk\.(\d+)\.attn_norm", r"model.layers.\1.input_layernorm"),
    (r"blk\.(\d+)\.attn_([qk])_norm", r"model.layers.\1.self_attn.\2_norm"),
    (r"blk\.(\d+)\.attn_output", r"model.layers.\1.self_attn.o_proj"),
    (r"blk\.(\d+)\.attn_(qkv|q|k|v)", r"model.layers.\1.self_attn.\2_proj"),
    (r"blk\.(\d+)\.post_attention_norm", r"model.layers.\1.post_attention_layernorm"),
    (r"blk\.(\d+)\.post_ffw_norm", r"model.layers.\1.post_feedforward_layernorm"),
    (r"blk\.(\d+)\.ffn_norm", r"model.layers.\1.post_attention_layernorm"),
    (r"blk\.(\d+)\.ffn_gate_inp_shexp", r"model.layers.\1.mlp.shared_expert_gate"),
    (r"blk\.(\d+)\.ffn_gate_inp", r"model.layers.\1.mlp.gate"),
    (r"blk\.(\d+)\.ffn_(\w+)_shexp", r"model.layers.\1.mlp.shared_expert.\2_proj"),
    (r"blk\.(\d+)\.ffn_(\w+)_exps", r"model.layers.\1.mlp.experts.*.\2_proj"),
    (r"blk\.(\d+)\.ffn_(gate|up|down)", r"model.layers.\1.mlp.\2_proj"),
)
# Architectures whose GGUF files have rotated pairs as neighbours, and transformers as halves.
_INTERLEAVED = ("llama", "smollm3", "granite", "arcee")
MODEL_TYPES: Mapping[str, str] = {
    "llama": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
    "olmo2": "olmo2",
    "exaone4": "exaone4",
    "arcee": "arcee",
    "phi3": "phi3",
    "granite": "granite",
    "glm4": "glm4",
    "ernie4_5": "ernie4_5",
    "seed_oss": "seed_oss",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
_MORE: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2},
    "qwen2_moe": {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "olmoe": {"norm_topk_prob": False, "clip_qkv": None},
    "exaone4": {"sliding_window": None, "sliding_window_pattern": 4},
    "arcee": {"hidden_act": "relu2"},
    "gemma": {"hidden_act": "gelu"},
    "phi3": {"original_max_position_embeddings": 512, "embd_pdrop": 0.0, "auto_map": {}},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    "gemma3_text": {"hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000.0},
}
# Tiny models of every type of MODEL_TYPES: what they have beside their architecture.
CASES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama_untied": {"architecture": "llama", "tied": False, "biases": True},
    "smollm3": {"n_layers": 4},
    "qwen2": {"n_layers": 2},
    "qwen3": {"tied": False},
    "qwen2moe": {"n_layers": 2, "shared_ffn_dim": 64},
    "qwen3moe": {"n_layers": 2},
    "olmoe": {"n_layers": 2},
    "olmo2": {"n_layers": 2},
    "exaone4": {"n_layers": 5, "sliding_window": 32},
    "exaone4_full": {"architecture": "exaone4", "n_layers": 2},
    "arcee": {"n_layers": 2},
    "phi3": {"n_layers": 2, "rotary_dim": 24, "sliding_window": 40},
    "granite": {"n_layers": 2},
    "glm4": {"n_layers": 2, "rotary_dim": 16},
    "ernie4_5": {"n_layers": 2},
    "seed_oss": {"n_layers": 2},
    "gemma": {"n_layers": 2},
    "gemma2": {"n_layers": 2, "sliding_window": 32},
    "gemma3": {"n_layers": 7, "sliding_window": 32},
}
_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def options_of(case: str) -> dict[str, object]:
    """Of ``tiny_model``."""
    return {"architecture": case, "tensor_type": "F32", **CASES[case]}


def write_folder(
    model: Path, folder: Path, *, dtype: str = "F32", n_files: int = 1, has_index: bool = True
) -> Path:
    """Writes the GGUF file ``model`` as a folder of ``n_files`` safetensors of ``dtype``."""
    folder.mkdir()
    reader = GGUFReader(model)
    with open_gguf(model) as gguf:
        metadata = dict(gguf.metadata)
        files = dump_tokenizer(metadata, build_tokenizer(metadata), {})
    for name, text in files.items():
        (folder / name).write_text(text)
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(str(template))
    config = make_config(metadata)
    tensors: dict[str, NDArray[np.float32]] = {}
    for item in reader.tensors:
        values = dequantize(item.data, item.tensor_type).astype(np.float32)
        tensors |= rename_tensor(item.name, values, config, metadata["general.architecture"])
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    parts = [names[i::n_files] for i in range(n_files)]
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        name = (
            f"model-{number:05}-of-{n_files:05}.safetensors" if n_files > 1 else "model.safetensors"
        )
        weight_map |= dict.fromkeys(part, name)
        write_safetensors(folder / name, {each: tensors[each] for each in part}, dtype)
    if n_files > 1 and has_index:
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a tiny model."""
    name = metadata["general.architecture"]
    model_type = MODEL_TYPES[name]

    def value(suffix: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{suffix}", default)

    width, n_heads = value("embedding_length"), value("attention.head_count")
    head_dim = value("attention.key_length", width // n_heads)
    config: dict[str, Any] = {
        "architectures": ["TinyForCausalLM"],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "rope_scaling": None,
        "vocab_size": value("vocab_size"),
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **_MORE.get(model_type, {}),
    }
    if value("expert_count"):
        config |= {
            "num_experts": value("expert_count"),
            "num_experts_per_tok": value("expert_used_count"),
        }
        if model_type != "olmoe":
            config["moe_intermediate_size"] = value("expert_feed_forward_length")
        if model_type == "qwen2_moe":
            config["shared_expert_intermediate_size"] = value("expert_shared_feed_forward_length")
    for key, suffix in _SCALES.items():
        if value(suffix) is not None:
            config[key] = value(suffix)
    if value("attention.sliding_window"):
        config["sliding_window"] = value("attention.sliding_window")
    if model_type in ("gemma2", "gemma3_text"):
        config["query_pre_attn_scalar"] = head_dim
    share = value("rope.dimension_count", head_dim) / head_dim
    if share != 1:
        config["partial_rotary_factor"] = share
    return config


def rename_tensor(
    name: str, values: NDArray[np.float32], config: Mapping[str, Any], architecture: str
) -> dict[str, NDArray[np.float32]]:
    """A tensor of GGUF, or rows of one, as those of the checkpoint."""
    if name.startswith("rope_f"):
        return {}
    stem, _, suffix = name.rpartition(".")
    pattern, target = next(pair for pair in _NAMES if re.fullmatch(pair[0], stem))
    new = re.sub(pattern, target, stem)
    if architecture.startswith("gemma"):
        if stem.endswith("ffn_norm") and architecture != "gemma":
            new = new.replace("post_attention_layernorm", "pre_feedforward_layernorm")
        if stem.endswith("norm"):
            values = values - np.float32(1)
    if architecture == "glm4":
        new = new.replace("post_attention_layernorm", "post_self_attn_layernorm")
        new = new.replace("post_feedforward_layernorm", "post_mlp_layernorm")
        if stem.endswith("ffn_norm"):
            new = new.replace("post_self_attn_layernorm", "post_attention_layernorm")
    if architecture in ("phi3", "glm4") and stem.endswith("ffn_up"):
        new = new.replace("up_proj", "gate_up_proj")
    if architecture in _INTERLEAVED and stem.endswith(("attn_q", "attn_k")):
        heads = values.reshape(-1, config["head_dim"], *values.shape[1:])
        values = np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(values.shape)
    if "_shexp" in stem and stem.endswith("gate_inp_shexp"):
        values = values.reshape(1, -1)
    if "*" in new:
        return {f"{new.replace('*', str(i))}.{suffix}": each for i, each in enumerate(values)}
    return {f"{new}.{suffix}": values}
