"""The export: its weights, its budget table, and what it refuses or leaves behind."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from edgeh2o.cli.main import main
from edgeh2o.errors import ResourceError
from edgeh2o.export.decoder import DecoderExporter
from edgeh2o.export.onnx import CONFIG_NAME, DATA_NAME, MODEL_NAME, export_model
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import SMALL
from tests.onnx.reading import make_tokens, open_llm, read_all
from tests.tiny_models import TinyModelFactory


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
        ("hunyuan_vl", "queries and keys that are normed after the rotary embedding"),
        ("maincoder", "queries and keys that are normed after the rotary embedding"),
        ("mistral3", "queries that grow with their position"),
        ("arcee", "a feed-forward network without a gate"),
        ("apertus", "a feed-forward network without a gate"),
        ("cohere2", "LayerNorm"),
        ("spark2_5", "gates of attention"),
        ("nanbeige", "layers that are gone through several times"),
        ("hrm_text", "gates of attention"),
        ("muse-glimmer", "norms of embeddings"),
        ("talkie", "norms of embeddings"),
        ("plamo", "feed-forward networks beside attention"),
        ("qwen", "a joint bias of queries, keys and values"),
        ("phimoe", "a mixture of experts"),
        ("granite_swa", "attention sinks"),
        ("refact", "attention with a bias by distance (ALiBi)"),
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
    options: dict[str, dict[str, object]] = {
        "granite_swa": {"n_experts": 0},
        "chatglm": {"is_fused": True},
        "nanbeige": {"n_loops": 2},
    }
    more = options.get(architecture, {})
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
