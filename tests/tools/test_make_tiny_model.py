"""The tiny model writer: deterministic, readable, and not degenerate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from tests.reference.codebook_quants import CODEBOOK_TYPES, quantize_codebook
from tests.reference.decoder import ReferenceDecoder
from tests.reference.dense import DenseLayer
from tests.reference.k_quants import quantize_k
from tests.tiny_models import TinyModelFactory
from tests.tokenizer.vocabularies import byte_characters
from tools.make_tiny_model import main, write_tiny_model
from tools.tiny_models.model import TENSOR_TYPES
from tools.tiny_models.tokenizer import CONTROL_TOKENS


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    for type_name in ("F16", "Q4_K"):
        first, again, other = (
            write_tiny_model(tmp_path / name, tensor_type=type_name, seed=seed).read_bytes()
            for name, seed in (("a.gguf", 3), ("b.gguf", 3), ("c.gguf", 4))
        )
        assert first == again
        assert first != other


@pytest.mark.parametrize("type_name", TENSOR_TYPES)
def test_matrices_have_the_type_and_the_values(
    tiny_model: TinyModelFactory, type_name: str
) -> None:
    exact = ReferenceDecoder.from_gguf(tiny_model()).weights
    tensors = GGUFReader(tiny_model(tensor_type=type_name)).tensors
    assert {tensor.name for tensor in tensors} == set(exact)
    # Levels of the weakest format of each width: relative error of normal weights.
    tolerance = {
        **{"F32": 0.0, "F16": 1e-3, "BF16": 5e-3, "Q8_0": 0.01, "Q6_K": 0.03},
        **{"MXFP4": 0.16, "Q2_K": 0.35, "Q3_K": 0.25},
    }.get(type_name, 0.12 if "Q4" in type_name else 0.06)
    for tensor in tensors:
        expected_type = type_name if len(tensor.shape) == 2 else "F32"
        assert tensor.tensor_type.name == expected_type
        values = dequantize(tensor.data, tensor.tensor_type)
        error = np.linalg.norm(values - exact[tensor.name])
        assert error <= tolerance * np.linalg.norm(exact[tensor.name])


def test_vocabulary_is_a_complete_byte_level_bpe(tiny_model: TinyModelFactory) -> None:
    reader = GGUFReader(tiny_model())
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    merges = reader.get_field("tokenizer.ggml.merges").contents()
    assert tokens[:3] == list(CONTROL_TOKENS)
    assert len(tokens) == len(set(tokens)) == 320
    assert set(byte_characters()) <= set(tokens)
    known = set(byte_characters())
    for merge in merges:
        left, right = merge.split(" ")
        assert left in known and right in known, merge
        known.add(left + right)
    assert known <= set(tokens)
    assert len(set(merges)) == len(merges) > 24
    assert reader.get_field("tokenizer.ggml.pre").contents() == "smollm"


def test_logits_depend_on_distant_context(tiny_model: TinyModelFactory) -> None:
    decoder = ReferenceDecoder.from_gguf(tiny_model())
    tokens = np.random.default_rng(0).integers(3, 320, size=64)
    changed = tokens.copy()
    changed[5] = (changed[5] + 7) % 300 + 3
    logits = decoder.start(DenseLayer).prefill(tokens)
    other = decoder.start(DenseLayer).prefill(changed)
    assert np.array_equal(logits[:5], other[:5])
    relative = np.std(logits[-1] - other[-1]) / np.std(logits[-1])
    assert relative > 0.02
    assert 1.0 < np.std(logits) < 4.0


def test_options_reach_the_file(tiny_model: TinyModelFactory) -> None:
    reader = GGUFReader(
        tiny_model(tied=False, biases=True, rotary_dim=16, rope_scaling="llama3", n_layers=1)
    )
    names = {tensor.name for tensor in reader.tensors}
    assert {"output.weight", "rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ffn_down.bias"} <= (
        names
    )
    assert reader.get_field("llama.rope.dimension_count").contents() == 16
    factors = next(t.data for t in reader.tensors if t.name == "rope_freqs.weight")
    assert factors[0] == 1.0 and factors[-1] == 8.0 and np.all(np.diff(factors) >= 0)
    linear = GGUFReader(tiny_model(rope_scaling="linear"))
    assert linear.get_field("llama.rope.scaling.factor").contents() == 4.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_type": "IQ1_S"}, "IQ1_S is not one of"),
        ({"embedding_type": "Q1_0"}, "Q1_0 is not one of"),
        ({"rope_scaling": "ntk"}, "rope_scaling"),
        ({"n_heads": 5}, "multiple of n_kv_heads"),
        ({"vocab_size": 100}, "vocab_size must be at least"),
        ({"tensor_type": "Q4_K", "model_dim": 96}, "multiple of 256"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_tiny_model(tmp_path / "bad.gguf", **options)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cli.gguf"
    assert main([str(path), "--tensor-type", "Q8_0", "--n-layers", "1", "--untied"]) == 0
    expected = write_tiny_model(
        tmp_path / "api.gguf", tensor_type="Q8_0", n_layers=1, tied=False
    ).read_bytes()
    assert path.read_bytes() == expected
    assert main([str(path), "--n-heads", "3"]) == 1
    assert "n_kv_heads" in capsys.readouterr().err
    assert main([str(path), "--n-layers", "2", "--n-heads", "4,2", "--n-kv-heads", "2,1"]) == 0
    sizes = {"n_layers": 2, "n_heads": (4, 2), "n_kv_heads": (2, 1)}
    assert path.read_bytes() == write_tiny_model(tmp_path / "api.gguf", **sizes).read_bytes()
    assert main([str(path), "--n-heads", "4,2"]) == 1
    assert "one for each of 3 layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("type_name", "tolerance"),
    [
        *[("Q4_K", 0.12), ("Q5_K", 0.12), ("Q6_K", 0.12), ("Q3_K", 0.25), ("Q2_K", 0.4)],
        *[("IQ4_NL", 0.12), ("IQ4_XS", 0.15)],
    ],
)
def test_encoders_take_constants_zeros_and_wide_ranges(type_name: str, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    rows = np.zeros((4, 512), np.float32)
    rows[1] = 0.75
    rows[2] = -0.75
    rows[3] = rng.standard_normal(512) * np.logspace(-3, 1, 512)
    encode = quantize_codebook if type_name in CODEBOOK_TYPES else quantize_k
    encoded = encode(rows, type_name)
    decoded = dequantize(encoded, GGMLQuantizationType[type_name])
    assert np.array_equal(decoded[0], rows[0])
    # About one step of the coarsest level, 15 steps per range or as many as the type has.
    largest = np.abs(rows).reshape(4, 2, 256).max(axis=2).repeat(256, axis=1)
    assert np.all(np.abs(decoded - rows) <= tolerance * largest)


def test_encoders_refuse_other_types_and_ragged_rows() -> None:
    with pytest.raises(ValueError, match="Q8_K"):
        quantize_k(np.zeros((1, 256), np.float32), "Q8_K")
    with pytest.raises(ValueError, match="IQ2_S"):
        quantize_codebook(np.zeros((1, 256), np.float32), "IQ2_S")
    with pytest.raises(ValueError, match="multiple of 256"):
        quantize_codebook(np.zeros((1, 288), np.float32), "IQ4_XS")
