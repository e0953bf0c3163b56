"""Files of models that make vectors and write none: what is read, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from edgeh2o.errors import FormatError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.models.spec import find_architecture
from tests.models.tiny_file import SHAPE, read, read_tiny, write_tiny
from tests.tiny_architectures import ENCODERS
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors

HEADS = {"n_kv_heads": 4}


@pytest.mark.parametrize("architecture", ENCODERS)
def test_every_row_of_a_file_is_bound_once(tiny_model: TinyModelFactory, architecture: str) -> None:
    dense_dim = 24 if architecture == "gemma-embedding" else 0
    path = tiny_model(architecture=architecture, dense_dim=dense_dim, **SHAPE)
    config, bindings = read(path)
    assert not config.is_causal and not find_architecture(architecture).is_causal
    names = [binding.name for binding in bindings]
    assert len(set(names)) == len(names)
    with open_gguf(path) as file:
        for name, info in file.tensors.items():
            parts = [binding for binding in bindings if binding.info.name == name]
            rows = sum(part.n_rows for part in parts)
            if name.startswith("dense_"):  # read elsewhere
                assert name in config.dense_modules and not parts
            elif name.endswith("attn_qkv.bias"):
                assert [part.n_rows for part in parts] == [1] * 3
            else:
                assert rows == (1 if name == "token_types.weight" else info.rows)


def test_windows_reach_to_both_sides(tiny_model: TinyModelFactory) -> None:
    """Half of what files say, and a token's own; the layers without one are where they lie."""

    def windows(architecture: str, **options: object) -> list[int]:
        config = read_tiny(tiny_model, architecture, **options)
        return [layer.window for layer in config.layers]

    assert windows("gemma-embedding", sliding_window=512) == [257] * 5 + [0]
    pattern = {"sliding_window": 9, "sliding_window_pattern": 2}
    assert windows("gemma-embedding", **pattern) == [5, 0] * 3
    assert windows("modern-bert", sliding_window=128) == [0, 65, 65, 0, 65, 65]
    assert windows("modern-bert") == windows("bert") == windows("llama-embed") == [0] * 6


def test_what_architectures_have(tiny_model: TinyModelFactory) -> None:
    bert = read_tiny(tiny_model, "bert", context_length=64, **HEADS)
    assert (bert.norm_placement, bert.has_output_norm, bert.has_token_type) == ("sum", False, True)
    assert bert.n_positions == bert.most_positions == 64 and not bert.has_rope
    nomic = read_tiny(tiny_model, "nomic-bert", **HEADS)
    assert nomic.has_rope and nomic.activation == "silu" and nomic.n_positions == 0
    second = read_tiny(tiny_model, "jina-bert-v2", has_two_norms=True, **HEADS)
    assert (second.max_alibi_bias, second.has_rope, second.activation) == (8.0, False, "gelu_tanh")
    assert second.qk_norm == "layer" and second.has_second_norm
    for network, activation in (("joined", "gelu_tanh"), ("plain", "ungated_gelu")):
        found = read_tiny(tiny_model, "jina-bert-v2", network=network, has_qk_norm=False, **HEADS)
        assert (found.activation, found.qk_norm, found.has_second_norm) == (activation, "none", 0)
    assert bert.max_alibi_bias == 0.0
    jina = read_tiny(tiny_model, "jina-bert-v3", **HEADS)
    assert jina.has_rope and jina.activation == "ungated_gelu" and jina.n_positions == 0
    mixture = read_tiny(tiny_model, "nomic-bert-moe", **HEADS)
    assert [layer.is_dense for layer in mixture.layers] == [True, False] * 3
    assert not mixture.normalises_experts and mixture.n_experts_used == 2
    modern = read_tiny(tiny_model, "modern-bert", **HEADS)
    assert [layer.has_mixer_norm for layer in modern.layers] == [False, *[True] * 5]
    for name, activation in (("gelu", "gelu_tanh"), ("swish", "silu"), ("reglu", "relu")):
        found = read_tiny(tiny_model, "modern-bert", hidden_activation=name, **HEADS)
        assert found.activation == activation


def without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def resized(name: str, *shape: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = np.zeros(shape, np.float32)

    return change


@pytest.mark.parametrize(
    ("architecture", "edit", "problem"),
    [
        ("bert", without("position_embd.weight"), "1 tensor .*'position_embd.weight'"),
        ("bert", resized("position_embd.weight", 65, 32), r"has shape \[32, 65\].*\[32, 64\]"),
        ("bert", resized("token_types.weight", 3, 32), r"has shape \[32, 3\].*\[32, 2\]"),
        ("bert", without("token_embd_norm.bias"), "'token_embd_norm.bias'"),
        ("bert", without("blk.2.attn_output_norm.weight"), "'blk.2.attn_output_norm.weight'"),
        ("bert", resized("blk.0.ffn_gate.weight", 16, 32), "does not use: 'blk.0.ffn_gate.weight'"),
        ("jina-bert-v2", without("blk.1.ffn_gate.weight"), "missing: 'blk.1.ffn_gate.weight'"),
        ("jina-bert-v2", without("blk.0.ffn_gate.weight"), "does not use: 'blk.1.ffn_gate.weight'"),
        ("jina-bert-v2", without("blk.2.attn_k_norm.bias"), "missing: 'blk.2.attn_k_norm.bias'"),
        ("jina-bert-v2", without("blk.0.attn_q_norm.bias"), "not use: 'blk.1.attn_q_norm.bias'"),
        ("jina-bert-v2", resized("blk.3.attn_norm_2.weight", 32), "use: 'blk.3.attn_norm_2.weig"),
        ("jina-bert-v2", resized("blk.0.attn_norm_2.weight", 32), "'blk.1.attn_norm_2.weight'"),
        (
            "jina-bert-v2",
            resized("blk.0.ffn_up.weight", 24, 32),
            r"has shape \[32, 24\].*\[32, 16\]",
        ),
        ("jina-bert-v2", resized("blk.0.ffn_gate.bias", 16), "does not use: 'blk.0.ffn_gate.bias'"),
        ("jina-bert-v2", resized("position_embd.weight", 64, 32), "use: 'position_embd.weight'"),
        ("jina-bert-v3", without("blk.1.ffn_up.weight"), "'blk.1.ffn_up.weight'"),
        ("nomic-bert-moe", without("blk.1.ffn_up_exps.weight"), "'blk.1.ffn_up_exps.weight'"),
        (
            "nomic-bert-moe",
            resized("blk.0.ffn_gate_inp.weight", 6, 32),
            "missing: 'blk.0.ffn_up_exps.weight'",
        ),
        ("eurobert", without("output_norm.weight"), "'output_norm.weight'"),
        ("neo-bert", without("enc.output_norm.weight"), "'enc.output_norm.weight'"),
        ("neo-bert", resized("blk.0.ffn_up.weight", 16, 32), r"has shape \[32, 16\].*\[32, 32\]"),
        ("nomic-bert", without("blk.5.layer_output_norm.bias"), "'blk.5.layer_output_norm.bias'"),
        ("modern-bert", without("blk.1.attn_norm.weight"), "'blk.1.attn_norm.weight'"),
        ("modern-bert", without("token_embd_norm.weight"), "'token_embd_norm.weight'"),
        (
            "modern-bert",
            resized("blk.0.ffn_up.weight", 16, 32),
            r"has shape \[32, 16\].*\[32, 32\]",
        ),
        ("gemma-embedding", without("dense_3.weight"), "has 'dense_2.weight', but no 'dense_3"),
        ("gemma-embedding", without("dense_2.weight"), "has 'dense_3.weight', but no 'dense_2"),
        ("gemma-embedding", resized("dense_2.weight", 24, 16), r"has shape \[16, 24\].*\[32, 24\]"),
        ("gemma-embedding", resized("dense_3.weight", 16, 24), r"has shape \[24, 16\].*\[24, 32\]"),
        ("llama-embed", resized("dense_2.weight", 24, 32), "does not use: 'dense_2.weight'"),
    ],
)
def test_other_tensors_are_refused(
    tmp_path: Path, architecture: str, edit: Callable[[Tensors], None], problem: str
) -> None:
    options = {"context_length": 64, **HEADS}
    if architecture == "gemma-embedding":
        options["dense_dim"] = 24
    with pytest.raises(FormatError, match=problem):
        read(write_tiny(tmp_path, architecture, edit=edit, **options))


@pytest.mark.parametrize(
    ("architecture", "add", "problem"),
    [
        ("bert", lambda w: w.add_causal_attention(True), "attention.causal' is true"),
        ("modern-bert", lambda w: w.add_causal_attention(True), "attention.causal' is true"),
        ("bert", lambda w: w.add_token_type_count(0), "token_type_count' is 0"),
        ("nomic-bert", lambda w: w.add_token_type_count(2**17), "token_type_count' is 131072"),
        ("bert", lambda w: w.add_sliding_window(9), "windows are not supported"),
        ("gemma-embedding", lambda w: w.add_sliding_window(0), "attention.sliding_window' is 0"),
        (
            "modern-bert",
            lambda w: w.add_string("modern-bert.hidden_activation", "relu"),
            "hidden_activation' is 'relu', which is not supported; supported: gelu, geglu, silu",
        ),
        (
            "modern-bert",
            lambda w: w.add_uint32("modern-bert.hidden_activation", 1),
            "hidden_activation' is an integer, but must be a string",
        ),
    ],
)
def test_other_keys_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    add: Callable[[GGUFWriter], None],
    problem: str,
) -> None:
    write_header = GGUFWriter.write_header_to_file

    def change(writer: GGUFWriter, *args: object) -> None:
        before = {name: value for name, value in writer.kv_data[0].items()}
        writer.kv_data[0].clear()
        add(writer)
        writer.kv_data[0] = {**before, **writer.kv_data[0]}
        write_header(writer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(GGUFWriter, "write_header_to_file", change)
    path = write_tiny(tmp_path, architecture, **HEADS)
    with pytest.raises(FormatError, match=problem):
        read(path)


def test_a_file_without_a_width_of_its_windows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GGUFWriter, "add_sliding_window", lambda *_: None)
    path = write_tiny(tmp_path, "gemma-embedding")
    with pytest.raises(FormatError, match=r"'gemma-embedding.attention.sliding_window'.*missing"):
        read(path)
