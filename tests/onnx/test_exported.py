"""What the exporters of other projects write: it runs as in onnxruntime, or is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16

from edgeh2o import LLM
from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError
from edgeh2o.onnx.cut import attention_of
from tests.onnx.editing import set_attribute
from tests.onnx.exported import N_TOKENS, WINDOW, read_tokens, unpack
from tests.onnx.reading import RUNTIME, Uncut, open_llm, read_all

# Windows, and the most that a logit may differ by, in standard deviations.
RUNS = {
    "builder_gemma2_int4": ([WINDOW, 0], 0.2),
    "builder_gpt_oss_fp32": ([WINDOW, 0], 1e-4),
    "builder_lfm2_fp32": ([0, 0], 1e-4),
    "builder_lfm2_int4": ([0, 0], 0.2),
    "builder_llama_fp16": ([0, 0], 0.03),
    "builder_llama_int8": ([0, 0], 0.2),
    "builder_mistral_fp32": ([WINDOW, WINDOW], 1e-4),  # a window that the graph does not have
    "builder_mistral_int4": ([WINDOW, WINDOW], 0.2),
    "dynamo_llama_23": ([0, 0], 1e-4),
    "dynamo_gemma2_18": ([WINDOW, 0], 1e-4),
    "optimum_qwen2_14": ([0, 0], 1e-4),
    "optimum_mistral_18": ([WINDOW, WINDOW], 1e-4),
}
# Its tied embedding does not fit its operator: onnxruntime-genai refuses it too.
REFUSED = {"builder_llama_int4_tied": r"GatherBlockQuantized\).*shared_embeddings=false"}
pytestmark = pytest.mark.skipif(RUNTIME < (1, 24), reason="the files are for newer runtimes")


@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    """The prompt in pieces, then token by token, gives the logits of the prompt as a whole."""
    windows, bound = RUNS[name]
    folder, expected = unpack(name, tmp_path / name)
    assert main(["inspect", str(folder), "--json"]) == 0
    with open_llm(folder) as llm:
        sites = attention_of(llm.model.decoder.sites)  # type: ignore[attr-defined]
        assert [site.window for site in sites] == windows
        found = read_all(llm, read_tokens(), N_TOKENS - 12)
    assert np.abs(found - expected).max() < bound * expected.std()


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By ``inspect`` as by ``run``, in the same line with the path once."""
    folder, _ = unpack(name, tmp_path / name)
    messages = set()
    for verb, *flags in (["inspect"], ["run", "-p", "x"]):
        assert main([verb, str(folder), *flags]) == 1
        message = capsys.readouterr().err
        assert re.search(REFUSED[name], message)
        assert not re.search(r"newer|edgeh2o/\d|ONNXRuntimeError", message)
        assert len(message.splitlines()) == 1 and message.count(str(folder)) == 1
        messages.add(message)
    assert len(messages) == 1


def test_what_onnxruntime_refuses_is_told_in_whole_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same sentence by ``inspect`` and ``run``, without names that only we know."""
    folder, _ = unpack("builder_llama_fp16", tmp_path / "model")
    model = onnx.load(folder / "model.onnx")
    node = next(node for node in model.graph.node if "layers.1/attn/q_proj" in node.name)
    source = node.input[0]
    words = " ".join(f"word{i}" for i in range(200))
    odd = onnx.helper.make_node(words, [source], ["odd"], domain="x")
    model.graph.node.insert(list(model.graph.node).index(node), odd)
    model.opset_import.append(onnx.helper.make_opsetid("x", 1))
    node.input[0] = "odd"
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    messages = []
    for verb, *flags in (["inspect"], ["run", "-p", "x"]):
        assert main([verb, str(folder), *flags]) == 1
        messages.append(capsys.readouterr().err)
    assert "onnxruntime refuses the part up to layer 1 of the model" in messages[0]
    assert re.search(r"word\d+ \.\.\.; export", messages[0])
    assert messages[0] == messages[1] and not re.search(r"edgeh2o/\d", messages[0])


def _edit(folder: Path, op_type: str, place: int) -> tuple[onnx.ModelProto, onnx.NodeProto]:
    model = onnx.load(folder / "model.onnx")
    return model, [node for node in model.graph.node if node.op_type == op_type][place]


def _refusal(folder: Path, model: onnx.ModelProto) -> str:
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FormatError) as error:
        LLM(folder)
    return str(error.value)


def test_softmax_over_other_positions_is_refused(tmp_path: Path) -> None:
    """What looks like attention is refused for what it computes."""
    folder, _ = unpack("optimum_qwen2_14", tmp_path / "model")
    model, softmax = _edit(folder, "Softmax", -1)
    set_attribute(softmax, "axis", 1)
    assert "made of several nodes" in _refusal(folder, model)


def test_a_mask_that_hides_nothing_is_refused(tmp_path: Path) -> None:
    folder, _ = unpack("dynamo_llama_23", tmp_path / "model")
    model, attention = _edit(folder, "Attention", 1)
    attention.input[3] = ""
    message = _refusal(folder, model)
    assert "does not give what attention gives" in message and "model builder" in message


def test_values_that_are_scaled_are_refused(tmp_path: Path) -> None:
    folder, _ = unpack("builder_llama_fp16", tmp_path / "model")
    model, attention = _edit(folder, "MultiHeadAttention", 0)
    doubled = onnx.helper.make_node("Add", [attention.input[2]] * 2, ["doubled"])
    model.graph.node.insert(list(model.graph.node).index(attention), doubled)
    attention.input[2] = "doubled"
    assert "made of" in _refusal(folder, model) or "outside of a known" in _refusal(folder, model)


def test_its_own_masks_bound_the_context(tmp_path: Path) -> None:
    folder, _ = unpack("dynamo_llama_23", tmp_path / "model")
    with open_llm(folder) as llm:
        assert llm.config.context_length == 256
        assert all(site.is_composed for site in llm.model.decoder.sites)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kinds", [["MatMul"], ["MatMul", "Gather"]])
@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_int8_of_an_export_of_several_nodes(
    tmp_path: Path, kinds: list[str], signed: bool
) -> None:
    """As ``optimum-cli onnxruntime quantize`` makes it of what optimum exports.

    Activations of all tokens of a call share a scale, so that the oracle reads the same calls.
    """
    folder, _ = unpack("optimum_qwen2_14", tmp_path / "model")
    plain, path = folder / "plain", folder / "model.onnx"
    path.rename(plain)
    weight_type = QuantType.QInt8 if signed else QuantType.QUInt8
    quantize_dynamic(plain, path, op_types_to_quantize=kinds, weight_type=weight_type)
    found_kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert "MatMulInteger" in found_kinds and ("DequantizeLinear" in found_kinds) == (
        "Gather" in kinds
    )
    tokens, n_prompt = read_tokens(), N_TOKENS - 12
    with open_llm(folder) as llm:
        found = read_all(llm, tokens, n_prompt)
    whole = Uncut(path)
    calls = [tokens[:n_prompt], *tokens[n_prompt:, None]]
    expected = np.concatenate([whole.read(call) for call in calls])
    assert np.abs(found - expected).max() < 0.2 * expected.std()


@pytest.mark.parametrize("keeps_types", [True, False])
@pytest.mark.parametrize("name", [name for name in RUNS if "fp32" in name or "llama_23" in name])
def test_what_is_converted_to_float16_runs(name: str, keeps_types: bool, tmp_path: Path) -> None:
    """With float32 at the border of the graph (keep_io_types) too, where caches were refused."""
    if name == "builder_gpt_oss_fp32":
        pytest.skip("its experts are not converted")
    folder, expected = unpack(name, tmp_path / name)
    (path,) = folder.rglob("*.onnx")
    converted = convert_float_to_float16(onnx.load(path), keep_io_types=keeps_types)
    for data in folder.rglob("*.data"):
        data.unlink()
    onnx.save(converted, path)
    with open_llm(folder) as llm:
        found = read_all(llm, read_tokens(), N_TOKENS - 12)
    assert np.abs(found - expected).max() < 0.03 * expected.std()


def _optimise(path: Path, level: GraphOptimizationLevel) -> set[str]:
    """Writes the file as onnxruntime optimises it; returns the operators it then has."""
    options = SessionOptions()
    options.graph_optimization_level = level
    written = path.with_suffix(".optimised")
    options.optimized_model_filepath = str(written)
    options.log_severity_level = 3  # it warns that the file is for this machine
    InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    written.rename(path)
    return {node.op_type for node in onnx.load(path).graph.node}


BASIC = GraphOptimizationLevel.ORT_ENABLE_BASIC
EXTENDED = GraphOptimizationLevel.ORT_ENABLE_EXTENDED
# Products with queries are fused with their scale, by which keys were not found; gates of
# convolutions are multiplied before channels and tokens are exchanged; attention in float16 has its
# queries in float32.
OPTIMISED = [
    ("optimum_qwen2_14", EXTENDED, {"FusedMatMul", "Softmax"}, 1e-4),
    ("dynamo_gemma2_18", EXTENDED, {"FusedMatMul", "Softmax"}, 1e-4),
    ("builder_lfm2_fp32", BASIC, {"CausalConvWithState", "Transpose"}, 1e-4),
    ("builder_lfm2_fp32", EXTENDED, {"CausalConvWithState", "FusedMatMul"}, 1e-4),
    ("builder_lfm2_int4", EXTENDED, {"CausalConvWithState", "MatMulNBits"}, 0.2),
    ("builder_llama_fp16", EXTENDED, {"Cast", "MultiHeadAttention"}, 0.03),
]


@pytest.mark.parametrize(("name", "level", "operators", "bound"), OPTIMISED)
def test_what_onnxruntime_has_optimised_runs(
    name: str, level: GraphOptimizationLevel, operators: set[str], bound: float, tmp_path: Path
) -> None:
    folder, expected = unpack(name, tmp_path / name)
    (path,) = folder.rglob("*.onnx")
    assert _optimise(path, level) >= operators
    with open_llm(folder) as llm:
        found = read_all(llm, read_tokens(), N_TOKENS - 12)
    assert np.abs(found - expected).max() < bound * expected.std()
