"""Copies of a model folder with one thing changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeh2o.export.onnx import CONFIG_NAME, MODEL_NAME

# Options of a model that is written and read in no time.
SMALL: dict[str, object] = {
    "n_layers": 2,
    "model_dim": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 64,
    "context_length": 256,
}

Edit = Callable[[Path], object]


def copy_folder(source: Path, target: Path, edit: Edit | None = None) -> Path:
    """A copy, changed by ``edit``."""
    shutil.copytree(source, target)
    if edit is not None:
        edit(target)
    return target


@contextmanager
def edited(folder: Path) -> Iterator[onnx.ModelProto]:
    """The model of a folder, written back at the end. The weights stay where they are."""
    model = onnx.load(folder / MODEL_NAME, load_external_data=False)
    yield model
    (folder / MODEL_NAME).write_bytes(model.SerializeToString())


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes keys of model.decoder in genai_config.json; None removes one."""
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text())
    decoder = config["model"]["decoder"]
    decoder |= changes
    config["model"]["decoder"] = {key: v for key, v in decoder.items() if v is not None}
    path.write_text(json.dumps(config))


def first_external(model: onnx.ModelProto) -> onnx.TensorProto:
    """The first constant whose data lies in another file."""
    return next(t for t in model.graph.initializer if t.data_location == t.EXTERNAL)


def set_entry(tensor: onnx.TensorProto, key: str, value: str) -> None:
    """Changes an entry of the external data."""
    for entry in tensor.external_data:
        if entry.key == key:
            entry.value = value
            return
    entry = tensor.external_data.add()
    entry.key, entry.value = key, value


def find_node(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    """The first node of an operator."""
    return next(node for node in model.graph.node if node.op_type == op_type)


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    """Sets or replaces an attribute."""
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])


def mix_tokens(model: onnx.ModelProto) -> None:
    """The output of every token gets the sum over all of them."""
    node = find_node(model, "Sigmoid")
    axes = onnx.numpy_helper.from_array(np.array([1]), "mixed_axis")
    model.graph.initializer.append(axes)
    summed = onnx.helper.make_node("ReduceSum", [node.input[0], "mixed_axis"], ["mixed"])
    added = onnx.helper.make_node("Add", [node.input[0], "mixed"], ["mixed_in"])
    place = list(model.graph.node).index(node)
    model.graph.node.insert(place, added)
    model.graph.node.insert(place, summed)
    node.input[0] = "mixed_in"


def change_model(change: Any) -> Edit:
    """An edit of a folder that does ``change`` to the model in it."""

    def edit(folder: Path) -> None:
        with edited(folder) as model:
            change(model)

    return edit
