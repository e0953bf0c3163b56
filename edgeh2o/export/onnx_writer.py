"""Writes ONNX graphs: nodes with names of their own, constants into a file beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from .packages import onnx

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import NodeProto, TensorProto, ValueInfoProto

MICROSOFT = "com.microsoft"
# Smaller constants stay in the model file, where shape inference sees them.
MIN_EXTERNAL_BYTES = 1024
# So that a mapped tensor can be used where it lies.
ALIGNMENT = 4096
IR_VERSION = 10


class OnnxWriter:
    """A graph under construction. ``add`` returns the name of the value that a node computes."""

    def __init__(self, data: IO[bytes], data_name: str) -> None:
        self._data = data
        self._data_name = data_name
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}

    def add(
        self,
        operator: str,
        inputs: Sequence[str],
        name: str,
        *,
        domain: str = "",
        outputs: Sequence[str] | None = None,
        **attributes: Any,
    ) -> str:
        """Adds a node. Inputs that are left out are ""; attributes of None too."""
        outputs = outputs or [f"{name}/output_0"]
        given = {key: value for key, value in attributes.items() if value is not None}
        node = onnx.helper.make_node(operator, inputs, outputs, name, domain=domain, **given)
        self.nodes.append(node)
        return outputs[0]

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """Adds a constant; the same name is added once."""
        if name in self.constants:
            return name
        values = np.ascontiguousarray(values)
        if values.nbytes < MIN_EXTERNAL_BYTES:
            self.constants[name] = onnx.numpy_helper.from_array(values, name)
            return name
        self._data.write(b"\0" * (-self._data.tell() % ALIGNMENT))
        tensor = onnx.TensorProto(
            name=name,
            data_type=onnx.helper.np_dtype_to_tensor_dtype(values.dtype),
            dims=values.shape,
            data_location=onnx.TensorProto.EXTERNAL,
        )
        place = {"location": self._data_name, "offset": self._data.tell(), "length": values.nbytes}
        for key, value in place.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)
        self._data.write(values.data)
        self.constants[name] = tensor
        return name

    def numbers(self, name: str, values: Sequence[int] | int) -> str:
        """Adds int64 constants."""
        return self.constant(name, np.array(values, np.int64))

    def save(
        self,
        file: IO[bytes],
        *,
        inputs: Sequence[ValueInfoProto],
        outputs: Sequence[ValueInfoProto],
        opset: int,
        properties: dict[str, str],
    ) -> None:
        """Writes the model file."""
        graph = onnx.helper.make_graph(
            self.nodes, "decoder", inputs, outputs, list(self.constants.values())
        )
        model = onnx.helper.make_model(
            graph,
            opset_imports=[
                onnx.helper.make_opsetid("", opset),
                onnx.helper.make_opsetid(MICROSOFT, 1),
            ],
            ir_version=IR_VERSION,
            producer_name="edgeh2o",
        )
        onnx.helper.set_model_props(model, properties)
        file.write(model.SerializeToString())
