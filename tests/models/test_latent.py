"""What files of deepseek2 and minicpm3 say of their heads and experts, and what they must not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter

from edgeh2o.errors import FormatError, UsageError
from edgeh2o.model_config import DecoderConfig
from edgeh2o.rope_config import RopeConfig
from tests.models.tiny_file import changed_key, read
from tests.tiny_models import TinyModelFactory
from tools.make_tiny_model import write_tiny_model
from tools.tiny_models.latent import EXPERT_SCALE

SHAPE = {"n_layers": 3, "model_dim": 64, "n_heads": 4, "ffn_dim": 32}
YARN = {"rope_scaling": "yarn", "original_context": 64}


def test_heads_of_both_layouts(tiny_model: TinyModelFactory) -> None:
    sizes = {"q_rank": 0, "nope_dim": 32, "value_dim": 8}
    paths = [
        tiny_model(architecture="deepseek2", has_matrices_per_head=is_new, **SHAPE, **sizes)
        for is_new in (True, False)
    ]
    new, old = (read(path) for path in paths)
    for config, _ in (new, old):
        assert config.latent is not None
        assert (config.latent.rank, config.latent.q_rank, config.latent.rope_dim) == (48, 0, 16)
        assert (config.latent.nope_dim, config.latent.value_dim) == (32, 8)
        assert (config.n_heads, config.n_kv_heads, config.head_dim, config.n_slots) == (4, 1, 64, 3)
        assert config.rotary_dim == 16 and config.attention_scale == pytest.approx(48**-0.5)
    # W_k is held transposed, in floats, where the file does not have it so.
    assert sum(binding.is_transposed for binding in old[1]) == 3 * 4
    assert not any(binding.is_transposed for binding in new[1])
    rows = [binding for binding in old[1] if "blk.1.attn_kv_b_k.2." in binding.name]
    assert [(binding.first_row, binding.n_rows) for binding in rows] == [(2 * (32 + 8), 32)]


def test_quantised_keys_are_counted_as_floats(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(
        architecture="minicpm3", tensor_type="Q8_0", **SHAPE, kv_rank=32, nope_dim=32, q_rank=32
    )
    held = {binding.name: binding.held_bytes for binding in read(path)[1]}
    assert held["blk.0.attn_kv_b_k.0.weight"] == 32 * 32 * 2
    assert held["blk.0.attn_v_b.0.weight"] == 24 * 34


def test_experts_of_deepseek2(tiny_model: TinyModelFactory) -> None:
    groups = {"n_experts": 8, "n_experts_used": 3, "n_expert_groups": 4, "n_expert_groups_used": 2}
    config, _ = read(tiny_model(architecture="deepseek2", **SHAPE, **groups, n_shared_experts=2))
    assert (config.expert_gate, config.has_expert_bias, config.normalises_experts) == (
        "sigmoid",
        True,
        True,
    )
    assert config.expert_scale == pytest.approx(EXPERT_SCALE)
    assert (config.n_expert_groups, config.n_expert_groups_used) == (4, 2)
    assert [layer.is_dense for layer in config.layers] == [True, False, False]
    assert config.shared_ffn_dim == 2 * 32
    softmax, _ = read(tiny_model(architecture="deepseek2", **SHAPE, has_softmax_gate=True))
    assert (softmax.expert_gate, softmax.has_expert_bias, softmax.normalises_experts) == (
        "softmax",
        False,
        False,
    )
    dense, _ = read(tiny_model(architecture="deepseek2", **SHAPE, n_experts=0))
    assert dense.n_experts == dense.shared_ffn_dim == 0
    assert all(layer.is_dense for layer in dense.layers)


def test_scales_of_minicpm3(tiny_model: TinyModelFactory) -> None:
    config, _ = read(tiny_model(architecture="minicpm3", **SHAPE))
    assert (config.embedding_scale, config.logit_scale) == (12.0, 4.0)
    assert config.residual_scale == pytest.approx(1.4 / math.sqrt(3))
    assert config.latent is not None and config.latent.q_rank == 40


def test_yarn_scales_logits(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(architecture="deepseek2", **SHAPE, **YARN)
    growth = 1.0 + 0.08 * math.log(4.0)  # the file's multiplier is a tenth of that of the formula
    config, _ = read(path)
    assert config.rope_attention_factor == 1.0
    assert config.attention_scale == pytest.approx(32**-0.5 * growth**2)
    wider, _ = read(path, rope=RopeConfig(scale=8.0))
    growth = 1.0 + 0.08 * math.log(8.0)
    assert wider.attention_scale == pytest.approx(32**-0.5 * growth**2)
    with pytest.raises(UsageError, match="it would have linear scaling, which is not supported"):
        read(path, rope=RopeConfig(scaling="linear", scale=8.0))


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("attention.key_length", 80, "'deepseek2.attention.key_length' is 80, but must be 64"),
        ("attention.value_length", 64, "'deepseek2.attention.value_length' is 64, but must be 48"),
        ("attention.key_length_mla", 16, "'deepseek2.attention.key_length_mla'"),
        ("attention.kv_lora_rank", 0, "'deepseek2.attention.kv_lora_rank'"),
        ("rope.dimension_count", 15, "'deepseek2.rope.dimension_count' is 15, but must be even"),
        ("expert_gating_func", 4, r"'deepseek2.expert_gating_func' is 4, but only 1 \(softmax\)"),
        ("expert_group_count", 3, "'deepseek2.expert_group_count' is 3, but 8 experts do not"),
        ("expert_group_count", 8, "'deepseek2.expert_group_count' is 8, but 8 experts do not"),
        ("expert_group_used_count", 1, "'deepseek2.expert_group_used_count' is 1, but as many"),
    ],
)
def test_numbers_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: int, problem: str
) -> None:
    groups = {"n_experts": 8, "n_experts_used": 3, "n_expert_groups": 4, "n_expert_groups_used": 2}
    path = tmp_path / "tiny.gguf"
    with changed_key(monkeypatch, f"deepseek2.{key}", value):
        write_tiny_model(path, architecture="deepseek2", **SHAPE, **groups)
    with pytest.raises(FormatError, match=problem):
        read(path)


def _add_linear(writer: GGUFWriter) -> None:
    writer.add_float32("deepseek2.rope.scaling.factor", 2.0)


def _add_yarn_alone(writer: GGUFWriter) -> None:
    writer.add_string("deepseek2.rope.scaling.type", "yarn")
    writer.add_float32("deepseek2.rope.scaling.factor", 2.0)


@pytest.mark.parametrize(
    ("add", "left_out", "problem"),
    [
        (_add_linear, "", "linear scaling is not supported for the architecture 'deepseek2'"),
        (_add_yarn_alone, "rope.scaling.yarn_log_multiplier", "YaRN without rope.scaling.yarn_log"),
        (lambda _: None, "expert_gating_func", "but experts have biases"),
    ],
)
def test_what_is_not_understood(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    add: Callable[[GGUFWriter], None],
    left_out: str,
    problem: str,
) -> None:
    originals = {name: getattr(GGUFWriter, name) for name in ("add_name", "add_key_value")}

    def add_name(writer: GGUFWriter, name: str) -> None:
        originals["add_name"](writer, name)
        add(writer)

    def add_key_value(writer: GGUFWriter, key: str, *values: object, **more: object) -> None:
        if key != f"deepseek2.{left_out}":
            originals["add_key_value"](writer, key, *values, **more)

    monkeypatch.setattr(GGUFWriter, "add_name", add_name)
    monkeypatch.setattr(GGUFWriter, "add_key_value", add_key_value)
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="deepseek2", **SHAPE)
    with pytest.raises(FormatError, match=problem):
        read(path)


def test_queries_that_grow_with_their_position(
    tiny_model: TinyModelFactory, read_with_key: Callable[..., DecoderConfig]
) -> None:
    config, _ = read(tiny_model(architecture="mistral4", **SHAPE))
    assert config.temperature_scale == pytest.approx(0.3) and config.temperature_period == 40

    def add(writer: GGUFWriter) -> None:
        writer.add_float32("deepseek2.attention.temperature_scale", 0.1)

    config = read_with_key("deepseek2", add, original_context=64)  # without a length of its own
    assert config.temperature_scale == pytest.approx(0.1) and config.temperature_period == 64
