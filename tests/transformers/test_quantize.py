"""``edgeh2o quantize``: the file that is written is the model, and what loading a folder gives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from edgeh2o import LLM, SamplingParams, _core
from edgeh2o.config import QUANTISED_TYPES
from edgeh2o.errors import FormatError, ResourceError, UsageError
from edgeh2o.export.gguf import quantize_model
from edgeh2o.export.onnx import export_model
from edgeh2o.formats.gguf_writer import write_gguf
from edgeh2o.formats.split import open_model_file
from edgeh2o.models.written_types import FILE_TYPES, choose_type
from edgeh2o.runners.safetensors import SafetensorsModelFile
from edgeh2o.tokenizer import build_tokenizer
from tests.tiny_models import TinyModelFactory

from .folders import write_folder

PROMPT = "the other way in"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def answer(model: Path, **options: str) -> list[float]:
    with LLM(model, **options) as llm:
        result = llm.generate(PROMPT, GREEDY, logprobs=True)
    return [*map(float, result.token_ids), *result.logprobs]


def test_every_name_has_types_that_can_be_written() -> None:
    assert set(FILE_TYPES) == set(QUANTISED_TYPES)
    for name in QUANTISED_TYPES:
        for tensor in ("blk.0.attn_v.weight", "blk.1.ffn_up.weight", "output.weight"):
            kind = choose_type(tensor, (512, 64), name, n_layers=8, is_tied=False)
            assert kind in _core.written_types()


def test_mixtures_are_those_of_llama_quantize() -> None:
    def kind(name: str, target: str, cols: int = 512) -> str:
        return choose_type(name, (cols, 64), target, n_layers=16, is_tied=True)

    down = [kind(f"blk.{layer}.ffn_down.weight", "q4_k_m") for layer in range(16)]
    assert [layer for layer in range(16) if down[layer] == "Q6_K"] == [0, 1, 4, 7, 10, 13, 14, 15]
    assert kind("token_embd.weight", "q4_0") == "Q6_K" and kind("token_embd.weight", "f16") == "F16"
    assert kind("blk.0.ffn_gate_inp.weight", "q4_0") == kind("blk.0.attn_q.bias", "q4_0") == "F32"
    assert [kind("blk.0.attn_q.weight", t, cols=96) for t in ("q4_k", "q6_k")] == ["Q5_0", "Q8_0"]
    with pytest.raises(FormatError, match="rows of 40 values"):
        kind("blk.0.attn_q.weight", "q4_k", cols=40)


def test_small_matrices_of_gemma3n_stay_as_they_are(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    model = tiny_model(architecture="gemma3n", tensor_type="F16", n_layers=2, n_shared_kv=1)
    out = tmp_path / "out.gguf"
    quantize_model(model, out, "q4_0")
    kinds = {item.name: item.tensor_type.name for item in GGUFReader(out).tensors}
    kept = ("altup_proj", "blk.0.altup_router", "blk.1.laurel_l", "blk.1.laurel_r")
    assert {kinds[f"{name}.weight"] for name in kept} == {"F16"}
    assert kinds["blk.0.altup_predict_coef.weight"] == "F32"
    assert kinds["per_layer_token_embd.weight"] == kinds["blk.0.inp_gate.weight"] == "Q4_0"
    assert answer(out)


def test_a_table_of_positions_stays_as_it_is(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    quantize_model(tiny_model(architecture="gpt2", tensor_type="F16"), out, "q4_0")
    kinds = {item.name: item.tensor_type.name for item in GGUFReader(out).tensors}
    assert kinds["position_embd.weight"] == "F16" and kinds["blk.0.attn_qkv.weight"] == "Q4_0"
    assert answer(out)


@pytest.mark.parametrize("target", ["f32", "q8_0", "q4_k_m"])
def test_a_folder_and_the_file_that_is_written_of_it_answer_alike(
    tiny_model: TinyModelFactory, tmp_path: Path, target: str
) -> None:
    model = tiny_model(architecture="llama", tied=False)
    folder = write_folder(model, tmp_path / "tiny", dtype="F16", n_files=2)
    out = tmp_path / "out.gguf"
    report = quantize_model(folder, out, target)
    assert report["bytes"] == out.stat().st_size
    assert answer(out) == answer(folder, quantize=target)
    with open_model_file(out) as written, open_model_file(model) as original:
        # The vocabulary survived, with the name of its rule.
        for key in ("pre", "model", "tokens", "merges", "eos_token_id", "add_bos_token"):
            key = f"tokenizer.ggml.{key}"
            assert np.array_equal(written.metadata[key], original.metadata[key]), key
        assert written.metadata["tokenizer.chat_template"]


@pytest.mark.parametrize("more", [[40, 41], [40, 41, 42, 43, 44, 45, 46]])
def test_what_ends_an_answer_of_a_folder_ends_one_of_the_file(
    tiny_model: TinyModelFactory, tmp_path: Path, more: list[int]
) -> None:
    """GLM-4 names three tokens; GGUF has single keys for few of them."""
    folder = write_folder(tiny_model(), tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    ends = [config["eos_token_id"], *more]
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    quantize_model(folder, tmp_path / "out.gguf", "q8_0")
    with open_model_file(tmp_path / "out.gguf") as written:
        found = build_tokenizer(written.metadata).eog_ids
    with SafetensorsModelFile(folder) as file:
        assert found == file.tokenizer.eog_ids >= set(ends)


def test_the_gguf_package_reads_what_is_written(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    model, out = tiny_model(architecture="qwen2moe", shared_ffn_dim=256), tmp_path / "out.gguf"
    quantize_model(model, out, "q4_0")
    ours, original = GGUFReader(out), GGUFReader(model)
    for name, field in original.fields.items():
        if not name.startswith("GGUF."):
            assert ours.fields[name].contents() == field.contents(), name
            assert ours.fields[name].types == field.types, name
    shapes = {item.name: list(item.shape) for item in original.tensors}
    assert {item.name: list(item.shape) for item in ours.tensors} == shapes
    kinds = {item.name: item.tensor_type.name for item in ours.tensors}
    assert kinds["blk.0.ffn_up_exps.weight"] == "Q4_0" and kinds["token_embd.weight"] == "Q6_K"
    assert kinds["blk.0.ffn_gate_inp.weight"] == kinds["output_norm.weight"] == "F32"


def test_numbers_of_the_metadata_stay_what_they_are(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    model, out = tmp_path / "model.gguf", tmp_path / "out.gguf"
    numbers = {"x.large": 1e300, "x.small": 0.5, "x.infinite": -math.inf, "x.int": -(2**40)}
    with open_model_file(tiny_model()) as gguf:
        infos = list(gguf.tensors.values())
        write_gguf(
            model, {**gguf.metadata, **numbers}, infos, lambda info: [gguf.tensor_bytes(info)]
        )
    quantize_model(model, out, "q8_0")
    with open_model_file(out) as written:
        assert {name: written.metadata[name] for name in numbers} == numbers


def test_quantised_matrices_are_taken_on_request_only(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    model, out = tiny_model(tensor_type="Q8_0"), tmp_path / "out.gguf"
    with pytest.raises(UsageError, match="is of type Q8_0 already"):
        quantize_model(model, out, "q4_0")
    quantize_model(model, out, "q4_0", allow_requantize=True)
    kept = tmp_path / "same.gguf"
    quantize_model(model, kept, "q8_0")
    assert answer(kept) == answer(model)


def test_a_model_is_not_written_over_itself(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(tiny_model().read_bytes())
    with pytest.raises(UsageError, match="over itself"):
        quantize_model(model, model, "q8_0")


def test_a_file_of_a_model_is_not_written_over(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    folder = write_folder(tiny_model(), tmp_path / "tiny", n_files=2)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for path in before:
        with pytest.raises(UsageError, match="over itself"):
            quantize_model(folder, path, "q8_0")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    for _ in range(2):  # a GGUF file in the folder is none of them
        quantize_model(folder, folder / "out.gguf", "q8_0")


def test_a_disk_that_is_full_leaves_nothing(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"before")

    def fail(data: object, *rest: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_core, "convert_rows", fail)
    with pytest.raises(ResourceError, match="No space left on device; free some space"):
        quantize_model(tiny_model(), out, "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    assert out.read_bytes() == b"before"


def test_weights_that_a_type_cannot_hold_are_refused(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    folder = write_folder(tiny_model(), tmp_path / "tiny")
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    first = 8 + int.from_bytes(data[:8], "little")
    first += header["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0]
    data[first + 1024 : first + 1028] = np.float32(1e6).tobytes()  # 256 weights are a row
    file.write_bytes(data)
    with pytest.raises(
        FormatError, match=r"'model.layers.1.mlp.up_proj.weight' .* in row 1 .* F16"
    ):
        quantize_model(folder, tmp_path / "out.gguf", "f16")
    quantize_model(folder, tmp_path / "out.gguf", "q8_0")


def test_a_folder_is_exported_by_its_file(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    folder = write_folder(tiny_model(architecture="llama", tied=False), tmp_path / "tiny")
    with pytest.raises(UsageError, match="'edgeh2o quantize' and export that"):
        export_model(folder, tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()
