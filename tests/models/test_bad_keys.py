"""Metadata keys that an architecture does not know, or whose value it cannot run."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from gguf import GGUFWriter

from edgeh2o.errors import FormatError
from edgeh2o.model_config import DecoderConfig


def add_cap(key: str, value: float) -> Callable[[GGUFWriter], None]:
    return lambda writer: writer.add_float32(key, value)


@pytest.mark.parametrize(
    ("architecture", "key", "add", "problem"),
    [
        ("gemma2", "attention.sliding_window", lambda w: w.add_sliding_window(0), "is 0"),
        ("qwen3", "attention.sliding_window", lambda w: w.add_sliding_window(9), "not supported"),
        ("phi3", "attention.sliding_window", lambda w: w.add_sliding_window(2**31), "2147483648"),
        (
            "gemma2",
            "attention.sliding_window_pattern",
            lambda w: w.add_sliding_window_pattern([True]),
            "has 1 items, but must have 6",
        ),
        (
            "gemma2",
            "attention.sliding_window_pattern",
            lambda w: w.add_sliding_window_pattern(513),
            "is 513",
        ),
        (
            "qwen3",
            "expert_gating_func",
            lambda w: w.add_uint32("qwen3.expert_gating_func", 2),
            "is 2",
        ),
        ("llama", "attention.max_alibi_bias", lambda w: w.add_max_alibi_bias(8.0), "is 8"),
        ("bloom", "attention.max_alibi_bias", lambda w: w.add_max_alibi_bias(8.0), "is 8"),
        ("llama", "attention.scale", lambda w: w.add_attention_scale(0.5), "is 0.5"),
        ("deepseek", "attention.scale", lambda w: w.add_attention_scale(0.5), "is 0.5"),
        (
            "mellum",
            "leading_dense_block_count",
            lambda w: w.add_leading_dense_block_count(1),
            "is 1",
        ),
        ("llama", "num_loops", lambda w: w.add_uint32("llama.num_loops", 2), "is 2"),
        ("qwen3moe", "expert_weights_scale", lambda w: w.add_expert_weights_scale(2.5), "is 2.5"),
        (
            "ernie4_5-moe",
            "expert_weights_scale",
            lambda w: w.add_expert_weights_scale(2.5),
            "is 2.5",
        ),
        ("bailingmoe2", "logit_scale", lambda w: w.add_logit_scale(0.5), "is 0.5"),
        (
            "gemma4",
            "expert_shared_feed_forward_length",
            lambda w: w.add_expert_shared_feed_forward_length(8),
            "is 8",
        ),
        (
            "qwen3moe",
            "expert_shared_feed_forward_length",
            lambda w: w.add_expert_shared_feed_forward_length(8),
            "is 8",
        ),
        ("glm4", "nextn_predict_layers", lambda w: w.add_nextn_predict_layers(1), "is 1"),
        (
            "hunyuan-dense",
            "rope.scaling.alpha",
            lambda w: w.add_rope_scaling_alpha(1000.0),
            "is 1000",
        ),
        (
            "llama",
            "attention.temperature_scale",
            lambda w: w.add_attn_temperature_scale(0.1),
            "is 0.1",
        ),
        (
            "glm4",
            "rope.dimension_sections",
            lambda w: w.add_rope_dimension_sections([2, 1, 1, 0]),
            "multimodal.*text model",
        ),
        ("gemma3", "final_logit_softcapping", add_cap("gemma3.final_logit_softcapping", 0), "is 0"),
        (
            "gemma3",
            "final_logit_softcapping",
            add_cap("gemma3.final_logit_softcapping", math.nan),
            "is nan",
        ),
        ("gemma3", "rope.freq_base_swa", lambda w: w.add_rope_freq_base_swa(0.0), "is 0"),
        ("qwen3", "expert_count", lambda w: w.add_expert_count(4), "is 4: mixture-of-experts"),
        (
            "granite",
            "rope.scaling.finetuned",
            lambda w: w.add_uint32("granite.rope.scaling.finetuned", 0),
            "is an integer, but must be a boolean",
        ),
    ],
)
def test_bad_keys_are_named(
    read_with_key: Callable[..., DecoderConfig],
    architecture: str,
    key: str,
    add: Callable[[GGUFWriter], None],
    problem: str,
) -> None:
    with pytest.raises(FormatError, match=f"'{architecture}.{key}'.*{problem}"):
        read_with_key(architecture, add)
