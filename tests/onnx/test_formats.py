"""Number formats, folder layouts, the export and the packages that ONNX models need."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeh2o import LLM, SamplingParams
from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError, ResourceError, UsageError
from edgeh2o.export.decoder import DecoderExporter
from edgeh2o.export.onnx import CONFIG_NAME, DATA_NAME, MODEL_NAME, export_model
from edgeh2o.onnx import packages, segment_sessions
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import SMALL, copy_folder, edited, mix_tokens, set_entry
from tests.onnx.reading import RUNTIME, Uncut, make_tokens, open_llm, read_all
from tests.tiny_models import TinyModelFactory
from tests.transformers.folders import write_folder


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q8_0"])
def test_matmul_n_bits(onnx_model: OnnxModelFactory, tensor_type: str) -> None:
    """Rounding of activations to 8 bits turns differences of 1e-6 into steps, now and then."""
    folder = onnx_model(tensor_type=tensor_type)
    model = onnx.load(folder / MODEL_NAME, load_external_data=False)
    assert {n.op_type for n in model.graph.node} >= {"MatMulNBits"}
    assert not any(n.op_type in ("MatMul", "FusedMatMul") for n in model.graph.node)
    tokens = make_tokens(100)
    with open_llm(folder) as llm:
        found = read_all(llm, tokens, 90)
    expected = Uncut(folder / MODEL_NAME).read(tokens)
    assert np.abs(found - expected).max() < 0.1 * expected.std()
    assert np.abs(found - expected).mean() < 0.02 * expected.std()
    np.testing.assert_allclose(found[0], expected[0], atol=1e-4)


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q8_0", "Q4_1", "F16"])
def test_the_export_keeps_the_weights(
    onnx_model: OnnxModelFactory, tiny_model: TinyModelFactory, tensor_type: str
) -> None:
    """What differs is the rounding of activations, which float32 matrices do not do."""
    tokens = make_tokens(60)
    rows = []
    for path in (onnx_model(tensor_type=tensor_type), tiny_model(tensor_type=tensor_type)):
        with open_llm(path) as llm:
            rows.append(read_all(llm, tokens, 50))
    assert np.abs(rows[0] - rows[1]).mean() < 0.03 * rows[1].std()
    assert np.abs(rows[0] - rows[1]).max() < 0.2 * rows[1].std()


def test_blocks_are_exact(tiny_model: TinyModelFactory) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    from edgeh2o.formats.split import open_model_file
    from edgeh2o.onnx.blocks import pack_blocks

    for name in ("Q4_0", "Q8_0"):
        with open_model_file(tiny_model(tensor_type=name)) as gguf:
            info = gguf.tensors["blk.0.ffn_up.weight"]
            data = gguf.tensor_bytes(info)
        packed = pack_blocks(data, name, info.rows)
        assert packed is not None
        quants = packed.quants.astype(np.float32)
        if packed.bits == 4:
            quants = np.stack([packed.quants & 15, packed.quants >> 4], -1).astype(np.float32)
            quants = quants.reshape(*packed.quants.shape[:2], -1)
        values = (quants - 2 ** (packed.bits - 1)) * packed.scales[..., None]
        raw = np.frombuffer(data, np.uint8).reshape(info.rows, -1)
        expected = dequantize(raw, GGMLQuantizationType[name])
        np.testing.assert_array_equal(values.reshape(info.rows, -1), expected)


def quantize_dynamically(plain: onnx.ModelProto, folder: Path) -> Path:
    """Writes a model with int8 weights, as optimum does, and returns its path."""
    if RUNTIME < (1, 24):
        pytest.importorskip("sympy", reason="this onnxruntime quantises with its help")
    from onnxruntime.quantization import QuantType, quantize_dynamic

    onnx.save(plain, folder.parent / "plain.onnx")
    (folder / "onnx").mkdir()
    target = folder / "onnx" / "model_quantized.onnx"
    quantize_dynamic(
        folder.parent / "plain.onnx",
        target,
        weight_type=QuantType.QInt8,
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    return target


@pytest.fixture
def plain_model(onnx_model: OnnxModelFactory, tmp_path: Path) -> tuple[onnx.ModelProto, Path]:
    """A model with the weights inside, and a folder with the tokenizer."""
    source, folder = onnx_model(), tmp_path / "model"
    folder.mkdir()
    shutil.copy(source / "tokenizer.json", folder)
    return onnx.load(source / MODEL_NAME), folder


def test_dynamic_int8(plain_model: tuple[onnx.ModelProto, Path]) -> None:
    """The export of optimum: activations quantised per call, by one scale for all rows.

    Blocks of rows are other calls, so the bound is that of the rounding: a tenth of a deviation.
    """
    target = quantize_dynamically(*plain_model)
    operators = {n.op_type for n in onnx.load(target).graph.node}
    assert "DynamicQuantizeLinear" in operators and "MatMulInteger" in operators
    tokens = make_tokens(40)
    with open_llm(target.parent.parent) as llm:
        found = read_all(llm, tokens, 40)
    expected = Uncut(target).read(tokens)
    assert np.abs(found - expected).max() < 0.3 * expected.std()
    assert np.abs(found - expected).mean() < 0.05 * expected.std()


def test_tokens_mixed_in_int8_are_refused(plain_model: tuple[onnx.ModelProto, Path]) -> None:
    """The scale that rows share is allowed for, what one token takes from another is not."""
    plain, folder = plain_model
    mix_tokens(plain)
    target = quantize_dynamically(plain, folder)
    with pytest.raises(FormatError, match="depends on other tokens"):
        open_llm(target)


def test_int8_sums_are_exact() -> None:
    """Signed weights too, on machines whose fast products of 8-bit numbers saturate."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (3, 64), np.uint8)
    weight = rng.integers(-128, 128, (64, 32), np.int8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "weight"], ["y"])],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", 64])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["n", 32])],
        [numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(),
        segment_sessions.session_options(n_threads=1),
        providers=["CPUExecutionProvider"],
    )
    (found,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(found, x.astype(np.int32) @ weight)


def to_half(model: onnx.ModelProto) -> None:
    """The whole model in float16, logits too."""
    half = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for info in (*model.graph.input, *model.graph.output):
        if info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            info.type.tensor_type.elem_type = half


def test_half_precision(onnx_model: OnnxModelFactory, tmp_path: Path) -> None:
    folder = copy_folder(onnx_model(), tmp_path / "model")
    model = onnx.load(folder / MODEL_NAME)
    to_half(model)
    (folder / DATA_NAME).unlink()
    onnx.save(model, folder / MODEL_NAME)
    tokens = make_tokens(60)
    with open_llm(folder) as llm, open_llm(onnx_model()) as full:
        found, exact = read_all(llm, tokens, 50), read_all(full, tokens, 50)
    expected = Uncut(folder / MODEL_NAME).read(tokens)
    error = np.abs(expected - exact).max()  # what half precision costs onnxruntime itself
    assert np.abs(found - expected).max() < 2 * error
    assert found.dtype == np.float32


def test_layout_of_transformers_js(onnx_model: OnnxModelFactory, tmp_path: Path) -> None:
    """config.json and onnx/model.onnx; the file of a folder can be named too."""
    source = onnx_model()
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "max_position_embeddings": 512, "vocab_size": 320})
    )
    for name in (MODEL_NAME, DATA_NAME):
        shutil.copy(source / name, folder / "onnx")
    tokens = make_tokens(20)
    logits = []
    for path in (source, folder, folder / "onnx", folder / "onnx" / MODEL_NAME):
        with open_llm(path) as llm:
            logits.append(read_all(llm, tokens, 20))
            if path != source:
                assert (llm.config.architecture, llm.config.context_length) == ("llama", 512)
    for found in logits[1:]:
        np.testing.assert_array_equal(found, logits[0])


def test_a_folder_with_safetensors_and_exports(
    onnx_model: OnnxModelFactory, tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    """The safetensors are run; the export by the path of its folder or file."""
    folder = write_folder(tiny_model(), tmp_path / "model")
    with LLM(folder) as llm:
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2)).stats.device == "cpu"
        alone = type(llm.config)
    (folder / "onnx").mkdir()
    for name in (MODEL_NAME, DATA_NAME):
        shutil.copy(onnx_model() / name, folder / "onnx")
    with LLM(folder) as llm:
        assert type(llm.config) is alone
    for path in (folder / "onnx", folder / "onnx" / MODEL_NAME):
        with open_llm(path) as llm:
            assert type(llm.config) is not alone


def test_decoder_without_a_past(onnx_model: OnnxModelFactory, tmp_path: Path) -> None:
    """decoder_model.onnx: no past goes in; the sizes of the cache come from the configuration."""
    folder = copy_folder(onnx_model(), tmp_path / "model")
    with edited(folder) as model:
        for node in model.graph.node:
            if node.op_type == "GroupQueryAttention":
                node.input[3] = node.input[4] = ""
        kept = [info for info in model.graph.input if not info.name.startswith("past")]
        del model.graph.input[:]
        model.graph.input.extend(kept)
    tokens = make_tokens(40)
    with open_llm(folder) as llm, open_llm(onnx_model()) as original:
        found, expected = read_all(llm, tokens, 30), read_all(original, tokens, 30)
    np.testing.assert_array_equal(found, expected)


def test_folder_of_several_models(onnx_model: OnnxModelFactory, tmp_path: Path) -> None:
    folder = copy_folder(onnx_model(**SMALL), tmp_path / "model")
    (folder / CONFIG_NAME).unlink()
    shutil.copy(folder / MODEL_NAME, folder / "model_q4.onnx")
    LLM(folder).close()  # model.onnx is meant
    (folder / MODEL_NAME).rename(folder / "model_fp16.onnx")
    with pytest.raises(UsageError, match=r"several models \(model_fp16.onnx, model_q4.onnx\)"):
        LLM(folder)
    LLM(folder / "model_q4.onnx").close()


def test_weights_in_several_files(onnx_model: OnnxModelFactory, tmp_path: Path) -> None:
    folder = copy_folder(onnx_model(**SMALL), tmp_path / "model")
    (folder / "more").mkdir()
    shutil.copy(folder / DATA_NAME, folder / "more" / "second.data")
    with edited(folder) as model:
        external = [t for t in model.graph.initializer if t.data_location == t.EXTERNAL]
        for tensor in external[1::2]:
            set_entry(tensor, "location", "more/second.data")
    tokens = make_tokens(20)
    with open_llm(folder) as llm, open_llm(onnx_model(**SMALL)) as original:
        np.testing.assert_array_equal(*(read_all(each, tokens, 15) for each in (llm, original)))


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="holds no model"):
        LLM(tmp_path)


def test_tokenizer_gives_the_same_ids(
    onnx_model: OnnxModelFactory, tiny_model: TinyModelFactory
) -> None:
    texts = [
        "the cat and the hat",
        "<|im_start|>user\nis it?<|im_end|>\n",
        "  blanks \t and \n\n lines 1234 \u00e9\u4e2d\U0001f600",
        "",
    ]
    with open_llm(onnx_model(**SMALL)) as ours, open_llm(tiny_model(**SMALL)) as native:
        for text in texts:
            for parse_special in (False, True):
                ids = ours.tokenize(text, parse_special=parse_special)
                assert ids == native.tokenize(text, parse_special=parse_special)
                assert ours.detokenize(ids) == native.detokenize(ids)
        messages = [{"role": "user", "content": "a <|im_end|> b"}]
        assert ours.chat_template.encode(messages) == native.chat_template.encode(messages)


def test_run_from_the_command_line(
    onnx_model: OnnxModelFactory, tiny_model: TinyModelFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for path in (onnx_model(), tiny_model()):
        arguments = ["run", str(path), "-p", "of the and", "-n", "12", "--temp", "0", "--json"]
        assert main([*arguments, "--cache-type", "f32", "--ignore-eos"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["attention"] == answers[1]["attention"]


def test_other_verbs(onnx_model: OnnxModelFactory, tmp_path: Path) -> None:
    folder = str(onnx_model())
    text = tmp_path / "text.txt"
    text.write_text("the heart of the matter is that it was all in the end for the best " * 20)
    options = ["-ub", "32", "-b", "64", "--attention", "h2o", "--h2o-local", "8"]
    options += ["--h2o-heavy", "8", "--quiet"]
    assert main(["perplexity", folder, "-f", str(text), "--ctx-size", "128", *options]) == 0
    assert main(["bench", folder, "-p", "64", "-n", "4", "-r", "1", *options]) == 0
    assert main(["inspect", folder, "--json"]) == 0


def test_export_from_the_command_line(
    tiny_model: TinyModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "exported"
    arguments = ["export-onnx", str(tiny_model(**SMALL, tensor_type="Q4_0")), str(folder)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert main(["run", str(folder), "-p", "the", "-n", "2", "--temp", "0", "--quiet"]) == 0
    capsys.readouterr()
    assert main(arguments) == 2
    assert "is not empty" in capsys.readouterr().err


def test_the_budget_table_of_the_weights_is_found(
    onnx_model: OnnxModelFactory, tiny_model: TinyModelFactory
) -> None:
    with open_llm(onnx_model(**SMALL)) as ours, open_llm(tiny_model(**SMALL)) as native:
        assert ours.config.fingerprint == native.config.fingerprint


@pytest.mark.parametrize(
    ("architecture", "what"),
    [
        ("qwen3moe", "a mixture of experts"),
        ("hunyuan-dense", "queries and keys that are normed after the rotary embedding"),
        ("maincoder", "queries and keys that are normed after the rotary embedding"),
        ("mistral3", "queries that grow with their position"),
        ("arcee", "a feed-forward network without a gate"),
        ("apertus", "a feed-forward network without a gate"),
        ("cohere2", "LayerNorm"),
        ("phimoe", "a mixture of experts"),
        ("granite_swa", "attention sinks"),
        ("chatglm", "a joint bias of queries, keys and values"),
    ],
)
def test_what_cannot_be_exported(
    architecture: str,
    what: str,
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = {"granite_swa": {"n_experts": 0}, "chatglm": {"is_fused": True}}.get(architecture, {})
    model = str(tiny_model(architecture=architecture, **more))
    assert main(["export-onnx", model, str(tmp_path / "new" / "folder")]) == 1
    assert f"{what} cannot be written as ONNX" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", MODEL_NAME])
def test_an_onnx_model_is_no_source(
    name: str, onnx_model: OnnxModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(onnx_model(**SMALL) / name)
    assert main(["quantize", model, str(tmp_path / "out.gguf"), "q8_0"]) == 2
    message = capsys.readouterr().err
    assert "an ONNX model cannot be quantised; give a GGUF file or a folder of safetens" in message
    assert main(["export-onnx", model, str(tmp_path / "folder")]) == 2
    assert "is an ONNX model already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class Failing(DecoderExporter):
    """Writes weights, then raises what the test says."""

    error: BaseException

    def emit(self) -> None:
        super().emit()
        raise self.error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), ResourceError),
        (MemoryError(), MemoryError),
    ],
)
def test_an_export_that_fails_leaves_nothing(
    error: BaseException,
    raised: type[BaseException],
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Failing, "error", error, raising=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (empty, tmp_path / "new" / "deep"):
        with pytest.raises(raised):
            export_model(tiny_model(**SMALL), folder, exporter=Failing)
    assert list(tmp_path.iterdir()) == [empty] and list(empty.iterdir()) == []
    export_model(tiny_model(**SMALL), empty)
    names = {path.name for path in empty.iterdir()}
    assert names >= {CONFIG_NAME, DATA_NAME, MODEL_NAME} and not any(n[0] == "." for n in names)


@pytest.mark.parametrize("version", ["1.19.2", "1.22.1"])
def test_old_onnxruntime_is_refused(
    version: str, onnx_model: OnnxModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    folder = onnx_model(**SMALL)
    monkeypatch.setattr(onnxruntime, "__version__", version)
    with pytest.raises(UsageError, match=f"onnxruntime {version} is too old.*1.19.*wrong"):
        LLM(folder)


@pytest.mark.parametrize("version", ["1.23.0", "1.31.1", "2.0.0"])
def test_newer_onnxruntime_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "__version__", version)
    packages.require_runtime()


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_missing_packages_are_named(
    package: str, onnx_model: OnnxModelFactory, tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    """Not installed: the cure is named where one is needed, and nothing else needs it."""
    code = (
        "import sys; sys.modules[sys.argv[1]] = None\n"
        "from edgeh2o.cli.main import main; sys.exit(main(sys.argv[2:]))"
    )

    def run(*arguments: object) -> Any:
        command = [sys.executable, "-c", code, package, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    ran = run("run", onnx_model(**SMALL), "-p", "x", "-n", "1")
    if package == "onnx":  # only what writes models needs it
        assert ran.returncode == 0, ran.stderr
    else:
        assert ran.returncode == 2 and "pip install 'edgeh2o[onnx]'" in ran.stderr
    written = run("export-onnx", tiny_model(**SMALL), tmp_path / "new")
    if package == "onnx":
        assert written.returncode == 2 and "pip install 'edgeh2o[onnx]'" in written.stderr
    else:
        assert written.returncode == 0, written.stderr
    assert run("run", tiny_model(**SMALL), "-p", "x", "-n", "1").returncode == 0
