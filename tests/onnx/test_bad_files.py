"""Row 27 of the bad inputs: ONNX files that are damaged, unsafe, or not what we can run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeh2o import LLM
from edgeh2o.cli.main import main
from edgeh2o.errors import EdgeH2OError
from edgeh2o.export.onnx import CONFIG_NAME, DATA_NAME, MODEL_NAME
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import (
    SMALL,
    change_model,
    copy_folder,
    edit_config,
    edited,
    find_node,
    first_external,
    mix_tokens,
    set_attribute,
    set_entry,
)


def truncate(name: str, share: float) -> Any:
    def edit(folder: Path) -> None:
        os.truncate(folder / name, int((folder / name).stat().st_size * share))

    return edit


def place_data(key: str, value: str) -> Any:
    def edit(folder: Path) -> None:
        with edited(folder) as model:
            set_entry(first_external(model), key, value)

    return edit


def leave_folder(folder: Path) -> None:
    (folder / DATA_NAME).rename(folder.parent / "outside.data")
    with edited(folder) as model:
        for tensor in model.graph.initializer:
            if tensor.data_location == tensor.EXTERNAL:
                set_entry(tensor, "location", "../outside.data")


def go_absolute(folder: Path) -> None:
    place_data("location", str((folder / DATA_NAME).resolve()))(folder)


def link_symbolically(folder: Path) -> None:
    data = folder / DATA_NAME
    data.rename(folder.parent / "target.data")
    data.symlink_to("../target.data")


def link_hard(folder: Path) -> None:
    os.link(folder / DATA_NAME, folder.parent / "second.data")


def link_folder(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    (folder / DATA_NAME).rename(folder.parent / "elsewhere" / DATA_NAME)
    (folder / "inner").symlink_to("../elsewhere")
    with edited(folder) as model:
        for tensor in model.graph.initializer:
            if tensor.data_location == tensor.EXTERNAL:
                set_entry(tensor, "location", f"inner/{DATA_NAME}")


def make_pipe(folder: Path) -> None:
    (folder / DATA_NAME).unlink()
    os.mkfifo(folder / DATA_NAME)


def overlap(folder: Path) -> None:
    with edited(folder) as model:
        tensors = [t for t in model.graph.initializer if t.data_location == t.EXTERNAL]
        offset = next(e.value for e in tensors[0].external_data if e.key == "offset")
        set_entry(tensors[1], "offset", str(int(offset) + 64))


def grow(folder: Path) -> None:
    os.truncate(folder / MODEL_NAME, 2**31)  # sparse: takes no room


def close_cycle(model: onnx.ModelProto) -> None:
    find_node(model, "Mul").input[0] = model.graph.node[-3].output[0]


def rename_operator(model: onnx.ModelProto) -> None:
    find_node(model, "Sigmoid").op_type = "Sigmund"


def make_negative(model: onnx.ModelProto) -> None:
    model.graph.initializer[-1].dims[0] = -1


def read_twice(model: onnx.ModelProto) -> None:
    model.graph.node.append(model.graph.node[-1])


def read_nothing(model: onnx.ModelProto) -> None:
    find_node(model, "Mul").input[0] = "nowhere"


def without_outputs(names: list[str]) -> Any:
    """Attention whose outputs are ``names``, with nobody left who reads them."""

    def edit(model: onnx.ModelProto) -> None:
        node = find_node(model, "GroupQueryAttention")
        lost = set(node.output)
        node.output[:] = names
        for other in model.graph.node:
            other.input[:] = ["input_ids" if name in lost else name for name in other.input]
        kept = [info for info in model.graph.output if info.name not in lost]
        del model.graph.output[:]
        model.graph.output.extend(kept)

    return change_model(edit)


def add_bias(model: onnx.ModelProto) -> None:
    node = find_node(model, "GroupQueryAttention")
    node.input.extend(["", "attention_mask"])


def add_input(model: onnx.ModelProto) -> None:
    info = onnx.helper.make_tensor_value_info("pixel_values", 1, ["n", 64])
    model.graph.input.append(info)
    find_node(model, "Add").input[0] = "pixel_values"


def branch(model: onnx.ModelProto) -> None:
    empty = onnx.helper.make_graph([], "branch", [], [])
    model.graph.node.append(
        onnx.helper.make_node(
            "If", ["use_cache_branch"], ["x"], "optimum::if", then_branch=empty, else_branch=empty
        )
    )


def drop_output(model: onnx.ModelProto) -> None:
    del model.graph.output[0]


def read_cache(model: onnx.ModelProto) -> None:
    find_node(model, "Add").input[0] = "past_key_values.1.key"


def read_present(model: onnx.ModelProto) -> None:
    nodes = [node for node in model.graph.node if node.op_type == "Add"]
    nodes[-1].input[0] = "present.0.key"


def attribute(name: str, value: Any) -> Any:
    return change_model(
        lambda model: set_attribute(find_node(model, "GroupQueryAttention"), name, value)
    )


def without_attention(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.op_type = "SparseAttention"


def keep_a_state(model: onnx.ModelProto) -> None:
    node = find_node(model, "Mul")
    node.op_type, node.domain = "LinearAttention", "com.microsoft"


def garble_name(folder: Path) -> None:
    path = folder / MODEL_NAME
    path.write_bytes(path.read_bytes().replace(DATA_NAME.encode(), b"\xff" * len(DATA_NAME), 1))


def take_apart(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.op_type, node.domain = "Softmax", ""


CASES: dict[str, tuple[Any, str]] = {
    "empty file": (truncate(MODEL_NAME, 0), "is empty: .*fetch or copy it again"),
    "truncated at a tenth": (truncate(MODEL_NAME, 0.1), "cut short|no nodes|nothing computes"),
    "truncated at a half": (truncate(MODEL_NAME, 0.5), "cut short"),
    "truncated near the end": (truncate(MODEL_NAME, 0.99), "cut short"),
    "of 2 GiB": (grow, "2 GiB or more"),
    "data outside by ..": (leave_folder, "not the name of a file in the model's folder"),
    "data by an absolute path": (go_absolute, "not the name of a file in the model's folder"),
    "data without a name": (place_data("location", ""), "not the name of a file"),
    "data with NUL in its name": (place_data("location", "a\0b"), "not the name of a file"),
    "data in the folder itself": (place_data("location", "."), "not the name of a file"),
    "data on another drive": (place_data("location", "C:\\x"), "not the name of a file"),
    "data at an address in memory": (
        place_data("location", "*/_ORT_MEM_ADDR_/*"),
        "not the name of a file",
    ),
    "data in a symbolic link": (link_symbolically, "a symbolic link"),
    "data in a hard link": (link_hard, "several names"),
    "data behind a linked folder": (link_folder, "a symbolic link"),
    "data in a pipe": (make_pipe, "not a regular file"),
    "data missing": (lambda folder: (folder / DATA_NAME).unlink(), "fetch that file too"),
    "data short": (truncate(DATA_NAME, 0.5), "the file is incomplete"),
    "data at a negative offset": (place_data("offset", "-4096"), "no number of bytes"),
    "data at an offset past 2^64": (place_data("offset", "9" * 30), "no number of bytes"),
    "data past the end": (place_data("offset", str(2**40)), "the file is incomplete"),
    "data of another length": (place_data("length", "8"), "needs .* bytes by its shape"),
    "data that overlaps": (overlap, "overlap in"),
    "name that is no UTF-8": (garble_name, "not UTF-8"),
    "negative dimension": (change_model(make_negative), "shape"),
    "IR version too new": (
        change_model(lambda model: setattr(model, "ir_version", 99)),
        "onnxruntime refuses",
    ),
    "operator set too new": (
        change_model(lambda model: setattr(model.opset_import[0], "version", 99)),
        "onnxruntime refuses",
    ),
    "no operator set": (
        change_model(lambda model: model.ClearField("opset_import")),
        "which version of the ONNX operators",
    ),
    "unknown operator": (change_model(rename_operator), "onnxruntime refuses.*Sigmund"),
    "unknown attention": (change_model(without_attention), r"com.microsoft.SparseAttention\)"),
    "state beside the cache": (
        change_model(keep_a_state),
        r"com.microsoft.LinearAttention\): this operator keeps a state of its own",
    ),
    "attention of single operators": (change_model(take_apart), r"\(Softmax\) is made of single"),
    "cyclic graph": (change_model(close_cycle), "has a cycle through node"),
    "value computed twice": (change_model(read_twice), "is computed twice"),
    "attention without outputs": (without_outputs([]), "computes nothing"),
    "attention with unnamed outputs": (without_outputs(["", "", ""]), "computes nothing"),
    "attention without its output": (without_outputs(["", "cache"]), "is left out"),
    "shape without inputs": (
        change_model(lambda model: find_node(model, "Shape").ClearField("input")),
        "onnxruntime refuses",
    ),
    "value from nowhere": (change_model(read_nothing), "which nothing computes"),
    "merged decoder": (change_model(branch), "use decoder_with_past_model.onnx"),
    "no logits": (change_model(drop_output), "has no output 'logits'"),
    "further input": (change_model(add_input), "wants the input 'pixel_values'"),
    "cache read by the model": (change_model(read_cache), "read outside of a known attention"),
    "present read by the model": (change_model(read_present), "read by the model itself"),
    "tokens mixed outside of attention": (change_model(mix_tokens), "depends on other tokens"),
    "heads that do not divide": (
        attribute("num_heads", 3),
        "differ in n_heads|cannot share",
    ),
    "no heads": (attribute("num_heads", 0), "which cannot be"),
    "infinite scale": (attribute("scale", float("inf")), "which cannot be"),
    "negative soft cap": (attribute("softcap", -1.0), "which cannot be"),
    "attribute unknown": (attribute("novelty", 1), "'novelty' = 1, which is not supported"),
    "smooth softmax": (attribute("smooth_softmax", 1), "'smooth_softmax' = 1"),
    "not causal": (attribute("causal", 0), "'causal' = 0"),
    "attention bias": (change_model(add_bias), "has an attention bias"),
    "configuration no JSON": (
        lambda folder: (folder / CONFIG_NAME).write_text("{"),
        "not valid JSON",
    ),
    "configuration nested too deep": (
        lambda folder: (folder / CONFIG_NAME).write_text("[" * 100000),
        "not valid JSON",
    ),
    "configuration without a model": (
        lambda folder: (folder / CONFIG_NAME).write_text("{}"),
        "no section 'model'",
    ),
    "model file outside the folder": (
        lambda folder: edit_config(folder, filename="../model.onnx"),
        "not the name of a file in the folder",
    ),
    "model file missing": (
        lambda folder: edit_config(folder, filename="other.onnx"),
        "No such file",
    ),
    "no model file named": (lambda folder: edit_config(folder, filename=None), "names no model"),
    "layers that differ": (
        lambda folder: edit_config(folder, num_hidden_layers=7),
        "says n_layers = 7, the graph has 2",
    ),
    "heads that differ": (
        lambda folder: edit_config(folder, num_key_value_heads=1),
        "says n_kv_heads = 1, the graph has 2",
    ),
    "size no number": (lambda folder: edit_config(folder, head_size="x"), "no size of a model"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
    "tokenizer no JSON": (
        lambda folder: (folder / "tokenizer.json").write_text("<html>"),
        "is not JSON",
    ),
    "tokenizer of another model": (
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}'),
        "cannot be used",
    ),
    "GGUF file": (
        lambda folder: (folder / MODEL_NAME).write_bytes(b"GGUF" + b"\3" * 60),
        "it is a GGUF file",
    ),
    "web page": (
        lambda folder: (folder / MODEL_NAME).write_bytes(b"<!doctype html><html>"),
        "it is a web page",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_is_refused(
    name: str, onnx_model: OnnxModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, message = CASES[name]
    folder = copy_folder(onnx_model(**SMALL), tmp_path / "model", edit)
    with pytest.raises(EdgeH2OError, match=f"(?s){message}") as caught:
        LLM(folder)
    assert len(str(caught.value)) < 1200
    assert main(["run", str(folder), "-p", "x"]) == caught.value.exit_code
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_relative_paths(
    onnx_model: OnnxModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in the working folder: no folder's name must not mean every folder."""
    folder = copy_folder(onnx_model(**SMALL), tmp_path / "model")
    monkeypatch.chdir(folder)
    for path in (".", MODEL_NAME):
        LLM(path).close()
    leave_folder(folder)
    for path in (".", MODEL_NAME):
        with pytest.raises(EdgeH2OError, match="not the name of a file"):
            LLM(path)


def test_infinite_weights_are_found_on_request(
    onnx_model: OnnxModelFactory, tmp_path: Path
) -> None:
    folder = copy_folder(onnx_model(**SMALL), tmp_path / "model")
    with edited(folder) as model:
        offset = next(e for e in first_external(model).external_data if e.key == "offset")
    with (folder / DATA_NAME).open("r+b") as data:
        data.seek(int(offset.value))
        data.write(np.float32(np.inf).tobytes())
    with pytest.raises(EdgeH2OError, match="has a NaN or infinite value"):
        LLM(folder, check_tensors=True)


@pytest.mark.parametrize("dims", [[1, 1], [1, 7]])
def test_declared_sizes_do_not_bind(
    dims: list[int], onnx_model: OnnxModelFactory, tmp_path: Path
) -> None:
    """Files that were exported for one token, or a past of fixed length, read any prompt."""
    folder = copy_folder(onnx_model(**SMALL), tmp_path / "model")
    with edited(folder) as model:
        for info in model.graph.input:
            shape = info.type.tensor_type.shape.dim
            if info.name == "input_ids":
                shape[0].dim_value, shape[1].dim_value = dims
            elif info.name.startswith("past"):
                shape[2].dim_value = 16
    with LLM(folder) as llm, LLM(onnx_model(**SMALL)) as original:
        tokens = np.arange(5, 45, dtype=np.int32)
        rows = [each.start_runner(64).prefill(tokens, is_last=True) for each in (llm, original)]
    np.testing.assert_array_equal(*rows)
