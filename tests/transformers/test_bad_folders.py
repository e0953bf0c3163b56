"""Folders of safetensors that are damaged, made to do harm, or not understood."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeh2o import LLM
from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError, ResourceError, UsageError
from edgeh2o.formats.safetensors import open_folder, open_safetensors
from edgeh2o.models.transformers.config import describe_config
from edgeh2o.models.transformers.weights import open_transformers
from tests.tiny_models import TinyModelFactory

from .folders import write_folder
from .safetensors_files import write_raw


def entry(begin: int, end: int, *, dtype: Any = "F32", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


HEADERS: dict[str, tuple[object, int, str]] = {
    "not_json": (b"{nonsense", 0, "not JSON"),
    "nested": (b'{"a":' * 100_000, 0, "not JSON"),
    "a_list": (b"[]", 0, "no safetensors file"),
    "not_utf8": (b'{"\xff": 1}', 0, "not JSON"),
    "twice": (b'{"a": {}, "a": {}}', 0, "appears twice"),
    "dtype": ({"a": entry(0, 4, dtype="F99")}, 4, "dtype 'F99', which is not known"),
    "no_dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4, "dtype 'None'"),
    "no_object": ({"a": 3}, 0, "dtype 'None'"),
    "shape": ({"a": entry(0, 4, shape=[-1])}, 4, "has shape"),
    "true_shape": ({"a": entry(0, 4, shape=[True])}, 4, "has shape"),
    "dims": ({"a": entry(0, 4, shape=[1] * 9)}, 4, "has shape"),
    "huge": ({"a": entry(0, 4, shape=[2**40, 2**40])}, 4, "more values than any file"),
    "size": ({"a": entry(0, 8, shape=[1])}, 8, "takes 4 bytes by its shape"),
    "backwards": ({"a": {**entry(0, 4), "data_offsets": [4, 0]}}, 4, "takes 4 bytes by its shape"),
    "three_offsets": ({"a": {**entry(0, 4), "data_offsets": [0, 4, 8]}}, 4, "has offsets"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "'b' begins at 4 and overlaps"),
    "same": ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "'b' begins at 0 and overlaps"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "'b' begins at 8 and leaves a gap"),
    "short": ({"a": entry(0, 8)}, 4, "incomplete"),
    "long": ({"a": entry(0, 4)}, 8, "longer than its tensors"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_are_refused(tmp_path: Path, case: str) -> None:
    header, n_bytes, problem = HEADERS[case]
    path = tmp_path / "model.safetensors"
    write_raw(path, header, bytes(n_bytes))
    with pytest.raises(FormatError, match=problem) as error:
        open_safetensors(path)
    assert str(path) in str(error.value)


def test_lengths_are_bounded_before_they_are_believed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content, problem in (
        (b"", "is empty|too few"),
        (struct.pack("<Q", 2**63) + b"{}", "header too long"),
        (struct.pack("<Q", 2**26 + 1) + b"{}", "header too long"),
        (struct.pack("<Q", 1000) + b"{}", "is truncated"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
    ):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=problem):
            open_safetensors(path)


def test_a_file_that_becomes_shorter_is_noticed(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    folder = write_folder(tiny_model(), tmp_path / "tiny")
    with open_transformers(folder, "q8_0") as converted:
        os.truncate(folder / "model.safetensors", 5000)
        with pytest.raises(FormatError, match="became shorter"):
            converted.tensor_bytes(converted.tensors["blk.2.ffn_down.weight"])


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 1}, "tensors that a model of type llama does not use"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', not a token id"),
    ],
)
def test_errors_name_the_folder(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    problem: str,
) -> None:
    folder = write_folder(tiny_model(architecture="llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match=problem) as error, LLM("model"):
        pass
    assert str(error.value).startswith(("model: ", "model/"))


def test_parts_must_fit_together(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    def fresh(name: str, *, has_index: bool) -> Path:
        return write_folder(tiny_model(), tmp_path / name, n_files=3, has_index=has_index)

    folder = fresh("missing", has_index=True)
    shards(folder)[1].unlink()
    with pytest.raises(FormatError, match=r"00002-of-00003.safetensors: this file .* is missing"):
        open_folder(folder)
    folder = fresh("missing_part", has_index=False)
    shards(folder)[1].unlink()
    with pytest.raises(FormatError, match="part 2 of 3 of the model is missing"):
        open_folder(folder)
    folder = fresh("outside", has_index=True)
    edit_index(folder, lambda weights: weights.update({"model.norm.weight": "../x.safetensors"}))
    with pytest.raises(FormatError, match="not the name of a safetensors file of the folder"):
        open_folder(folder)
    folder = fresh("other", has_index=True)
    edit_index(folder, lambda weights: weights.update({"more.weight": shards(folder)[0].name}))
    with pytest.raises(FormatError, match=r"'more.weight' is in .* does not have it"):
        open_folder(folder)
    folder = fresh("twice", has_index=False)
    shards(folder)[1].write_bytes(shards(folder)[0].read_bytes())
    with pytest.raises(FormatError, match=r"is in model-00001-of-00003.safetensors too"):
        open_folder(folder)
    folder = fresh("no_file", has_index=True)
    first = shards(folder)[0]
    first.unlink()
    first.mkdir()
    with pytest.raises(FormatError, match=r"is a directory; fetch this file of the model again"):
        open_folder(folder)
    folder = fresh("several", has_index=False)
    shards(folder)[0].rename(folder / "other.safetensors")
    with pytest.raises(UsageError, match="several safetensors files"):
        open_folder(folder)


GOOD: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "vocab_size": 100,
    "rms_norm_eps": 1e-5,
}  # fmt: skip

GEMMA4 = {
    "model_type": "gemma4_text", "hidden_act": "gelu_pytorch_tanh", "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown_key": ({"mixture_of_depths": 2}, "'mixture_of_depths' is not known for this model"),
    "unknown_type": ({"model_type": "mamba"}, "'mamba', which is not supported from safetensors"),
    "phimoe": ({"model_type": "phimoe"}, "'phimoe', which is not supported.*Use a GGUF file"),
    "no_type": ({"model_type": None}, "supported: apertus, arcee, bloom, cohere, cohere2"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "generates text"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"quantised already \('gptq'"),
    "missing": ({"hidden_size": None}, "'hidden_size' is missing"),
    "text": ({"num_hidden_layers": "2"}, "'num_hidden_layers' is '2', but must be a whole number"),
    "layers": ({"num_hidden_layers": 2**30}, "'num_hidden_layers' is 1073741824, more than 512"),
    "head_dim": ({"head_dim": 2**31 - 1}, "'head_dim' is 2147483647, more than 8192"),
    "share": ({"partial_rotary_factor": 1e20}, "'partial_rotary_factor' is 1e\\+20"),
    "ties": ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no', but must be true or"),
    "kinds": ({"architectures": 3}, "'architectures' must be a list"),
    "pattern": (
        {"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh", "sliding_window": 8,
         "_sliding_window_pattern": "LLLG"},
        "'sliding_window_pattern' is 'LLLG', but must be a whole number",
    ),
    "nan": ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan, but must be a number"),
    "activation": ({"hidden_act": "relu"}, "'hidden_act' is 'relu', but the model is only known"),
    "rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'rope_type' is 'dynamic'"),
    "rope_key": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}},
        "config.json, rope_scaling: 'mscale' is not known",
    ),
    "exact_yarn": (
        {"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn", "factor": 2.0,
         "truncate": False}},
        "'truncate' is false, which is not supported",
    ),
    "rope_base": (
        {"rope_theta": -5, "rope_scaling": {"rope_type": "llama3", "factor": 8,
         "low_freq_factor": 1, "high_freq_factor": 4}},
        "'rope_theta' must be above 1",
    ),
    "factors": (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3}},
        "'short_factor' is .* but must be a list of 8 numbers",
    ),
    "windows": (
        {"model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"]},
        "layers with a sliding window are not supported for this model",
    ),
    "layer_types": ({"layer_types": ["linear_attention"] * 2}, "must be a list of 2 times"),
    "use_window": ({"model_type": "qwen2", "use_sliding_window": True}, "only False or None is"),
    "no_rope": ({"model_type": "smollm3", "no_rope_layers": [0, 1]}, "not every fourth layer"),
    "scalar": (
        {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 9,
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "'query_pre_attn_scalar' is 9, but 16 is what",
    ),
    "alibi": ({"model_type": "falcon", "alibi": True}, "'alibi' is True, which is not supported"),
    "one_by_one": ({"model_type": "falcon", "parallel_attn": False}, "'parallel_attn' is False"),
    "biases": ({"model_type": "falcon", "bias": True}, "'bias' is True, which is not supported"),
    "two_norms": (
        {"model_type": "falcon", "num_ln_in_parallel_attn": 2},
        "'num_ln_in_parallel_attn' is 2, .*only 1 or None is",
    ),
    "kv_heads": (
        {"model_type": "falcon", "multi_query": False, "num_kv_heads": 2},
        "'num_key_value_heads' is 2, .*only 4 or None is",
    ),
    "wide": ({"model_type": "falcon", "ff_factor": 8}, "'ff_factor' is 8, .*only 4.0 or None is"),
    "no_width": ({"model_type": "falcon", "ffn_hidden_size": 0}, "'ffn_hidden_size' is 0, but"),
    "neox_biases": ({"model_type": "gpt_neox", "attention_bias": False}, "'attention_bias' is F"),
    "residual": (
        {"model_type": "gpt_neox", "use_parallel_residual": "no"},
        "'use_parallel_residual' is 'no', but must be true or false",
    ),
    "bloom_residual": (
        {"model_type": "bloom", "apply_residual_connection_post_layernorm": True},
        "'apply_residual_connection_post_layernorm' is True, which is not supported",
    ),
    "bloom_width": (
        {"model_type": "bloom", "n_inner": 96},
        "'n_inner' is 96, .*only 256 or None is",
    ),
    "bloom_groups": (
        {"model_type": "bloom", "num_key_value_heads": 2},
        "'num_key_value_heads' is 2, .*only None is",
    ),
    "mpt_biases": ({"model_type": "mpt", "no_bias": False}, "'no_bias' is False, which is not"),
    "mpt_scale": ({"model_type": "mpt", "logit_scale": 0.5}, "'logit_scale' is 0.5, which is not"),
    **{
        f"mpt_{key}": (
            {"model_type": "mpt", "attn_config": {key: value}},
            f"'{key}' {problem}",
        )
        for key, value, problem in (
            ("alibi", False, "is False, which is not supported"),
            ("alibi_bias_max", 16, "is 16, which is not supported"),
            ("qk_ln", True, "is True, which is not supported"),
            ("softmax_scale", 0.5, "is 0.5, which is not supported"),
            ("clip_qkv", "8", "is '8', but must be a number"),
            ("kv_n_heads", 2, "is not known for this model"),
        )
    },
    "erf": ({"model_type": "phi", "hidden_act": "gelu"}, "'hidden_act' is 'gelu', but .* gelu_new"),
    "qk_norms": ({"model_type": "phi", "qk_layernorm": True}, "'qk_layernorm' is True"),
    "limit": ({"model_type": "olmo", "clip_qkv": "8"}, "'clip_qkv' is '8', but must be a number"),
    "eps": ({"model_type": "olmo", "rms_norm_eps": 1e-6}, "'rms_norm_eps' is 1e-06, which is not"),
    "own_heads": (
        {**GEMMA4, "per_layer_config": {"1": {"num_key_value_heads": 2**70}}},
        "a size of more than 32 bits",
    ),
    "own_layers": (
        {**GEMMA4, "layer_types": ["sliding_attention"] * 2, "per_layer_config": {}},
        "'per_layer_config' must be an object of the layers with full attention",
    ),
    "experts": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "norm_topk_prob": False},
        "'norm_topk_prob' is False, which is not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_are_refused_by_name(case: str) -> None:
    changes, problem = CONFIGS[case]
    with pytest.raises(FormatError, match=problem):
        describe_config({**GOOD, **changes}, "tiny")


def test_tensors_are_refused_by_name(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    folder = write_folder(tiny_model(), tmp_path / "tiny")
    write_raw(folder / "more.safetensors", {"model.layers.0.lora.weight": entry(0, 4)}, bytes(4))
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for path, name in zip(shards(folder), names, strict=True):
        path.rename(folder / name)
    with pytest.raises(FormatError, match=r"1 tensors .* does not use: 'model.layers.0.lora"):
        open_transformers(folder, "q8_0")
    write_raw(
        folder / names[1], {"model.layers.0.lora.weight": entry(0, 4, dtype="F8_E4M3")}, bytes(4)
    )
    with pytest.raises(FormatError, match="takes 1 bytes by its shape"):
        open_transformers(folder, "q8_0")


def test_the_command_line_refuses_in_one_line(
    tiny_model: TinyModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tiny_model(), tmp_path / "tiny")
    for arguments, code, problem in (
        (["run", str(folder), "-p", "a", "--quantize", "q3"], 2, "choose one of f32, f16"),
        (["run", str(tiny_model()), "-p", "a", "--quantize", "q8_0"], 2, "is for folders of"),
        (["run", str(folder / "model.safetensors"), "-p", "a"], 1, "give its folder"),
        (["quantize", str(folder), str(tmp_path), "q8_0"], 2, "it is a folder; name a file"),
        (["quantize", str(folder), str(tmp_path / "a.gguf"), "iq1"], 2, "choose one of f32"),
    ):
        assert main(arguments) == code
        error = capsys.readouterr().err
        assert problem in error and error.count("\n") == 1
    (folder / "tokenizer.json").unlink()
    assert main(["run", str(folder), "-p", "a"]) == 1
    assert "there is no tokenizer.json" in capsys.readouterr().err
    (folder / "config.json").unlink()
    with pytest.raises((FormatError, ResourceError), match=r"config\.json"):
        open_transformers(folder, "q8_0")
