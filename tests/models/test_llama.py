"""Architecture ``llama``: hyperparameters, tensor list, RoPE, and every way they can be wrong."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeh2o.errors import FormatError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.layer_config import LayerConfig
from edgeh2o.model_config import DecoderConfig
from edgeh2o.models import (
    ArchitectureSpec,
    read_model,
    register_architecture,
    registered_architectures,
    tensor,
)
from edgeh2o.models.rope import half_split_row_order
from edgeh2o.models.tensors import readable_types
from tests.formats import raw_gguf as raw
from tests.models.llama_file import (
    FFN_DIM,
    HEAD_DIM,
    KEYS,
    KV_DIM,
    MODEL_DIM,
    N_HEADS,
    N_KV_HEADS,
    N_LAYERS,
    Q_DIM,
    VOCAB,
    Change,
    array,
    base_tensors,
    float32,
    read,
    string,
    uint32,
)
from tests.tiny_models import TinyModelFactory


def test_reads_the_configuration(tmp_path: Path) -> None:
    config, bindings = read(tmp_path, Change())
    assert len(config.fingerprint) == 32
    assert config == DecoderConfig(
        architecture="llama",
        fingerprint=config.fingerprint,
        n_layers=N_LAYERS,
        model_dim=MODEL_DIM,
        n_heads=N_HEADS,
        n_kv_heads=N_KV_HEADS,
        layers=(
            LayerConfig(n_heads=N_HEADS, n_kv_heads=N_KV_HEADS, ffn_dim=FFN_DIM, is_dense=True),
        )
        * N_LAYERS,
        head_dim=HEAD_DIM,
        rotary_dim=HEAD_DIM,
        vocab_size=VOCAB,
        context_length=512,
        norm_eps=0.5**17,
        rope_inv_freq=(1.0, 0.01),
        attention_scale=0.5,
        tied_embeddings=True,
    )
    assert [binding.name for binding in bindings] == list(base_tensors())
    assert all(binding.info.name == binding.name for binding in bindings)
    rotated = {binding.name for binding in bindings if binding.row_order is not None}
    assert rotated == {f"blk.{n}.attn_{x}.weight" for n in range(N_LAYERS) for x in "qk"}


def test_reads_the_default_model(smollm2_path: Path) -> None:
    with open_gguf(smollm2_path) as file:
        config, bindings = read_model(file)
    assert len(bindings) == 272
    assert (config.n_layers, config.model_dim, config.vocab_size) == (30, 576, 49152)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tied_embeddings
    assert config.rope_inv_freq[1] == pytest.approx(100000 ** (-1 / 32), rel=1e-12)


def test_untied_output_and_optional_biases(tmp_path: Path) -> None:
    biases = {
        "attn_q": Q_DIM,
        "attn_k": KV_DIM,
        "attn_v": KV_DIM,
        "attn_output": MODEL_DIM,
        "ffn_gate": FFN_DIM,
        "ffn_up": FFN_DIM,
        "ffn_down": MODEL_DIM,
    }
    added = {f"blk.1.{name}.bias": raw.f32_tensor(size) for name, size in biases.items()}
    added["output.weight"] = raw.f32_tensor(MODEL_DIM, VOCAB)
    config, bindings = read(tmp_path, Change(tensors=added))
    assert not config.tied_embeddings
    orders = {binding.name: binding.row_order for binding in bindings}
    assert set(added) <= set(orders)
    for name in ("attn_q", "attn_k"):
        np.testing.assert_array_equal(orders[f"blk.1.{name}.bias"], orders[f"blk.1.{name}.weight"])
    assert orders["blk.1.attn_v.bias"] is None


def test_defaults_of_optional_keys(tmp_path: Path) -> None:
    square = {
        f"blk.{layer}.attn_{name}.weight": raw.f32_tensor(MODEL_DIM, Q_DIM)
        for layer in range(N_LAYERS)
        for name in "kv"
    }
    config, _ = read(tmp_path, Change({"llama.attention.head_count_kv": None}, square))
    assert config.n_kv_heads == N_HEADS


def test_head_size_may_differ_from_width_over_heads(tmp_path: Path) -> None:
    sizes = {
        "llama.attention.key_length": uint32(8),
        "llama.attention.value_length": uint32(8),
        "llama.attention.head_count": uint32(2),
        "llama.attention.head_count_kv": uint32(1),
        "llama.rope.dimension_count": uint32(6),
        "llama.rope.freq_base": float32(64.0),
    }
    config, bindings = read(tmp_path, Change(sizes))
    assert (config.head_dim, config.rotary_dim, config.attention_scale) == (8, 6, 1 / math.sqrt(8))
    np.testing.assert_allclose(config.rope_inv_freq, [1, 1 / 4, 1 / 16], rtol=1e-15)
    (query,) = (b for b in bindings if b.name == "blk.0.attn_q.weight")
    assert query.row_order.tolist() == [0, 2, 4, 1, 3, 5, 6, 7, 8, 10, 12, 9, 11, 13, 14, 15]


def test_per_layer_arrays_that_agree_count_as_one_number(tmp_path: Path) -> None:
    per_layer = {
        "llama.attention.head_count": array(raw.UINT32, [N_HEADS] * N_LAYERS),
        "llama.attention.head_count_kv": array(raw.INT32, [N_KV_HEADS] * N_LAYERS),
        "llama.feed_forward_length": array(raw.UINT64, [FFN_DIM] * N_LAYERS),
    }
    assert read(tmp_path, Change(per_layer))[0] == read(tmp_path, Change())[0]


def test_per_layer_arrays_make_layers_differ(tmp_path: Path) -> None:
    per_layer = {
        "llama.attention.head_count": array(raw.UINT32, [N_HEADS, 2]),
        "llama.attention.head_count_kv": array(raw.INT32, [1, 2]),
        "llama.feed_forward_length": array(raw.UINT64, [FFN_DIM, 40]),
    }
    shapes = {
        "blk.0.attn_k": (MODEL_DIM, HEAD_DIM),
        "blk.0.attn_v": (MODEL_DIM, HEAD_DIM),
        "blk.1.attn_q": (MODEL_DIM, 2 * HEAD_DIM),
        "blk.1.attn_output": (2 * HEAD_DIM, MODEL_DIM),
        "blk.1.ffn_gate": (MODEL_DIM, 40),
        "blk.1.ffn_up": (MODEL_DIM, 40),
        "blk.1.ffn_down": (40, MODEL_DIM),
    }
    tensors = {f"{name}.weight": raw.f32_tensor(*shape) for name, shape in shapes.items()}
    config, bindings = read(tmp_path, Change(per_layer, tensors))
    assert config.layers == (
        LayerConfig(n_heads=N_HEADS, n_kv_heads=1, ffn_dim=FFN_DIM, is_dense=True),
        LayerConfig(n_heads=2, n_kv_heads=2, ffn_dim=40, is_dense=True),
    )
    assert (config.n_heads, config.n_kv_heads, config.n_slots) == (N_HEADS, 2, 3)
    assert {len(b.row_order) for b in bindings if b.row_order} == {4, 8, 16}


def test_vocabulary_size_without_a_tokenizer(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.tokens": None, "llama.vocab_size": uint32(VOCAB)}
    assert read(tmp_path, Change(keys))[0].vocab_size == VOCAB


@pytest.mark.parametrize(
    ("keys", "divisor"),
    [
        ({"llama.rope.scaling.factor": float32(4.0)}, 4.0),
        ({"llama.rope.scaling.type": string("linear")}, 1.0),
        (
            {
                "llama.rope.scaling.type": string("linear"),
                "llama.rope.scaling.factor": float32(8.0),
            },
            8.0,
        ),
        ({"llama.rope.scale_linear": float32(2.0)}, 2.0),
        ({"llama.rope.scaling.factor": float32(0.0)}, 1.0),
        (
            {
                "llama.rope.scaling.type": string("none"),
                "llama.rope.scaling.factor": float32(8.0),
            },
            1.0,
        ),
    ],
)
def test_linear_rope_scaling(tmp_path: Path, keys: dict, divisor: float) -> None:
    config, _ = read(tmp_path, Change(keys))
    assert config.rope_inv_freq == (1.0 / divisor, 0.01 / divisor)


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    factors = raw.f32_tensor(HEAD_DIM // 2, values=[1.0, 8.0])
    change = Change(
        {"llama.rope.scaling.attn_factor": float32(1.5)}, {"rope_freqs.weight": factors}
    )
    config, bindings = read(tmp_path, change)
    assert config.rope_inv_freq == (1.0, 0.01 / 8.0)
    assert config.rope_attention_factor == 1.5
    assert "rope_freqs.weight" not in {binding.name for binding in bindings}


def test_row_order_turns_interleaved_rotation_into_half_split() -> None:
    """Rotating adjacent pairs, then reordering, equals reordering, then rotating halves."""
    n_heads, head_dim, rotary_dim = 3, 10, 6
    half = rotary_dim // 2
    order = half_split_row_order(n_heads * head_dim, head_dim, rotary_dim)
    assert memoryview(order).format == "i"
    order = np.asarray(order)
    assert sorted(order) == list(range(n_heads * head_dim))

    rows = np.random.default_rng(5).normal(size=(n_heads, head_dim))
    turns = np.exp(1j * np.array([0.3, 1.1, 2.0]))
    interleaved = rows.copy()
    pairs = (rows[:, 0:rotary_dim:2] + 1j * rows[:, 1:rotary_dim:2]) * turns
    interleaved[:, 0:rotary_dim:2], interleaved[:, 1:rotary_dim:2] = pairs.real, pairs.imag

    half_split = rows.reshape(-1)[order].reshape(n_heads, head_dim)
    pairs = (half_split[:, :half] + 1j * half_split[:, half:rotary_dim]) * turns
    half_split[:, :half], half_split[:, half:rotary_dim] = pairs.real, pairs.imag
    np.testing.assert_allclose(interleaved.reshape(-1)[order], half_split.reshape(-1))


def f16(*shape: int) -> raw.RawTensor:
    return raw.RawTensor(shape, raw.F16, bytes(2 * math.prod(shape)))


FACTORS = "rope_freqs.weight"
BAD_SHAPE = {
    "attn_q.weight": raw.f32_tensor(MODEL_DIM, KV_DIM),
    "attn_k.weight": raw.f32_tensor(MODEL_DIM, Q_DIM),
    "attn_output.weight": raw.f32_tensor(MODEL_DIM),
    "attn_norm.weight": raw.f32_tensor(MODEL_DIM, 1),
    "ffn_down.weight": raw.f32_tensor(MODEL_DIM, FFN_DIM),
    "attn_q.bias": raw.f32_tensor(KV_DIM),
}


@pytest.mark.parametrize("name", BAD_SHAPE)
def test_refuses_wrong_shapes(tmp_path: Path, name: str) -> None:
    full_name = f"blk.1.{name}"
    with pytest.raises(FormatError, match=f"'{full_name}' has shape .* hyperparameters make it"):
        read(tmp_path, Change(tensors={full_name: BAD_SHAPE[name]}))


@pytest.mark.parametrize("name", base_tensors())
def test_refuses_a_missing_tensor(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match=f"1 tensor of architecture 'llama' missing: '{name}'"):
        read(tmp_path, Change(tensors={name: None}))


@pytest.mark.parametrize(
    ("name", "item", "problem"),
    [
        ("blk.0.attn_q_norm.weight", raw.f32_tensor(4), "1 tensor that .* 'blk.0.attn_q_norm"),
        ("blk.2.ffn_up.weight", raw.f32_tensor(4), "does not use: 'blk.2.ffn_up.weight'"),
        ("blk.{layer}.ffn_up.weight", raw.f32_tensor(4), "does not use"),
        (FACTORS, raw.f32_tensor(3), r"'rope_freqs.weight' is F32 of shape \[3\].*\[2\]"),
        (FACTORS, f16(2), "is F16 of shape"),
        (FACTORS, raw.f32_tensor(2, values=[1, 0]), "entry 1 is 0"),
        (FACTORS, raw.f32_tensor(2, values=[math.nan, 1]), "entry 0 is nan"),
        (FACTORS, raw.f32_tensor(2, values=[math.inf, 1]), "entry 0 is inf"),
    ],
)
def test_refuses_extra_tensors_and_bad_factors(
    tmp_path: Path, name: str, item: raw.RawTensor, problem: str
) -> None:
    with pytest.raises(FormatError, match=problem):
        read(tmp_path, Change(tensors={name: item}))


@pytest.mark.parametrize(
    ("name", "shape", "supported"),
    [
        ("token_embd.weight", (MODEL_DIM, VOCAB), ", ".join(readable_types())),
        ("output_norm.weight", (MODEL_DIM,), "F32, F16, BF16"),
    ],
)
def test_refuses_types_that_cannot_be_computed(
    tmp_path: Path, name: str, shape: tuple[int, ...], supported: str
) -> None:
    int8 = raw.RawTensor(shape, 24, bytes(math.prod(shape)))
    with pytest.raises(FormatError, match=f"'{name}' is of type I8.*supported: {supported};"):
        read(tmp_path, Change(tensors={name: int8}))


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_type": "Q4_K", "biases": True},
        {"rope_scaling": "llama3"},
        {"rope_scaling": "linear", "rotary_dim": 16},
        {"tied": False, "n_kv_heads": 8},
    ],
    ids=str,
)
def test_reads_models_of_the_gguf_package(tiny_model: TinyModelFactory, options: dict) -> None:
    with open_gguf(tiny_model(**options)) as file:
        config, bindings = read_model(file)
        bound = {binding.name for binding in bindings}
        assert set(file.tensors) - bound == (
            {FACTORS} if options.get("rope_scaling") == "llama3" else set()
        )
    assert config.rotary_dim == options.get("rotary_dim", 32)
    assert config.tied_embeddings == options.get("tied", True)
    assert config.rope_inv_freq[0] == (0.25 if options.get("rope_scaling") == "linear" else 1.0)
    assert (config.rope_inv_freq[-1] < 10000**-0.94) == ("rope_scaling" in options)


def test_a_new_family_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "llama" in registered_architectures()  # those of the package are imported now
    monkeypatch.setattr("edgeh2o.models.spec._ARCHITECTURES", {})
    spec = ArchitectureSpec(
        name="scaled",
        qk_row_order="half_split",
        activation="gelu",
        scales={"attention_scale": "attention.scale", "logit_scale": "logit_scale"},
        tensors=(
            tensor("token_embd.weight", "model_dim", "vocab_size"),
            tensor("blk.{layer}.attn_q.weight", "model_dim", "q_dim", rotated=True),
        ),
    )
    assert register_architecture(spec) is spec
    assert registered_architectures() == ("scaled",)
    with pytest.raises(ValueError, match="'scaled' is registered already"):
        register_architecture(replace(spec, activation="silu"))

    keys = {name.replace("llama.", "scaled."): value for name, value in KEYS.items()}
    keys |= {name: None for name in KEYS if name.startswith("llama.")}
    keys |= {
        "general.architecture": string("scaled"),
        "scaled.attention.scale": float32(0.125),
    }
    wanted = ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.attn_q.weight")
    tensors = {name: None for name in base_tensors() if name not in wanted}
    config, bindings = read(tmp_path, Change(keys, tensors))
    assert (config.architecture, config.activation) == ("scaled", "gelu")
    assert (config.attention_scale, config.logit_scale) == (0.125, 1.0)
    assert [(b.name, b.row_order) for b in bindings] == [(name, None) for name in wanted]


def test_factors_are_read_in_single_precision(tmp_path: Path) -> None:
    factors = raw.f32_tensor(2, values=[1.0, 0.1])
    config, _ = read(tmp_path, Change(tensors={FACTORS: factors}))
    assert config.rope_inv_freq[1] == 0.01 / struct.unpack("<f", struct.pack("<f", 0.1))[0]
