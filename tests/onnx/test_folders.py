"""Where an ONNX model is found, with its tokenizer, and the verbs that take it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, SamplingParams
from edgeh2o.cli.main import main
from edgeh2o.errors import ResourceError, UsageError
from edgeh2o.export.onnx import CONFIG_NAME, DATA_NAME, MODEL_NAME
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import SMALL, copy_folder, edited, set_entry
from tests.onnx.reading import make_tokens, open_llm, read_all
from tests.tiny_models import TinyModelFactory
from tests.transformers.folders import write_folder


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


def test_a_folder_without_its_graph(onnx_model: OnnxModelFactory, tmp_path: Path) -> None:
    folder = copy_folder(onnx_model(**SMALL), tmp_path / "model")
    (folder / MODEL_NAME).unlink()
    with pytest.raises(ResourceError, match=r"model\.onnx cannot be read: .*; fetch that file too"):
        LLM(folder)


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
