"""What every family of models reads from a file: tensors, biases, norms, scales, experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import ExpertGatingFuncType, GGUFWriter

from edgeh2o.errors import FormatError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.model_config import DecoderConfig
from edgeh2o.models import registered_architectures
from edgeh2o.models.mixed_streams import TABLE_TENSOR
from edgeh2o.models.own_adapters import own_updates
from edgeh2o.models.spec import find_architecture
from edgeh2o.runners.native import NativeModelFile
from tests.models.tiny_file import SHAPE, changed_key, read, read_tiny, write_tiny
from tests.tiny_architectures import ENCODERS, FAMILIES
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors


def test_tiny_models_are_there_for_every_architecture() -> None:
    assert {*FAMILIES, *ENCODERS} == set(registered_architectures())


@pytest.mark.parametrize("architecture", FAMILIES)
def test_biases_of_keys_are_noticed(tiny_model: TinyModelFactory, architecture: str) -> None:
    assert read_tiny(tiny_model, architecture).has_key_bias == (FAMILIES[architecture].qkv_biases)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_row_of_a_file_is_bound_once(tiny_model: TinyModelFactory, architecture: str) -> None:
    # With one norm falcon has it for attention and for networks.
    path = tiny_model(architecture=architecture, has_two_norms=True, **SHAPE)
    config, bindings = read(path)
    names = [binding.name for binding in bindings]
    assert len(set(names)) == len(names)
    left_out = ["rope_freqs.weight", *find_architecture(architecture).unused_tensors]
    if config.ngrams is not None:
        left_out.append(TABLE_TENSOR)
    with open_gguf(path) as file:
        left_out += own_updates(file.tensors)
        for name, info in file.tensors.items():
            if name in left_out:  # read elsewhere, or not
                continue
            parts = [binding for binding in bindings if binding.info.name == name]
            # Rows that are one vector are bound as one.
            n_rows = [part.n_rows * part.info.cols // info.cols for part in parts]
            assert sum(n_rows) == info.rows
            assert sum(part.n_bytes for part in parts) == info.n_bytes
            ends = [part.first_byte + part.n_bytes for part in parts]
            assert [part.first_byte for part in parts] == [0, *ends[:-1]]


def test_norms_of_heads_lie_as_their_rows_do(tiny_model: TinyModelFactory) -> None:
    _, bindings = read(tiny_model(architecture="maincoder", **SHAPE))
    orders = {binding.name: binding.row_order for binding in bindings}
    for name in ("attn_q_norm", "attn_k_norm"):
        assert list(orders[f"blk.0.{name}.weight"] or ()) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_joint_bias_lies_as_its_rows_do(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(architecture="chatglm", is_fused=True, rotary_dim=4, **SHAPE)
    orders = {item.name: item.row_order for item in read(path)[1]}
    n_rotated = len(orders["blk.0.attn_q.weight"]) + len(orders["blk.0.attn_k.weight"])
    order = list(orders["blk.0.attn_qkv.bias"])
    assert order[:8] == [0, 2, 1, 3, 4, 5, 6, 7]
    assert order[n_rotated - 8 : n_rotated] == [n_rotated - 8 + i for i in order[:8]]
    assert order[n_rotated:] == list(range(n_rotated, len(order)))


def test_norms_of_heads_may_be_left_out_everywhere(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    assert read_tiny(tiny_model, "glm4moe").qk_norm == "head"
    assert read_tiny(tiny_model, "glm4moe", has_qk_norm=False).qk_norm == "none"

    def drop_a_norm(tensors: Tensors) -> None:
        del tensors["blk.1.attn_k_norm.weight"]

    path = write_tiny(tmp_path, "glm4moe", edit=drop_a_norm)
    with pytest.raises(FormatError, match=r"missing: blk\.1\.attn_k_norm\.weight"):
        NativeModelFile(path).load()


def test_norms_of_falcon(tiny_model: TinyModelFactory) -> None:
    """The first of two is that of networks, the only one is that of attention too."""
    for has_two_norms, of_attention in ((False, "attn_norm"), (True, "attn_norm_2")):
        path = tiny_model(architecture="falcon", has_two_norms=has_two_norms, **SHAPE)
        sources = {item.name: item.info.name for item in read(path)[1]}
        for kind in ("weight", "bias"):
            assert sources[f"blk.3.attn_norm.{kind}"] == f"blk.3.{of_attention}.{kind}"
            assert sources[f"blk.3.ffn_norm.{kind}"] == f"blk.3.attn_norm.{kind}"


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
    path = write_tiny(tmp_path, "gptneox")
    with pytest.raises(FormatError, match=r"'gptneox\.use_parallel_residual'.* is missing"):
        read(path)


def test_biases_by_distance(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of baichuan the model with 40 layers has them; mpt and jais say how steep they are."""
    of_13b = read_tiny(tiny_model, "baichuan", n_layers=40, n_kv_heads=4)
    assert (of_13b.max_alibi_bias, of_13b.has_rope) == (8.0, False)
    for name in ("baichuan", "xverse"):
        other = read_tiny(tiny_model, name, n_layers=40 if name == "xverse" else 32)
        assert (other.max_alibi_bias, other.has_rope) == (0.0, True)
    for name in ("bloom", "refact", "mpt", "jais"):
        config = read_tiny(tiny_model, name)
        assert (config.max_alibi_bias, config.has_rope, config.n_positions) == (8.0, False, 0)
        assert config.attention_scale == pytest.approx(8 ** (-1 if name == "jais" else -0.5))
    table = read_tiny(tiny_model, "mpt", has_table=True)
    assert (table.max_alibi_bias, table.n_positions) == (0.0, 2048)
    with changed_key(monkeypatch, "mpt.attention.max_alibi_bias", None):
        assert read(write_tiny(tmp_path, "mpt"))[0].max_alibi_bias == 0.0
    with (
        changed_key(monkeypatch, "jais.attention.max_alibi_bias", None),
        pytest.raises(FormatError, match=r"max_alibi_bias' is missing, without which this archi"),
    ):
        read(write_tiny(tmp_path, "jais"))
    for value, problem in (
        (-8.0, "is -8, but must be 0 or above"),
        (float("nan"), "is nan, but must be finite"),
        (1000.0, "is 1000, but must be"),
    ):
        with (
            changed_key(monkeypatch, "mpt.attention.max_alibi_bias", value),
            pytest.raises(FormatError, match=rf"'mpt\.attention\.max_alibi_bias' {problem}"),
        ):
            read(write_tiny(tmp_path, "mpt"))


def test_norms_and_limits_of_mpt(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    """Queries and keys are normed or not; other models have factors of the networks (AWQ)."""
    normed, plain = (read_tiny(tiny_model, "mpt", has_qk_norm=has) for has in (True, False))
    assert (normed.qk_norm, plain.qk_norm) == ("layer", "none")
    assert normed.qkv_limit == pytest.approx(0.9)
    assert read_tiny(tiny_model, "mpt", biases=True).has_joint_bias and not normed.has_joint_bias

    def add_factors(tensors: Tensors) -> None:
        tensors["blk.0.ffn.act.scales"] = np.ones(16, np.float32)

    with pytest.raises(FormatError, match=r"blk\.0\.ffn\.act\.scales"):
        read(write_tiny(tmp_path, "mpt", edit=add_factors))


def test_gates_of_attention(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    gates = {name: read_tiny(tiny_model, name) for name in ("afmoe", "laguna", "spark2_5")}
    assert [config.output_gate for config in gates.values()] == ["per_output", *["per_head"] * 2]
    assert [config.head_gate for config in gates.values()] == ["sigmoid", "softplus", "sigmoid"]

    muse = read_tiny(tiny_model, "muse-glimmer")
    assert (muse.output_gate, muse.head_gate) == ("per_output", "sigmoid")
    assert (muse.norms_embeddings, muse.post_norm_eps) == (True, 1e-8)
    assert (muse.logit_scale, muse.logit_soft_cap) == pytest.approx((0.6, 3.0))

    def widen(tensors: Tensors) -> None:  # as that of the largest Laguna
        tensors["blk.1.attn_gate.weight"] = tensors["blk.1.attn_q.weight"]

    path = write_tiny(tmp_path, "laguna", edit=widen)
    with pytest.raises(FormatError, match=r"'blk\.1\.attn_gate\.weight' has shape \[32, 32\]"):
        read(path)


def test_gains_of_talkie(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    config = read_tiny(tiny_model, "talkie")
    assert config.has_head_gains and config.norms_embeddings and not config.has_norm_weights
    assert (config.qk_norm, config.qk_norm_after_rope) == ("head", True)

    def drop_factors(tensors: Tensors) -> None:
        for layer in range(SHAPE["n_layers"]):
            del tensors[f"blk.{layer}.attn_output.scale"], tensors[f"blk.{layer}.ffn_down.scale"]

    def drop_share(tensors: Tensors) -> None:
        del tensors["blk.1.layer_output_scale.weight"]

    with NativeModelFile(write_tiny(tmp_path, "talkie", edit=drop_factors)) as file:
        assert file.load().dequantize("blk.1.embedding_share.weight").any()
    path = write_tiny(tmp_path, "talkie", edit=drop_share)
    with pytest.raises(FormatError, match=r"missing: 'blk\.1\.layer_output_scale\.weight'"):
        read(path)


def test_experts_of_cohere2moe(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    config = read_tiny(tiny_model, "cohere2moe", sliding_window=5)
    assert [layer.window for layer in config.layers] == [0, 5, 5, 5, 0, 5]
    assert [layer.has_rope for layer in config.layers] == [True] * 4 + [False, True]
    assert config.experts_scale == 0.5
    alone = read_tiny(tiny_model, "cohere2moe", n_shared_experts=0)
    assert (alone.shared_ffn_dim, alone.experts_scale) == (0, 1.0)

    def fuse(tensors: Tensors) -> None:
        for layer in range(1, SHAPE["n_layers"]):
            halves = [tensors.pop(f"blk.{layer}.ffn_{name}_exps.weight") for name in ("gate", "up")]
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(halves, axis=1)

    def drop(tensors: Tensors) -> None:
        del tensors["blk.2.ffn_up_exps.weight"]

    names = {item.name for item in read(tiny_model(architecture="cohere2moe", **SHAPE))[1]}
    assert {item.name for item in read(write_tiny(tmp_path, "cohere2moe", edit=fuse))[1]} == names
    path = write_tiny(tmp_path, "cohere2moe", edit=drop)
    with pytest.raises(FormatError, match=r"missing: blk\.2\.ffn_up_exps\.0\.weight"):
        NativeModelFile(path).load()


def test_layers_of_deci_without_attention(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    config = read_tiny(tiny_model, "deci")
    mixers = [layer.mixer for layer in config.layers]
    assert mixers == ["attention", "none", *["attention"] * 4] and not config.is_recurrent
    assert config.layers[1].n_heads == 0 and config.layers[1].ffn_dim == 16

    path = write_tiny(tmp_path, "deci", n_heads=(4,) * 6, n_kv_heads=(2, 2, 0, 2, 2, 2))
    with pytest.raises(
        FormatError, match=r"'deci\.attention\.head_count_kv' is 0 in layer 2, which"
    ):
        read(path)


def test_limits_of_gates(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_with_key: Callable[..., DecoderConfig],
) -> None:
    limits = [layer.gate_limit for layer in read_tiny(tiny_model, "maple").layers]
    assert limits == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    with pytest.raises(FormatError, match=r"'qwen3moe\.swiglu_clamp_exp' is 7"):
        read_with_key("qwen3moe", lambda w: w.add_float32("qwen3moe.swiglu_clamp_exp", 7.0))
    original = GGUFWriter.add_array

    def add_array(writer: GGUFWriter, key: str, values: list[float]) -> None:
        original(writer, key, [-1.0] * 6 if key == "maple.swiglu_clamp_exp" else values)

    monkeypatch.setattr(GGUFWriter, "add_array", add_array)
    path = write_tiny(tmp_path, "maple")
    with pytest.raises(FormatError, match=r"must hold limits from 0 to 1e\+06"):
        read(path)


def test_qwen_gives_the_widths_of_gate_and_up_together(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(architecture="qwen", **SHAPE)
    with open_gguf(path) as file:
        assert file.metadata.get_int("qwen.feed_forward_length") == 32
    assert {layer.ffn_dim for layer in read(path)[0].layers} == {16}


def test_an_embedding_that_codeshell_leaves_out_is_the_output(tmp_path: Path) -> None:
    def drop_it(tensors: Tensors) -> None:
        del tensors["token_embd.weight"]

    path = write_tiny(tmp_path, "codeshell", edit=drop_it, tied=False)
    with NativeModelFile(path) as file:
        model = file.load()
    embedding, output = (model.dequantize(f"{name}.weight") for name in ("token_embd", "output"))
    assert (embedding == output).all() and embedding.any()


@pytest.mark.parametrize("name", ["output.bias", "output_norm.bias", "blk.0.attn_output.bias"])
def test_phimoe_has_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    original = GGUFWriter.add_tensor

    def add_tensor(writer: GGUFWriter, added: str, *arguments: object, **options: object) -> None:
        if added != name:
            original(writer, added, *arguments, **options)

    monkeypatch.setattr(GGUFWriter, "add_tensor", add_tensor)
    path = write_tiny(tmp_path, "phimoe")
    with pytest.raises(FormatError, match=f"1 tensor of architecture 'phimoe' missing: '{name}'"):
        read(path)


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


def test_scales_that_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = replace(FAMILIES["minicpm"], keys={"logit_scale": 2.0, "residual_scale": 0.5})
    monkeypatch.setattr("tools.tiny_models.model.FAMILIES", {"minicpm": family})
    path = write_tiny(tmp_path, "minicpm")
    with pytest.raises(FormatError, match=r"'minicpm.embedding_scale' is missing.*convert"):
        read(path)


def test_limits_of_olmo(
    tiny_model: TinyModelFactory, read_with_key: Callable[..., DecoderConfig]
) -> None:
    assert read_tiny(tiny_model, "olmo").qkv_limit == pytest.approx(0.9)
    with pytest.raises(FormatError, match=r"'llama\.attention\.clamp_kqv' is 8"):
        read_with_key("llama", lambda writer: writer.add_clamp_kqv(8.0))


def test_experts_and_the_shared_one(tiny_model: TinyModelFactory) -> None:
    qwen2moe = read_tiny(tiny_model, "qwen2moe", shared_ffn_dim=24)
    assert (qwen2moe.shared_ffn_dim, qwen2moe.has_shared_gate) == (24, True)
    assert not qwen2moe.normalises_experts
    granitemoe = read_tiny(tiny_model, "granitemoe", shared_ffn_dim=24)
    assert (granitemoe.shared_ffn_dim, granitemoe.has_shared_gate) == (24, False)
    assert granitemoe.normalises_experts
    assert read_tiny(tiny_model, "granitemoe").shared_ffn_dim == 0
    assert {layer.ffn_dim for layer in read_tiny(tiny_model, "olmoe").layers} == {16}


def test_phimoe_weights_experts_by_a_softmax(read_with_key: Callable[..., DecoderConfig]) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)

    with pytest.raises(FormatError, match=r"'phimoe\.expert_gating_func' is 2"):
        read_with_key("phimoe", add)


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
    path = write_tiny(tmp_path, "qwen3moe", **options)
    with pytest.raises(FormatError, match=problem):
        read(path)
