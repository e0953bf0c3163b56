"""Settings that lie beside the weights of a model, and come from anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeh2o.errors import FormatError
from edgeh2o.formats.model_folder import read_tokenizer_files
from edgeh2o.formats.safetensors import is_onnx_folder, is_safetensors_folder


@pytest.mark.parametrize(
    ("templates", "taken", "of_tools"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d", "t"),
        ([{"name": "tool_use", "template": "t"}], None, "t"),
        ([{"name": ["default"]}, {}, 5, None], None, None),
        ([], None, None),
        ("d", "d", None),
    ],
)
def test_several_templates_are_told_apart(
    tmp_path: Path, templates: object, taken: str | None, of_tools: str | None
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    files = read_tokenizer_files(tmp_path)
    assert (files["chat_template"], files["tool_template"]) == (taken, of_tools)


def test_the_templates_for_tools_in_their_order(tmp_path: Path) -> None:
    """A list in tokenizer_config.json is older than a file of templates, as transformers has it."""
    templates = [{"name": "tool_use", "template": "of the list"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert read_tokenizer_files(tmp_path)["tool_template"] == "of the list"
    (tmp_path / "chat_template.jinja").write_text("default")
    assert read_tokenizer_files(tmp_path)["tool_template"] is None
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("of tools")
    assert read_tokenizer_files(tmp_path)["tool_template"] == "of tools"


def test_the_files_of_chat_templates_in_their_order(tmp_path: Path) -> None:
    """As transformers has it: files of templates, tokenizer_config.json, then the older file."""
    names = (
        "additional_chat_templates/default.jinja",
        "chat_template.jinja",
        "tokenizer_config.json",
        "chat_template.json",
    )
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("of tools")
    for name in reversed(names):
        assert read_tokenizer_files(tmp_path)["chat_template"] != name
        is_json = name.endswith(".json")
        (tmp_path / name).write_text(json.dumps({"chat_template": name}) if is_json else name)
        assert read_tokenizer_files(tmp_path)["chat_template"] == name


@pytest.mark.parametrize("text", ["{", "[]", '"{{ messages }}"'])
def test_a_malformed_file_of_a_template_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "chat_template.json").write_text(text)
    with pytest.raises(FormatError, match=r"chat_template\.json (is not valid|holds no) JSON"):
        read_tokenizer_files(tmp_path)


def test_safetensors_are_the_model_of_a_folder_that_has_exports_too(tmp_path: Path) -> None:
    """As published: the weights, and files of onnxruntime in a folder of their own or beside."""
    (tmp_path / "onnx").mkdir()
    assert (is_safetensors_folder(tmp_path), is_onnx_folder(tmp_path)) == (False, True)
    (tmp_path / "model.onnx").touch()
    assert (is_safetensors_folder(tmp_path), is_onnx_folder(tmp_path)) == (False, True)
    (tmp_path / "model.safetensors").touch()
    assert (is_safetensors_folder(tmp_path), is_onnx_folder(tmp_path)) == (True, False)
    (tmp_path / "onnx" / "model.onnx").touch()
    assert (is_safetensors_folder(tmp_path / "onnx"), is_onnx_folder(tmp_path / "onnx")) == (
        False,
        True,
    )
    (tmp_path / "genai_config.json").touch()
    assert (is_safetensors_folder(tmp_path), is_onnx_folder(tmp_path)) == (False, True)
