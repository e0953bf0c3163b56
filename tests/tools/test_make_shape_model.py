"""The writer of models in real shapes: sizes, types of mixtures, sane weights, models that run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from edgeh2o import LLM
from edgeh2o.sampling_config import SamplingParams
from tests.tiny_models import TinyModelFactory
from tools.make_shape_model import main, write_shape_model
from tools.shape_models.shapes import SHAPES
from tools.shape_models.tensors import FILE_TYPES, shape_tensors
from tools.shape_models.values import WEIGHT_STD, random_blocks

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "vocab_size", "n_parameters"),
    [
        ("qwen2.5-0.5b", 151_936, 494_032_768),
        ("llama-3.2-1b", 128_256, 1_235_814_400),
        ("qwen3-1.7b", 151_936, 1_720_574_976),
        ("smollm3-3b", 128_256, 3_075_098_624),
        ("lfm2-1.2b", 65_536, 1_170_340_608),
        ("llama-3.1-8b", 128_256, 8_030_261_248),
        ("olmoe-1b-7b", 50_304, 6_919_161_856),
        ("qwen3-30b-a3b", 151_936, 30_532_122_624),
        ("gpt-oss-20b", 201_088, 20_914_757_184),
        ("embeddinggemma-300m", 262_144, 302_863_104),
        ("nomic-embed-text-1.5", 30_528, 136_731_648),
    ],
)
def test_shapes_have_the_parameters_of_the_published_models(
    name: str, vocab_size: int, n_parameters: int
) -> None:
    tensors = shape_tensors(SHAPES[name], "F16", vocab_size)
    sizes = (np.prod(tensor.shape) for tensor in tensors if tensor.name != "rope_freqs.weight")
    assert sum(sizes) == n_parameters


def test_mixtures_are_those_of_llama_quantize() -> None:
    types = {t.name: t.type_name for t in shape_tensors(SHAPES["llama-3.2-1b"], "Q4_K_M", 512)}
    better = [0, 1, 4, 7, 10, 13, 14, 15]
    for layer in range(16):
        expected = "Q6_K" if layer in better else "Q4_K"
        assert types[f"blk.{layer}.attn_v.weight"] == expected
        assert types[f"blk.{layer}.ffn_down.weight"] == expected
        assert types[f"blk.{layer}.ffn_up.weight"] == types[f"blk.{layer}.attn_k.weight"] == "Q4_K"
    assert types["token_embd.weight"] == "Q6_K" and "output.weight" not in types
    untied = {t.name: t.type_name for t in shape_tensors(SHAPES["llama-3.1-8b"], "Q4_0", 512)}
    assert untied["token_embd.weight"] == "Q4_0" and untied["output.weight"] == "Q6_K"
    assert untied["blk.0.ffn_down.weight"] == "Q4_0"
    narrow = {t.name: t.type_name for t in shape_tensors(SHAPES["qwen2.5-0.5b"], "Q5_K_M", 512)}
    assert narrow["blk.0.attn_q.weight"] == "Q5_1" and narrow["blk.0.attn_v.weight"] == "Q8_0"
    assert narrow["blk.0.ffn_down.weight"] == "Q6_K" and narrow["blk.0.attn_q.bias"] == "F32"
    small = {t.name: t.type_name for t in shape_tensors(SHAPES["llama-3.2-1b"], "Q2_K", 512)}
    assert {small[f"blk.1.{name}.weight"] for name in ("attn_q", "ffn_gate")} == {"Q2_K"}
    assert {small[f"blk.1.{name}.weight"] for name in ("attn_output", "ffn_down")} == {"Q3_K"}


@pytest.mark.parametrize(
    "type_name",
    [
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "MXFP4"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    ],
)
def test_blocks_decode_to_weights_of_the_standard_deviation(type_name: str) -> None:
    type_id = GGMLQuantizationType[type_name]
    block_size, block_bytes = GGML_QUANT_SIZES[type_id]
    n_values = 1 << 18
    blocks = random_blocks(n_values // block_size * block_bytes, type_name, np.random.SFC64(0))
    data = blocks.view(np.float16) if type_name == "F16" else blocks
    values = dequantize(data.reshape(1, -1), type_id).ravel()
    assert values.size == n_values
    assert abs(values.mean()) < 0.02 * WEIGHT_STD
    assert values.std() == pytest.approx(WEIGHT_STD, rel=0.08)
    assert abs(values).max() < 10 * WEIGHT_STD


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_small_models_of_every_type_run(
    tmp_path: Path, tiny_model: TinyModelFactory, file_type: str
) -> None:
    shape = replace(
        SHAPES["llama-3.2-1b"], n_layers=2, model_dim=256, n_heads=4, n_kv_heads=2, ffn_dim=512
    )
    path = write_shape_model(tmp_path / "model.gguf", shape, file_type, tokenizer_from=tiny_model())
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for tensor in shape_tensors(shape, file_type, 320):
        written = tensors.pop(tensor.name)
        assert written.tensor_type.name == tensor.type_name
        assert tuple(reversed(written.shape.tolist())) == tensor.shape
        assert written.n_bytes == tensor.n_bytes
    assert not tensors
    with LLM(path) as llm:
        result = llm.generate("the cat", GREEDY, logprobs=True)
    assert len(result.token_ids) == 4 and np.all(np.isfinite(result.logprobs))


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_file_that_opens(
    tmp_path: Path, tiny_model: TinyModelFactory, name: str
) -> None:
    path = tmp_path / "model.gguf"
    tokenizer = str(tiny_model())
    # One that attends.
    layers = {"lfm2-1.2b": "3", "qwen3.5-2b": "4", "granite-4.0-h-1b": "6"}
    layers |= {"jamba-reasoning-3b": "8", "qwen3.8-flash-next": "4"}
    assert (
        main(
            [
                name,
                "Q4_0",
                str(path),
                "--layers",
                layers.get(name, "1"),
                "--tokenizer-from",
                tokenizer,
            ]
        )
        == 0
    )
    reader, origin = GGUFReader(path), GGUFReader(tokenizer)
    assert reader.get_field("general.architecture").contents() == SHAPES[name].architecture
    for key in origin.fields:
        if key.startswith("tokenizer."):
            assert reader.get_field(key).contents() == origin.get_field(key).contents()
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    assert types["Q4_0"] >= 7
    with LLM(path) as llm:
        if SHAPES[name].encoder is None:
            assert len(llm.generate("the cat", GREEDY).token_ids) == 4
        else:
            assert llm.embed("the cat", "mean").shape == (llm.config.model_dim,)


def test_bad_arguments_are_refused(
    tmp_path: Path, tiny_model: TinyModelFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path, tokenizer = tmp_path / "model.gguf", tiny_model()
    with pytest.raises(ValueError, match="llama-9 is not one of"):
        write_shape_model(path, "llama-9", "Q4_0", tokenizer_from=tokenizer)
    with pytest.raises(ValueError, match="IQ1_S is not one of"):
        write_shape_model(path, "llama-3.2-1b", "IQ1_S", tokenizer_from=tokenizer)
    assert main(["llama-3.2-1b", "Q4_0", str(path), "--layers", "17"]) == 1
    assert "1 to 16" in capsys.readouterr().err
    assert main(["llama-3.2-1b", "Q4_0", str(path), "--tokenizer-from", str(path)]) == 1
    assert "no such file" in capsys.readouterr().err
    assert not path.exists()


def test_a_layer_that_guesses_ahead(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    """It drafts, and the other tensors are those of the file without."""
    small = replace(SHAPES["qwen3.5-2b"], n_layers=4, ffn_dim=256)
    names = [
        [t.name for t in shape_tensors(replace(small, n_drafting_layers=n), "Q4_K_M", 512)]
        for n in (0, 1)
    ]
    assert names[1][: len(names[0])] == names[0]
    assert "blk.4.nextn.eh_proj.weight" in names[1] and "blk.4.attn_k.weight" in names[1]
    path = write_shape_model(
        tmp_path / "draft.gguf", small, "Q4_K_M", tokenizer_from=tiny_model(), has_drafting=True
    )
    with LLM(path, draft="mtp") as llm:
        stats = llm.generate([5, 6, 7], replace(GREEDY, draft_tokens="1")).stats
        assert stats.drafted_tokens > 0
    with pytest.raises(ValueError, match="is for shapes with delta nets"):
        write_shape_model(
            tmp_path / "none.gguf",
            "qwen2.5-0.5b",
            "Q4_0",
            tokenizer_from=tiny_model(),
            has_drafting=True,
        )
