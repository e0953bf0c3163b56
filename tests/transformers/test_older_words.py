"""Words of config.json and names of tensors that older checkpoints have, or other writers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o.errors import FormatError
from edgeh2o.models.transformers.config import describe_config
from edgeh2o.runners.safetensors import SafetensorsModelFile

from .published import read_published
from .published_cases import log_probabilities, write_case
from .safetensors_files import read_safetensors, write_safetensors


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a model."""
    metadata = describe_config(config, "tiny").metadata
    values = {key: metadata[key] for key in metadata}
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}


def test_older_words_of_gpt_neox(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Keys of its own for the rotary embedding, and masks that are stored with the weights."""
    case, folder = read_published("gpt_neox"), tmp_path / "gpt_neox"
    write_case(folder, case, tokenizer_folder)
    expected = log_probabilities(SafetensorsModelFile(folder, "f32"), case.tokens)
    config = {**case.config, "rotary_pct": 0.25, "rotary_emb_base": 10000}
    del config["rope_parameters"], config["attention_bias"]
    (folder / "config.json").write_text(json.dumps(config))
    stored = read_safetensors(folder / "model.safetensors")
    stored["lm_head.weight"] = stored.pop("embed_out.weight")
    for name, shape in (("bias", (1, 1, 8, 8)), ("masked_bias", ()), ("rotary_emb.inv_freq", (2,))):
        stored[f"gpt_neox.layers.0.attention.{name}"] = np.ones(shape, np.float32)
    write_safetensors(folder / "model.safetensors", stored, "F32")
    actual = log_probabilities(SafetensorsModelFile(folder, "f32"), case.tokens)
    np.testing.assert_array_equal(actual, expected)


def test_older_words_of_falcon() -> None:
    """Those of Falcon 7B, whose sizes are by default what newer files say."""
    config = dict(read_published("falcon").config)
    expected = describe_config({**config, "max_position_embeddings": 2048}, "falcon").metadata
    for key in ("max_position_embeddings", "ffn_hidden_size", "num_kv_heads", "rope_parameters"):
        del config[key]
    config["apply_residual_connection_post_layernorm"] = False
    actual = describe_config(config, "falcon").metadata
    keys = {key for key in expected if not key.endswith("freq_base")}
    assert set(actual) == keys and all(actual[key] == expected[key] for key in keys)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_older_models_of_images_are_not_in_parts(name: str) -> None:
    case = read_published(name)
    texts = {key: value for key, value in case.text_config.items() if key != "model_type"}
    rope = texts.pop("rope_parameters")
    older = {
        **{key: value for key, value in case.config.items() if key != "text_config"},
        **texts,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    assert describe(older) == describe(case.config)
    older["rope_scaling"]["mrope_section"] = [2, 3, 4]
    with pytest.raises(FormatError, match=r"'mrope_section' is \[2, 3, 4\], but must be three"):
        describe(older)


def test_gemma3_says_what_differs() -> None:
    """As the folder of its 4B model does."""
    texts = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    metadata = describe(
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "vision_config": {"model_type": "siglip_vision_model"},
            "text_config": texts,
        }
    )
    expected = {
        "attention.head_count": 8,
        "attention.head_count_kv": 4,
        "attention.key_length": 256,
        "context_length": 131072,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.scaling.factor": 8.0,
        "attention.sliding_window": 1024,
    }
    assert {key: metadata[f"gemma3.{key}"] for key in expected} == expected


def test_texts_of_mistral3_are_of_two_types() -> None:
    case = read_published("mistral3")
    texts = {**case.text_config, "model_type": "mistral"}
    del texts["rope_parameters"]
    assert describe({**case.config, "text_config": texts})["general.architecture"] == "llama"
    with pytest.raises(FormatError, match="'mistral3 of qwen2', which is not supported"):
        describe({**case.config, "text_config": {**texts, "model_type": "qwen2"}})


def test_names_of_texts_are_those_of_other_writers(tokenizer_folder: Path, tmp_path: Path) -> None:
    case, folder = read_published("mistral3"), tmp_path / "mistral3"
    write_case(folder, case, tokenizer_folder)
    expected = log_probabilities(SafetensorsModelFile(folder, "f32"), case.tokens)
    newer = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}
    newer |= {name: f"model.{name}" for name in ("vision_tower", "multi_modal_projector")}
    stored = read_safetensors(folder / "model.safetensors")
    for name in list(stored):
        prefix = next(each for each in newer if name.startswith(each))
        stored[name.replace(prefix, newer[prefix], 1)] = stored.pop(name)
    write_safetensors(folder / "model.safetensors", stored, "F32")
    actual = log_probabilities(SafetensorsModelFile(folder, "f32"), case.tokens)
    np.testing.assert_array_equal(actual, expected)


CHANGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no_alpha": (
        "hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic"}}, "'alpha' is missing"
    ),
    "alpha": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": -1}},
        "'alpha' is -1, but must be above 0",
    ),
    "shared_kv": ("hunyuan_v1_dense", {"use_cla": True}, "'use_cla' is True, which is not"),
    "no_yarn": ("ministral3", {"rope_parameters": {"rope_theta": 1e4}}, "must be of the type yarn"),
    "window": ("ministral3", {"sliding_window": 8}, "'sliding_window' is 8, which is not"),
    "every_other": ("ernie4_5_moe", {"moe_layer_interval": 2}, "'moe_layer_interval' is 2"),
    "dense_end": ("ernie4_5_moe", {"moe_layer_end_index": 2}, "'moe_layer_end_index' is 2"),
    "no_norm": ("glm4_moe_lite", {"norm_topk_prob": False}, "'norm_topk_prob' is False"),
    "dense_behind": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
        "dense layers behind mixtures",
    ),
    "halves": ("youtu", {"rope_interleave": False}, "'rope_interleave' is False"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_variants_are_refused_by_name(case: str) -> None:
    name, changes, problem = CHANGES[case]
    with pytest.raises(FormatError, match=problem):
        describe({**read_published(name).config, **changes})


def test_multipliers_of_yarn_that_are_not_computed_are_refused() -> None:
    config = read_published("ministral3").config
    with pytest.raises(FormatError, match=r"'mscale' is 0\.5, which is not supported"):
        describe({**config, "rope_parameters": {**config["rope_parameters"], "mscale": 0.5}})


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 1.0),  # as it is in GGUF: times YaRN's own
        ({"mscale": 0.7}, 1.0),  # alone it has no effect
        ({"mscale": 0.7, "mscale_all_dim": 0.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 2.0}, 1.0 / (1.0 + 0.2 * math.log(4.0))),
        (
            {"mscale": 1.0, "mscale_all_dim": 2.0, "attention_factor": 1.0 + 0.1 * math.log(4.0)},
            1.0,
        ),
    ],
)
@pytest.mark.parametrize("stretch", [4.0, None])
def test_multipliers_of_yarn(changes: dict[str, Any], factor: float, stretch: float | None) -> None:
    """Of a llama, as ``_compute_yarn_parameters`` of transformers has them; they were refused."""
    config = read_published("llama_yarn").config
    yarn = {"rope_type": "yarn", "factor": stretch, "original_max_position_embeddings": 128}
    found = describe({**config, "max_position_embeddings": 512, "rope_parameters": yarn | changes})
    assert found.get("llama.rope.scaling.attn_factor", 1.0) == pytest.approx(factor)
    assert found["llama.rope.scaling.factor"] == 4.0


# What transformers computes with where a key is missing, by the case it is tried on.
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_GROUPS: dict[str, Any] = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
_GROUPS |= {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "apertus": {
        "rope_theta": 12e6,
        "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 8192},
    },
    "gpt_oss": {
        "rope_theta": 150000.0,
        "rope_scaling": {**_YARN, "truncate": False, "original_max_position_embeddings": 4096},
    },
    "cohere": {"rope_theta": 500000.0},
    "ernie4_5_moe": {"rope_theta": 500000.0},
    "deepseek_v3": _GROUPS,
    "deepseek_v32": _GROUPS,
    "glm_moe_dsa": {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "glm4_moe_lite": {"routed_scaling_factor": 1.8},
    "gemma4_text": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    },
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_keys_that_are_missing_are_those_of_transformers(name: str) -> None:
    """As models that do not say them answer there, and not as by other defaults."""
    given = DEFAULTS[name]
    left_out = {*given, *(_ROPE_KEYS if any("rope" in key for key in given) else ())}
    config = {k: v for k, v in read_published(name).config.items() if k not in left_out}
    silent, said = (describe_config(each, name) for each in (config, {**config, **given}))
    assert describe(config) == describe({**config, **given})
    assert silent.tables == said.tables


_PLAIN: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "vocab_size": 320,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("name", "config", "key", "value"),
    [
        ("smollm3", {}, "smollm3.rope.freq_base", 2e6),
        ("ernie4_5", {}, "ernie4_5.rope.freq_base", 5e5),
        ("olmo3", {"sliding_window": 4096}, "olmo2.rope.freq_base", 5e5),
        ("qwen2_vl_text", {}, "qwen2vl.rope.freq_base", 1e6),
        ("qwen2_5_vl_text", {}, "qwen2vl.rope.freq_base", 1e6),
        ("qwen3_vl_text", {}, "qwen3vl.rope.freq_base", 5e5),
        ("glm4", {}, "glm4.rope.dimension_count", 8),
        ("glm4", {"partial_rotary_factor": 0.25}, "glm4.rope.dimension_count", 4),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8}},
            "phi3.rope.scaling.original_context_length",
            4096,
        ),
        ("mistral", {}, "llama.attention.sliding_window", 4096),
        ("mistral", {"sliding_window": None}, "llama.attention.sliding_window", None),
    ],
)
def test_defaults_of_transformers(name: str, config: dict[str, Any], key: str, value: Any) -> None:
    assert describe({**_PLAIN, **config, "model_type": name}).get(key) == value


@pytest.mark.parametrize(
    ("name", "config", "problem"),
    [
        ("gemma2", _CAPS, "'query_pre_attn_scalar' is 256, but 16 is what"),
        ("qwen3_moe", _MIXTURE, "'norm_topk_prob' is False, which is not supported"),
    ],
)
def test_defaults_that_are_not_computed_are_refused(
    name: str, config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(FormatError, match=problem):
        describe({**_PLAIN, **config, "model_type": name})
