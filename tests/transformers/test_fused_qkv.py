"""Folders whose queries, keys and values are one matrix, and what old ones of them say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o.errors import FormatError
from edgeh2o.models.transformers.config import describe_config
from edgeh2o.models.transformers.fused_qkv import by_kind
from edgeh2o.models.transformers.weights import open_transformers

from .published import read_published, write_published

NEOX: Mapping[str, Any] = {
    "model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "vocab_size": 100,
    "layer_norm_eps": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": False,
}  # fmt: skip
# As tiiuae/falcon-7b has it, without sizes.
FALCON: Mapping[str, Any] = {
    "model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 100, "layer_norm_epsilon": 1e-5, "alibi": False, "bias": False,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
    "hidden_dropout": 0.0, "multi_query": True, "new_decoder_architecture": False,
    "parallel_attn": True,
}  # fmt: skip


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_rows_of_groups_are_brought_together_by_kind(n_heads: int, n_kv_heads: int) -> None:
    head_dim, n_rows = 8, (n_heads + 2 * n_kv_heads) * 8
    sizes = {
        "head_dim": head_dim,
        "q_dim": n_heads * head_dim,
        "kv_dim": n_kv_heads * head_dim,
        "qkv_dim": n_rows,
    }
    groups = np.arange(n_rows).reshape(n_kv_heads, n_heads // n_kv_heads + 2, head_dim)
    kinds = (groups[:, :-2], groups[:, -2], groups[:, -1])
    expected = np.concatenate([kind.reshape(-1) for kind in kinds])
    assert list(by_kind(n_rows, sizes) or range(n_rows)) == expected.tolist()
    with pytest.raises(ValueError, match=f"{n_rows - 8} rows are not {n_rows} of queries"):
        by_kind(n_rows - 8, sizes)


def test_a_matrix_of_other_heads_is_named(tmp_path: Path) -> None:
    case = read_published("gpt_neox")
    name = "gpt_neox.layers.1.attention.query_key_value.weight"
    write_published(tmp_path, case.config, {**case.shapes, name: (160, 64)})
    with pytest.raises(FormatError, match=rf"'{name}' has shape \[160, 64\]: 160 rows are not 192"):
        open_transformers(tmp_path, "f32")


def test_buffers_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    case = read_published("gpt_neox")
    layer = "gpt_neox.layers.0.attention."
    buffers = {f"{layer}bias": (1, 1, 8, 8), f"{layer}masked_bias": (1,)}
    buffers[f"{layer}rotary_emb.inv_freq"] = (2,)
    write_published(tmp_path, case.config, {**case.shapes, **buffers})
    with open_transformers(tmp_path, "f32") as converted:
        assert "output.weight" in converted.tensors


def test_names_of_old_gpt_neox_say_the_same() -> None:
    old = {**NEOX, "rotary_pct": 0.5, "rotary_emb_base": 20000, "classifier_dropout": 0.1}
    parameters = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 20000}
    both = {**old, "rope_theta": 20000, "partial_rotary_factor": 0.5}
    for config in (old, both, {**NEOX, "rope_parameters": parameters}):
        metadata = describe_config(config, "tiny").metadata
        assert metadata["gptneox.rope.dimension_count"] == 8
        assert metadata["gptneox.rope.freq_base"] == 20000
        assert metadata["gptneox.use_parallel_residual"] is True
    assert describe_config(NEOX, "tiny").metadata["gptneox.rope.dimension_count"] == 4


@pytest.mark.parametrize(
    ("changes", "n_kv_heads"),
    [
        ({}, 1),
        ({"num_kv_heads": 4}, 1),  # as transformers adds it
        ({"multi_query": False}, 4),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"new_decoder_architecture": True}, 4),
    ],
)
def test_what_falcon_leaves_out_is_what_transformers_takes(
    changes: Mapping[str, Any], n_kv_heads: int
) -> None:
    described = describe_config({**FALCON, **changes}, "tiny")
    metadata = described.metadata
    assert metadata["falcon.attention.head_count_kv"] == n_kv_heads
    assert metadata["falcon.context_length"] == 2048
    assert metadata["falcon.feed_forward_length"] == 256
    assert metadata["falcon.rope.dimension_count"] == 16
    assert described.ties


NEW = {"new_decoder_architecture": True}
REFUSED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "neox_share": (
        NEOX,
        {"rotary_pct": 0.5, "partial_rotary_factor": 0.25},
        r"'rotary_pct' is 0.5, .* \(only 0.25 or None is\)",
    ),
    "neox_base": (NEOX, {"rotary_emb_base": 1e4, "rope_theta": 2e4}, "'rotary_emb_base' is 10000"),
    "neox_ties": (NEOX, {"tie_word_embeddings": True}, "'tie_word_embeddings' is True"),
    "neox_biases": (NEOX, {"attention_bias": False}, "'attention_bias' is False"),
    "neox_residual": (NEOX, {"use_parallel_residual": 1}, "'use_parallel_residual' is 1, but must"),
    "falcon_alibi": (FALCON, {"alibi": True}, "'alibi' is True, which is not supported"),
    "falcon_biases": (FALCON, {"bias": True}, "'bias' is True, which is not supported"),
    "falcon_serial": (FALCON, {"parallel_attn": False}, "'parallel_attn' is False, which is not"),
    "falcon_norms": (
        FALCON,
        {"num_ln_in_parallel_attn": 2},
        r"'num_ln_in_parallel_attn' is 2, .* \(only 1 or None is\)",
    ),
    "falcon_more_norms": (FALCON, {**NEW, "num_ln_in_parallel_attn": 3}, "_attn' is 3, which is"),
    "falcon_heads": (FALCON, {**NEW, "num_kv_heads": 3}, "'num_kv_heads' is 3, but must divide"),
    "falcon_flag": (FALCON, {"multi_query": "yes"}, "'multi_query' is 'yes', but must be true or"),
    "falcon_activation": (FALCON, {"activation": "relu"}, "'hidden_act' is 'relu'"),
    "falcon_share": (
        FALCON,
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "'partial_rotary_factor' is 0.5, but all of a head is rotated",
    ),
    "falcon_residual": (
        FALCON,
        {"apply_residual_connection_post_layernorm": True},
        "'apply_residual_connection_post_layernorm' is True",
    ),
    "neox_activation": (NEOX, {"hidden_act": "relu"}, "'hidden_act' is 'relu'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_are_refused_by_name(case: str) -> None:
    config, changes, problem = REFUSED[case]
    describe_config(config, "tiny")
    with pytest.raises(FormatError, match=problem):
        describe_config({**config, **changes}, "tiny")
