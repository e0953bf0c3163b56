"""What the families read from a file: windows, scales, soft caps, fused tensors, RoPE tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import ExpertGatingFuncType, GGUFWriter
from numpy.typing import NDArray

from edgeh2o.errors import FormatError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.model_config import DecoderConfig
from edgeh2o.models import TensorBinding, read_model, registered_architectures
from edgeh2o.models.rope import RopeScaling, attention_factor, inverse_frequencies
from edgeh2o.runners.native import NativeModelFile
from tests.tiny_architectures import FAMILIES
from tests.tiny_models import TinyModelFactory
from tools.make_tiny_model import TinyModel, _random_tensors, write_tiny_model

SHAPE = {"n_layers": 6, "model_dim": 32, "n_heads": 4, "head_dim": 8, "ffn_dim": 16}


def read(path: Path) -> tuple[DecoderConfig, list[TensorBinding]]:
    with open_gguf(path) as file:
        return read_model(file)


def read_tiny(tiny_model: TinyModelFactory, architecture: str, **options: object) -> DecoderConfig:
    return read(tiny_model(architecture=architecture, **{**SHAPE, **options}))[0]


@pytest.fixture
def read_with_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DecoderConfig]:
    """Reads a tiny model of an architecture into whose metadata `add(writer)` put something."""

    def make(
        architecture: str, add: Callable[[GGUFWriter], None], **options: object
    ) -> DecoderConfig:
        original = GGUFWriter.add_name

        def add_name(writer: GGUFWriter, name: str) -> None:
            original(writer, name)
            add(writer)

        monkeypatch.setattr(GGUFWriter, "add_name", add_name)
        path = write_tiny_model(
            tmp_path / "tiny.gguf", architecture=architecture, **{**SHAPE, **options}
        )
        return read(path)[0]

    return make


def test_tiny_models_are_there_for_every_architecture() -> None:
    assert set(FAMILIES) == set(registered_architectures())


@pytest.mark.parametrize("architecture", FAMILIES)
def test_biases_of_keys_are_noticed(tiny_model: TinyModelFactory, architecture: str) -> None:
    assert read_tiny(tiny_model, architecture).has_key_bias == (FAMILIES[architecture].qkv_biases)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_row_of_a_file_is_bound_once(tiny_model: TinyModelFactory, architecture: str) -> None:
    # With one norm falcon has it for attention and for networks.
    path = tiny_model(architecture=architecture, has_two_norms=True, **SHAPE)
    _, bindings = read(path)
    names = [binding.name for binding in bindings]
    assert len(set(names)) == len(names)
    with open_gguf(path) as file:
        for name, info in file.tensors.items():
            if name == "rope_freqs.weight":  # read elsewhere
                continue
            parts = [binding for binding in bindings if binding.info.name == name]
            assert sum(part.n_rows for part in parts) == info.rows
            assert sum(part.n_bytes for part in parts) == info.n_bytes
            ends = [part.first_byte + part.n_bytes for part in parts]
            assert [part.first_byte for part in parts] == [0, *ends[:-1]]


def test_norms_of_heads_lie_as_their_rows_do(tiny_model: TinyModelFactory) -> None:
    _, bindings = read(tiny_model(architecture="maincoder", **SHAPE))
    orders = {binding.name: binding.row_order for binding in bindings}
    for name in ("attn_q_norm", "attn_k_norm"):
        assert list(orders[f"blk.0.{name}.weight"] or ()) == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize(
    ("architecture", "options", "layers"),
    [
        ("llama", {}, ""),
        ("llama", {"sliding_window": 5}, "wwwwww"),
        ("llama", {"sliding_window": 0}, ""),
        ("phi3", {"sliding_window": 5}, "wwwwww"),
        ("phi3", {"sliding_window": 0}, ""),
        ("phimoe", {"sliding_window": 2047}, "wwwwww"),
        ("phimoe", {"sliding_window": 2048}, ""),  # as wide as the context
        ("phi3", {"sliding_window": 2047}, "wwwwww"),
        ("phi3", {"sliding_window": 4096}, ""),  # the 128k models: else no prompt were sparse
        ("gemma2", {"sliding_window": 5}, "w.w.w."),
        ("gemma2", {}, "w.w.w."),
        ("gemma3", {}, ""),
        ("gemma3", {"sliding_window": 5}, "wwwww."),
        ("gemma3", {"sliding_window": 5, "sliding_window_pattern": 3}, "ww.ww."),
        ("gemma3", {"sliding_window": 5, "sliding_window_pattern": 1}, ""),
        ("olmo2", {"sliding_window": 5}, "www.ww"),
        ("mellum", {"sliding_window": 5}, "www.ww"),
        ("exaone4", {}, ""),
        ("exaone4", {"sliding_window": 5}, "www.ww"),
        ("exaone4", {"n_layers": 64}, "www." * 16),
    ],
)
def test_layers_with_a_window(
    tiny_model: TinyModelFactory, architecture: str, options: dict[str, object], layers: str
) -> None:
    config = read_tiny(tiny_model, architecture, **options)
    width = options.get("sliding_window", 4096)
    expected = [width if layer == "w" else 0 for layer in layers or "." * SHAPE["n_layers"]]
    assert [layer.window for layer in config.layers] == expected
    has_rope = [not layers or architecture != "exaone4" or layer == "w" for layer in layers]
    assert [layer.has_rope for layer in config.layers] == (has_rope or [True] * SHAPE["n_layers"])


def test_a_pattern_may_be_an_array(read_with_key: Callable[..., DecoderConfig]) -> None:
    pattern = (True, True, False, False, True, False)

    def add(writer: GGUFWriter) -> None:
        writer.add_sliding_window_pattern(list(pattern))

    config = read_with_key("gemma3", add, sliding_window=5)
    assert [layer.window for layer in config.layers] == [5 * has_window for has_window in pattern]


def test_layers_with_a_window_have_their_own_rope(tiny_model: TinyModelFactory) -> None:
    scaled = {"sliding_window": 5, "rope_base": 1e6, "rope_scaling": "linear"}
    gemma3 = read_tiny(tiny_model, "gemma3", **scaled)
    np.testing.assert_allclose(gemma3.sliding_rope_inv_freq, [1.0, 0.1, 0.01, 0.001])
    assert gemma3.rope_inv_freq[0] == 0.25
    other_base = read_tiny(tiny_model, "gemma3", **scaled, rope_base_sliding=16.0)
    np.testing.assert_allclose(other_base.sliding_rope_inv_freq, [1.0, 0.5, 0.25, 0.125])
    assert read_tiny(tiny_model, "gemma2", **scaled).sliding_rope_inv_freq == ()
    olmo3 = read_tiny(tiny_model, "olmo2", **scaled)
    np.testing.assert_allclose(np.divide(olmo3.sliding_rope_inv_freq, olmo3.rope_inv_freq), 4.0)
    mellum = read_tiny(tiny_model, "mellum", **scaled)
    np.testing.assert_allclose(np.divide(mellum.sliding_rope_inv_freq, mellum.rope_inv_freq), 4.0)


def test_scales_and_caps(tiny_model: TinyModelFactory) -> None:
    granite = read_tiny(tiny_model, "granite")
    assert granite.logit_scale == 0.25
    assert granite.residual_scale == pytest.approx(0.4)
    assert granite.embedding_scale == 6.0
    assert granite.attention_scale == pytest.approx(0.35)
    gemma2 = read_tiny(tiny_model, "gemma2")
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap) == (2.0, 3.0)
    assert gemma2.embedding_scale == pytest.approx(math.sqrt(32))
    assert gemma2.attention_scale == pytest.approx(8**-0.5)


@pytest.mark.parametrize(("architecture", "n_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_logits_by_their_width(
    tiny_model: TinyModelFactory, architecture: str, n_layers: int
) -> None:
    sizes = {"model_dim": 48, "n_layers": n_layers}
    config = read_tiny(tiny_model, architecture, **sizes)
    assert config.attention_scale == pytest.approx((48 / 4) ** -0.5)


def test_a_granite_without_positions(read_with_key: Callable[..., DecoderConfig]) -> None:
    config = read_with_key("granite", lambda writer: writer.add_rope_scaling_finetuned(False))
    assert config.rope_inv_freq == (0.0,) * 4


def test_every_fourth_layer_of_smollm3_has_no_positions(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "smollm3")
    assert [layer.has_rope for layer in config.layers] == [True, True, True, False, True, True]


def test_queries_of_mistral3_grow_with_their_position(tiny_model: TinyModelFactory) -> None:
    options = {"rope_scaling": "yarn", "original_context": 40}
    config = read_tiny(tiny_model, "mistral3", **options)
    assert config.temperature_scale == pytest.approx(0.3)
    assert config.temperature_period == 40
    growth = 0.1 * math.log(4)
    assert config.rope_attention_factor == pytest.approx((1 + growth) / (1 + 0.8 * growth))
    assert read_tiny(tiny_model, "llama", **options).temperature_period == 0


def test_experts_and_the_shared_one(tiny_model: TinyModelFactory) -> None:
    qwen2moe = read_tiny(tiny_model, "qwen2moe", shared_ffn_dim=24)
    assert (qwen2moe.shared_ffn_dim, qwen2moe.has_shared_gate) == (24, True)
    assert not qwen2moe.normalises_experts
    granitemoe = read_tiny(tiny_model, "granitemoe", shared_ffn_dim=24)
    assert (granitemoe.shared_ffn_dim, granitemoe.has_shared_gate) == (24, False)
    assert granitemoe.normalises_experts
    assert read_tiny(tiny_model, "granitemoe").shared_ffn_dim == 0
    assert {layer.ffn_dim for layer in read_tiny(tiny_model, "olmoe").layers} == {16}


@pytest.mark.parametrize("name", ["output.bias", "output_norm.bias", "blk.0.attn_output.bias"])
def test_phimoe_has_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    original = GGUFWriter.add_tensor

    def add_tensor(writer: GGUFWriter, added: str, *arguments: object, **options: object) -> None:
        if added != name:
            original(writer, added, *arguments, **options)

    monkeypatch.setattr(GGUFWriter, "add_tensor", add_tensor)
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="phimoe", **SHAPE)
    with pytest.raises(FormatError, match=f"1 tensor of architecture 'phimoe' missing: '{name}'"):
        read(path)


def test_gptneox_says_whether_networks_are_beside_attention(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, behind = (
        read_tiny(tiny_model, "gptneox", is_sequential=is_sequential)
        for is_sequential in (False, True)
    )
    assert (beside.is_parallel, beside.has_parallel_norm) == (True, True)
    assert (behind.is_parallel, behind.has_parallel_norm) == (False, False)
    monkeypatch.setattr(GGUFWriter, "add_parallel_residual", lambda *arguments: None)
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="gptneox", **SHAPE)
    with pytest.raises(FormatError, match=r"'gptneox\.use_parallel_residual'.* is missing"):
        read(path)


def test_norms_of_falcon(tiny_model: TinyModelFactory) -> None:
    """The first of two is that of networks, the only one is that of attention too."""
    for has_two_norms, of_attention in ((False, "attn_norm"), (True, "attn_norm_2")):
        path = tiny_model(architecture="falcon", has_two_norms=has_two_norms, **SHAPE)
        sources = {item.name: item.info.name for item in read(path)[1]}
        for kind in ("weight", "bias"):
            assert sources[f"blk.3.attn_norm.{kind}"] == f"blk.3.{of_attention}.{kind}"
            assert sources[f"blk.3.ffn_norm.{kind}"] == f"blk.3.attn_norm.{kind}"


def test_limits_of_olmo(
    tiny_model: TinyModelFactory, read_with_key: Callable[..., DecoderConfig]
) -> None:
    assert read_tiny(tiny_model, "olmo").qkv_limit == pytest.approx(0.9)
    with pytest.raises(FormatError, match=r"'llama\.attention\.clamp_kqv' is 8"):
        read_with_key("llama", lambda writer: writer.add_clamp_kqv(8.0))


def test_phimoe_weights_experts_by_a_softmax(read_with_key: Callable[..., DecoderConfig]) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)

    with pytest.raises(FormatError, match=r"'phimoe\.expert_gating_func' is 2"):
        read_with_key("phimoe", add)


@pytest.mark.parametrize("architecture", ["gemma3n", "gemma4"])
@pytest.mark.parametrize("key", ["sliding_window", "sliding_window_pattern"])
def test_gemma4_says_what_its_windows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, architecture: str
) -> None:
    monkeypatch.setattr(GGUFWriter, f"add_{key}", lambda *arguments: None)
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture=architecture, **SHAPE)
    with pytest.raises(FormatError, match=rf"'{architecture}.attention.{key}'.* is missing"):
        read(path)


GEMMA4: dict[str, object] = {
    **{"architecture": "gemma4", "sliding_window": 5, "sliding_window_pattern": 3},
    **{"head_dim_sliding": 4, "n_shared_kv": 3, "token_input_dim": 4},
}


def test_layers_of_gemma4(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, **GEMMA4)
    assert [layer.window for layer in config.layers] == [5, 5, 0] * 2
    assert [layer.head_dim for layer in config.layers] == [4, 4, 8] * 2
    assert [layer.kv_distance for layer in config.layers] == [0, 0, 0, 2, 3, 3]
    assert (config.attention_scale, config.token_input_dim) == (1.0, 4)
    assert len(config.rope_inv_freq) == 4 and len(config.sliding_rope_inv_freq) == 2
    # A quarter of the pairs of the other layers is rotated.
    np.testing.assert_allclose(config.rope_inv_freq, [1.0, 0.0, 0.0, 0.0], atol=1e-20)
    assert not config.has_like_layers


GEMMA3N: dict[str, object] = {
    **{"architecture": "gemma3n", "sliding_window": 5, "sliding_window_pattern": 3},
    **{"n_shared_kv": 3, "token_input_dim": 4, "n_cut_layers": 2},
}


def test_layers_of_gemma3n(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, **GEMMA3N)
    assert [layer.window for layer in config.layers] == [5, 5, 0] * 2
    assert [layer.kv_distance for layer in config.layers] == [0, 0, 0, 2, 3, 3]
    cutoffs = [layer.gate_cutoff for layer in config.layers]
    np.testing.assert_allclose(cutoffs[:2], 1.6448534, rtol=1e-6)
    assert cutoffs[2:] == [None] * 4
    assert (config.attention_scale, config.logit_soft_cap, config.laurel_rank) == (1.0, 30.0, 64)
    assert config.has_streams and config.norms_values and not config.has_like_layers


def test_gates_of_gemma3n_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the published models: of the first ten layers."""
    monkeypatch.setattr(GGUFWriter, "add_activation_sparsity_scale", lambda *arguments: None)
    path = write_tiny_model(tmp_path / "tiny.gguf", **{**SHAPE, **GEMMA3N, "n_layers": 12})
    cutoffs = [layer.gate_cutoff for layer in read(path)[0].layers]
    assert cutoffs == [1.6448533535003662] * 10 + [None] * 2


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("altup_num_inputs", 3, "'gemma3n.altup.num_inputs' is 3, but only 4 is supported"),
        ("altup_active_idx", 1, "'gemma3n.altup.active_idx' is 1, but only 0 is supported"),
        ("activation_sparsity_scale", [0.5] * 5, "activation_sparsity_scale' has 5 items"),
        ("activation_sparsity_scale", [float("nan")] * 6, "must hold standard deviations"),
        ("activation_sparsity_scale", [float("inf")] * 6, "must hold standard deviations"),
        ("activation_sparsity_scale", [1e3] * 6, "must hold standard deviations"),
    ],
)
def test_layers_of_gemma3n_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, problem: str
) -> None:
    original = getattr(GGUFWriter, f"add_{key}")
    monkeypatch.setattr(GGUFWriter, f"add_{key}", lambda writer, _: original(writer, value))
    path = write_tiny_model(tmp_path / "tiny.gguf", **{**SHAPE, **GEMMA3N})
    with pytest.raises(FormatError, match=problem):
        read(path)


def test_keys_and_values_that_nobody_reads_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_unread(model: TinyModel) -> dict[str, NDArray[np.float32]]:
        tensors = _random_tensors(model)
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            tensors[f"blk.5.{name}.weight"] = tensors[f"blk.2.{name}.weight"]
        return tensors

    monkeypatch.setattr("tools.make_tiny_model._random_tensors", with_unread)
    path = write_tiny_model(tmp_path / "tiny.gguf", **{**SHAPE, **GEMMA4})
    names = {binding.name for binding in read(path)[1]}
    assert "blk.2.attn_k.weight" in names and "blk.5.attn_q.weight" in names
    assert not names & {f"blk.5.{name}.weight" for name in ("attn_k", "attn_v", "attn_k_norm")}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n_shared_kv": 6}, "shared_kv_layers' is 6"),
        ({"n_shared_kv": 5}, "finds no layer of its kind"),
        ({"n_kv_heads": (2, 2, 2, 2, 2, 1)}, "layer 5 finds no layer of its kind and KV heads"),
        ({"head_dim_sliding": 3}, "value_length_swa' is 3"),
    ],
)
def test_layers_of_gemma4_that_cannot_be(
    tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", **{**SHAPE, **GEMMA4, **options})
    with pytest.raises(FormatError, match=problem):
        read(path)


def test_layers_of_lfm2(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "lfm2", n_kv_heads=(0, 2, 0, 0, 4, 0), sliding_window=9)
    assert [layer.mixer == "attention" for layer in config.layers] == [0, 1, 0, 0, 1, 0]
    assert [layer.n_kv_heads for layer in config.layers] == [0, 2, 0, 0, 4, 0]
    assert [layer.window for layer in config.layers] == [0, 9, 0, 0, 9, 0]
    assert (config.n_slots, config.n_kv_heads, config.has_like_layers) == (6, 4, False)
    mixture = read_tiny(tiny_model, "lfm2moe", n_dense_layers=2)
    assert [layer.is_dense for layer in mixture.layers] == [True] * 2 + [False] * 4
    assert (mixture.expert_gate, mixture.has_expert_bias) == ("sigmoid", True)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n_kv_heads": (0,) * 6}, "'lfm2.attention.head_count_kv' leaves no layer with attention"),
        ({"n_conv_taps": 1}, "'lfm2.shortconv.l_cache'"),
        ({"n_conv_taps": 17}, "'lfm2.shortconv.l_cache'"),
    ],
)
def test_layers_of_lfm2_that_cannot_be(
    tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="lfm2", **{**SHAPE, **options})
    with pytest.raises(FormatError, match=problem):
        read(path)


def test_a_router_of_lfm2moe_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_softmax_of_weights(writer: GGUFWriter, gate: object) -> None:
        writer.add_uint32("lfm2moe.expert_gating_func", 3)

    monkeypatch.setattr(GGUFWriter, "add_expert_gating_func", add_softmax_of_weights)
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="lfm2moe", **SHAPE)
    with pytest.raises(FormatError, match=r"'lfm2moe.expert_gating_func' is 3, but only 2"):
        read(path)


def test_layers_with_mamba2(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "granitehybrid", n_conv_taps=4)
    assert [layer.mixer for layer in config.layers] == ["mamba2", "attention"] * 3
    first = config.layers[0]
    assert (first.n_ssd_heads, first.ssd_head_dim) == (8, 16)
    assert (first.n_ssd_groups, first.ssd_state_dim, first.n_conv_taps) == (2, 32, 4)
    assert (config.n_experts, config.attention_scale) == (6, pytest.approx(0.35))
    assert config.rope_inv_freq == (0.0,) * 4  # not "finetuned"
    assert config.is_recurrent and not config.has_like_layers
    dense = read_tiny(tiny_model, "granitehybrid", n_experts=0, rotates=True)
    assert dense.n_experts == 0 and dense.rope_inv_freq[0] == 1.0
    assert all(layer.is_dense for layer in dense.layers)

    config = read_tiny(tiny_model, "falcon-h1")
    assert [layer.mixer for layer in config.layers] == ["attention_mamba2"] * 6
    assert [layer.n_kv_heads for layer in config.layers] == [2] * 6
    assert config.is_recurrent and config.layers[0].n_ssd_heads == 8

    config = read_tiny(tiny_model, "nemotron_h")
    assert [layer.mixer for layer in config.layers] == ["mamba2", "attention", "none"] * 2
    assert [layer.ffn_dim for layer in config.layers] == [0, 0, 16] * 2
    assert not any(layer.has_rope for layer in config.layers)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n_ssd_groups": 3}, "'granitehybrid.ssm.time_step_rank' is 8, which is not a multiple"),
        ({"ssd_head_dim": 2000}, "'granitehybrid.ssm.inner_size' is 16000, but must be 8 "),
        ({"n_conv_taps": 17}, "'granitehybrid.ssm.conv_kernel'"),
        ({"n_kv_heads": (0,) * 6}, "'granitehybrid.attention.head_count_kv' leaves no layer"),
    ],
)
def test_layers_with_mamba2_that_cannot_be(
    tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    options = {"architecture": "granitehybrid", **SHAPE, **options}
    path = write_tiny_model(tmp_path / "tiny.gguf", **options)
    with pytest.raises(FormatError, match=problem):
        read(path)


def test_a_layer_of_nemotron_h_has_one_branch(tmp_path: Path) -> None:
    options = {"n_kv_heads": (0, 2, 2, 0, 2, 0), "ffn_dim": (0, 0, 16, 0, 0, 16)}
    path = write_tiny_model(
        tmp_path / "tiny.gguf", architecture="nemotron_h", **{**SHAPE, **options}
    )
    with pytest.raises(FormatError, match=r"layer 2 has both KV heads .* and a metadata key"):
        read(path)


def test_other_norms_may_name_the_epsilon_of_nemotron_h(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GGUFWriter, "add_layer_norm_rms_eps", lambda *_: None)
    options = {**SHAPE, "norm_eps": 0.01}
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="nemotron_h", **options)
    assert read(path)[0].norm_eps == pytest.approx(0.01)
    path = write_tiny_model(tmp_path / "other.gguf", architecture="falcon-h1", **options)
    with pytest.raises(FormatError, match="layer_norm_rms_epsilon"):
        read(path)


def test_a_norm_of_one_group_may_have_one_dimension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ggml writes it when a file is quantised: without dimensions of 1 at the end."""

    def with_flat_norms(model: TinyModel) -> dict[str, NDArray[np.float32]]:
        tensors = _random_tensors(model)
        return {n: v[0] if n.endswith("ssm_norm.weight") else v for n, v in tensors.items()}

    monkeypatch.setattr("tools.make_tiny_model._random_tensors", with_flat_norms)
    options = {"architecture": "granitehybrid", **SHAPE}
    path = write_tiny_model(tmp_path / "tiny.gguf", n_ssd_groups=1, **options)
    names = [item.name for item in read(path)[1]]
    assert names.count("blk.0.ssm_norm.0.weight") == 1
    path = write_tiny_model(tmp_path / "other.gguf", n_ssd_groups=2, **options)
    with pytest.raises(FormatError, match=r"'blk.0.ssm_norm.weight' has shape"):
        read(path)


def test_layers_of_qwen35(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "qwen35", n_conv_taps=4)
    assert [layer.mixer for layer in config.layers] == ["delta_net", "attention"] * 3
    assert [layer.n_kv_heads for layer in config.layers] == [0, 2] * 3
    first = config.layers[0]
    assert (first.n_delta_key_heads, first.n_delta_value_heads, first.delta_head_dim) == (2, 4, 32)
    assert (first.n_conv_taps, first.has_grouped_delta_heads) == (4, False)
    assert config.has_output_gate and config.is_recurrent and not config.has_like_layers
    assert read_tiny(tiny_model, "qwen3next").layers[0].has_grouped_delta_heads


def test_rows_of_gates_are_parted_from_those_of_queries(tiny_model: TinyModelFactory) -> None:
    bindings = {item.name: item for item in read(tiny_model(architecture="qwen3next", **SHAPE))[1]}
    order = np.array(bindings["blk.1.attn_q.weight"].row_order).reshape(2, 4, 8)
    heads = np.arange(64).reshape(4, 2, 8)  # by turns: a query, a gate
    np.testing.assert_array_equal(order, heads[:, ::-1].transpose(1, 0, 2))
    gates = np.array(bindings["blk.0.ssm_ba.weight"].row_order)
    np.testing.assert_array_equal(gates, [0, 1, 4, 5, 2, 3, 6, 7])


def test_layers_that_guess_ahead_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_drafting(model: TinyModel) -> dict[str, NDArray[np.float32]]:
        tensors = _random_tensors(model)
        tensors["blk.5.nextn.enorm.weight"] = tensors["blk.1.attn_norm.weight"]
        return tensors

    def add_block_count(writer: GGUFWriter, n_layers: int) -> None:
        writer.add_uint32("qwen35.block_count", n_layers)
        writer.add_uint32("qwen35.nextn_predict_layers", 1)

    monkeypatch.setattr("tools.make_tiny_model._random_tensors", with_drafting)
    monkeypatch.setattr(GGUFWriter, "add_block_count", add_block_count)
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="qwen35", **SHAPE)
    config, bindings = read(path)
    assert config.n_layers == 5
    assert not [item.name for item in bindings if item.name.startswith("blk.5.")]


def test_a_joint_bias_lies_as_its_rows_do(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(architecture="chatglm", is_fused=True, rotary_dim=4, **SHAPE)
    orders = {item.name: item.row_order for item in read(path)[1]}
    n_rotated = len(orders["blk.0.attn_q.weight"]) + len(orders["blk.0.attn_k.weight"])
    order = list(orders["blk.0.attn_qkv.bias"])
    assert order[:8] == [0, 2, 1, 3, 4, 5, 6, 7]
    assert order[n_rotated - 8 : n_rotated] == [n_rotated - 8 + i for i in order[:8]]
    assert order[n_rotated:] == list(range(n_rotated, len(order)))


def test_files_may_say_which_layers_are_rotated(tiny_model: TinyModelFactory) -> None:
    pattern = (True, False) * 3
    config = read_tiny(tiny_model, "granite_swa", rope_pattern=pattern)
    assert tuple(layer.has_rope for layer in config.layers) == pattern
    assert all(layer.has_rope for layer in read_tiny(tiny_model, "granite_swa").layers)
    for architecture, n_layers, problem in (
        ("granite_swa", 5, "has 6 items, but must have 5"),
        ("granite", 6, "is not supported for this architecture"),
    ):
        with pytest.raises(
            FormatError, match=rf"{architecture}\.attention\.rope_pattern'.*{problem}"
        ):
            read_tiny(tiny_model, architecture, n_layers=n_layers, rope_pattern=pattern)


def test_norms_of_heads_may_be_left_out_everywhere(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_tiny(tiny_model, "glm4moe").qk_norm == "head"
    assert read_tiny(tiny_model, "glm4moe", has_qk_norm=False).qk_norm == "none"

    def without_some(model: TinyModel) -> dict[str, NDArray[np.float32]]:
        tensors = _random_tensors(model)
        del tensors["blk.1.attn_k_norm.weight"]
        return tensors

    monkeypatch.setattr("tools.make_tiny_model._random_tensors", without_some)
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="glm4moe", **SHAPE)
    with pytest.raises(FormatError, match=r"missing: blk\.1\.attn_k_norm\.weight"):
        NativeModelFile(path).load()


@pytest.mark.parametrize(
    ("options", "key", "problem"),
    [
        ({}, "ssm.inner_size", "must be ssm.time_step_rank"),
        ({"n_delta_value_heads": 3}, None, "'qwen35.ssm.time_step_rank' is 3, which is not"),
        ({"n_conv_taps": 1}, None, "'qwen35.ssm.conv_kernel'"),
        ({"n_layers": 1}, None, "'qwen35.full_attention_interval' leaves no layer with attention"),
        ({}, "attention.recurrent_layers", "'qwen35.attention.recurrent_layers' is not supported"),
    ],
)
def test_layers_of_qwen35_that_cannot_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, object],
    key: str | None,
    problem: str,
) -> None:
    def add_inner_size(writer: GGUFWriter, size: int) -> None:
        writer.add_uint32("qwen35.ssm.inner_size", size + (key == "ssm.inner_size"))
        if key == "attention.recurrent_layers":
            writer.add_array(f"qwen35.{key}", [True] * 6)

    monkeypatch.setattr(GGUFWriter, "add_ssm_inner_size", add_inner_size)
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="qwen35", **{**SHAPE, **options})
    with pytest.raises(FormatError, match=problem):
        read(path)


def test_tensors_of_another_kind_of_layer_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_heads(model: TinyModel) -> dict[str, NDArray[np.float32]]:
        tensors = _random_tensors(model)
        tensors["blk.0.attn_q.weight"] = tensors["blk.1.attn_q.weight"]
        return tensors

    monkeypatch.setattr("tools.make_tiny_model._random_tensors", with_heads)
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="lfm2", **SHAPE)
    with pytest.raises(FormatError, match=r"does not use: 'blk.0.attn_q.weight'"):
        read(path)


def test_scales_that_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = replace(FAMILIES["minicpm"], keys={"logit_scale": 2.0, "residual_scale": 0.5})
    monkeypatch.setattr("tools.make_tiny_model.FAMILIES", {"minicpm": family})
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="minicpm", **SHAPE)
    with pytest.raises(FormatError, match=r"'minicpm.embedding_scale' is missing.*convert"):
        read(path)


def test_longrope_has_two_tables(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "phi3", rope_scaling="longrope", original_context=64)
    assert config.long_rope_after == 64
    assert config.rope_attention_factor == pytest.approx(1.2)
    np.testing.assert_allclose(config.rope_inv_freq[-1], 1e-3 / 1.5, rtol=1e-6)
    np.testing.assert_allclose(config.long_rope_inv_freq[-1], 1e-3 / 8.0, rtol=1e-6)


def test_yarn_interpolates_slow_pairs_only() -> None:
    """128 pairs of base 10,000 over 4,096 positions: turns 32 and 1 are at pairs 20.9 and 45.0."""
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=4096)
    ratio = np.divide(inverse_frequencies(128, 1e4), inverse_frequencies(128, 1e4, scaling))
    np.testing.assert_allclose(ratio[:21], 1.0)
    np.testing.assert_allclose(ratio[46:], 4.0)
    assert np.all(np.diff(ratio[20:47]) > 0)
    assert attention_factor(scaling) == pytest.approx(1 + 0.1 * math.log(4))


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
        ("nanbeige", "num_loops", lambda w: w.add_uint32("nanbeige.num_loops", 2), "is 2"),
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


@pytest.mark.parametrize(
    ("sections", "problem"),
    [(None, "is missing"), ([1, 1, 1, 1], "fourth axis"), ([2, 2], "three numbers")],
)
def test_sections_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: list[int] | None, problem: str
) -> None:
    def add(writer: GGUFWriter, _: list[int]) -> None:
        if sections is not None:
            writer.add_array("qwen3vl.rope.dimension_sections", sections)

    monkeypatch.setattr(GGUFWriter, "add_rope_dimension_sections", add)
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture="qwen3vl", **SHAPE)
    with pytest.raises(FormatError, match=f"'qwen3vl.rope.dimension_sections'.*{problem}"):
        read(path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n_experts_used": 7}, "expert_used_count' is 7"),
        ({"n_experts_used": 0}, "expert_used_count' is 0"),
        ({"n_experts": 1200, "model_dim": 4, "n_layers": 1}, "expert_count' is 1200"),
    ],
)
def test_numbers_of_experts_that_cannot_be(
    tmp_path: Path, options: dict[str, int], problem: str
) -> None:
    sizes = {**SHAPE, "architecture": "qwen3moe", **options}
    path = write_tiny_model(tmp_path / "tiny.gguf", **sizes)
    with pytest.raises(FormatError, match=problem):
        read(path)
