"""ONNX files as a graph: opened, checked, sorted. Nothing is computed and no weight is read."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError, ResourceError
from ..formats.foreign_magic import PROBE_BYTES, describe_foreign_file
from ..formats.metadata import quote
from .data import ExternalFiles, OnnxTensor, element_type, map_descriptor, number_bytes
from .encoding import encode_attribute
from .half_caches import drop_casts_of_caches
from .messages import READ_KINDS, STRING, Model, Node, Tensor, ValueInfo, read_model

MAX_FILE_BYTES = 2**31 - 1
MAX_NODES = 2**20
# Read of either end of each constant by the digest.
SAMPLE_BYTES = 4096


class OnnxGraph:
    """The main graph of a model file: nodes in an order in which they can run, and its constants.

    ``producers`` maps a value to the node that computes it. Raises FormatError for a file that
    is damaged, unsafe or uses control flow, ResourceError for one that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        model, self.n_file_bytes = _parse(path)
        try:
            self._check_kind(model)
            graph = drop_casts_of_caches(model.graph)
            self.ir_version = model.ir_version
            self.opsets: Mapping[str, int] = _read_opsets(model.opsets)
            self.properties: Mapping[str, str] = dict(model.properties)
            self.files = ExternalFiles(path.parent)
            self.tensors = self._read_tensors(graph.initializer)
            self.files.check_overlaps()
            self.inputs: Mapping[str, ValueInfo] = {
                item.name: item for item in graph.input if item.name not in self.tensors
            }
            self._output_infos = {item.name: item for item in graph.output}
            self.outputs = list(self._output_infos)
            self.producers: dict[str, Node] = {}
            self._index(graph.node)
            self.nodes: Sequence[Node] = self._sort(graph.node)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None
        except ResourceError as error:
            raise ResourceError(f"{path}: {error}") from None

    @property
    def n_weight_bytes(self) -> int:
        """Bytes of all constants."""
        return sum(len(tensor.data) for tensor in self.tensors.values())

    def output_dims(self, name: str) -> list[int]:
        """Declared dimensions of an output, 0 where they are open; empty if none are declared."""
        info = self._output_infos.get(name)
        return [] if info is None else list(info.dims or ())

    def consumers(self, value: str) -> list[Node]:
        """The nodes that read ``value``."""
        return self._consumers.get(value, [])

    @cached_property
    def _consumers(self) -> Mapping[str, list[Node]]:
        consumers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                consumers.setdefault(name, []).append(node)
        return consumers

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of the nodes, and of every constant's shape and ends."""
        digest = blake2b(digest_size=16)
        for node in self.nodes:
            digest.update(node.source)
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name!a}:{tensor.elem_type}:{tensor.shape}\n".encode())
            digest.update(tensor.data[:SAMPLE_BYTES])
            digest.update(tensor.data[-SAMPLE_BYTES:])
        return digest.hexdigest()

    def constant(self, name: str) -> OnnxTensor | None:
        """The constant of that name: an initializer or the output of a Constant node."""
        found = self.tensors.get(name)
        if found is not None:
            return found
        node = self.producers.get(name)
        if node is None or node.op_type != "Constant":
            return None
        return _read_constant(node)

    def _check_kind(self, model: Model) -> None:
        graph = model.graph
        if not graph.node:
            raise FormatError("this is no ONNX model: its graph has no nodes")
        if len(graph.node) > MAX_NODES:
            raise FormatError(f"the graph has {len(graph.node)} nodes, more than {MAX_NODES}")
        if graph.has_sparse:
            raise FormatError("sparse constants are not supported; export the model again")
        if model.functions:
            raise FormatError(
                f"the model has {len(model.functions)} functions of its own, such as "
                f"{quote(model.functions[0])}; inline them with onnx.inliner and try again"
            )
        for node in graph.node:
            if any(attribute.has_graph for attribute in node.attribute):
                raise self._control_flow_error(node)
            for attribute in node.attribute:
                if attribute.kind not in READ_KINDS:
                    raise FormatError(
                        f"{describe_node(node)} has the attribute {quote(attribute.name)} of type "
                        f"{attribute.kind}, which is not supported; export the model again"
                    )

    def _control_flow_error(self, node: Node) -> FormatError:
        if node.op_type == "If":
            others = [
                name
                for name in ("decoder_with_past_model.onnx", "decoder_model.onnx", "model.onnx")
                if (self.path.parent / name).is_file() and name != self.path.name
            ]
            cure = " or ".join(others) or "decoder_with_past_model.onnx of the same export"
            return FormatError(
                f"this is a merged export: node {quote(node.name)} (If) chooses between two "
                f"decoders; use {cure} instead"
            )
        return FormatError(
            f"node {quote(node.name)} ({node.op_type}) holds a graph of its own, which is not "
            "supported; export the decoder without control flow"
        )

    def _read_tensors(self, initializers: Sequence[Tensor]) -> dict[str, OnnxTensor]:
        tensors: dict[str, OnnxTensor] = {}
        for proto in initializers:
            if not proto.name or proto.name in tensors:
                raise FormatError(f"two constants have the name {quote(proto.name)}")
            tensors[proto.name] = self._read_tensor(proto)
        return tensors

    def _read_tensor(self, proto: Tensor) -> OnnxTensor:
        if proto.external is not None:
            return self.files.read(proto)
        data = memoryview(number_bytes(proto))
        return OnnxTensor(proto.name, proto.elem_type, proto.dims, data)

    def _index(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if not any(node.output):
                raise FormatError(
                    f"{describe_node(node)} computes nothing; the file is damaged, fetch it again"
                )
            for name in filter(None, node.output):
                if name in self.producers or name in self.tensors or name in self.inputs:
                    raise FormatError(f"the value {quote(name)} is computed twice")
                self.producers[name] = node
        known = self.producers.keys() | self.tensors.keys() | self.inputs.keys()
        for node in nodes:
            for name in filter(None, node.input):
                if name not in known:
                    raise FormatError(
                        f"{describe_node(node)} reads {quote(name)}, which nothing computes; the "
                        "file is damaged, fetch it again"
                    )
        for name in self.outputs:
            if name not in known:
                raise FormatError(f"nothing computes the output {quote(name)}")

    def _sort(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes so that each comes after those it reads from (Kahn 1962)."""
        waiting: dict[int, int] = {}
        readers: dict[int, list[Node]] = {}
        by_id = {id(node): node for node in nodes}
        for node in nodes:
            sources = {id(self.producers[name]) for name in node.input if name in self.producers}
            waiting[id(node)] = len(sources)
            for source in sources:
                readers.setdefault(source, []).append(node)
        ready = deque(node for node in nodes if not waiting[id(node)])
        order = []
        while ready:
            node = ready.popleft()
            order.append(node)
            for reader in readers.get(id(node), ()):
                waiting[id(reader)] -= 1
                if not waiting[id(reader)]:
                    ready.append(reader)
        if len(order) != len(nodes):
            stuck = next(by_id[key] for key, count in waiting.items() if count)
            raise FormatError(
                f"the graph has a cycle through node {quote(stuck.name)} ({stuck.op_type}); "
                "the file is damaged, fetch it again"
            )
        return order


def attributes(node: Node) -> dict[str, Any]:
    """The attributes of a node as plain values; strings are decoded."""
    values = {}
    for attribute in node.attribute:
        value = attribute.value
        values[attribute.name] = (
            value.decode("utf-8", "replace") if attribute.kind == STRING else value
        )
    return values


def describe_node(node: Node) -> str:
    """How messages name a node: its name and operator."""
    name = node.name or (node.output[0] if node.output else "")
    domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
    return f"node {quote(name)} ({domain}{node.op_type})"


def describe_nodes(nodes: Sequence[Node], names: dict[str, Hashable]) -> Hashable:
    """What ``nodes`` compute, told without names of values: those get the ones of ``names``.

    The values that they compute are added to it.
    """
    parts = []
    for i, node in enumerate(nodes):
        settings = sorted(map(encode_attribute, node.attribute))
        sources = tuple(names[name] if name else None for name in node.input)
        parts.append((node.op_type, node.domain, tuple(settings), sources, len(node.output)))
        names |= {name: (i, k) for k, name in enumerate(node.output) if name}
    return tuple(parts)


def input_names(node: Node, count: int) -> list[str]:
    """The first ``count`` inputs, "" for those left out."""
    return [*node.input[:count], *[""] * (count - len(node.input))]


def _parse(path: Path) -> tuple[Model, int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise ResourceError(f"{path} is not a regular file; give the path of a .onnx file")
            if info.st_size > MAX_FILE_BYTES:
                raise FormatError(
                    f"{path} has {info.st_size} bytes; an ONNX file of 2 GiB or more must keep "
                    "its weights in a file beside it (save it with external data)"
                )
            data = map_descriptor(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        cure = "fetch that file too" if is_missing else "check its permissions"
        raise ResourceError(f"{path} cannot be read: {error.strerror}; {cure}") from None
    if not data:
        raise FormatError(
            f"{path} is empty: it was not fetched or copied to its end; fetch or copy it again"
        )
    foreign = describe_foreign_file(bytes(data[:PROBE_BYTES]))
    if bytes(data[:4]) == b"GGUF":
        foreign = "a GGUF file; rename it to .gguf"
    if foreign is not None and "ONNX" not in foreign:
        raise FormatError(f"{path} is not an ONNX file: it is {foreign}")
    try:
        return read_model(data), len(data)
    except FormatError as error:
        raise FormatError(f"{path} is not an ONNX model, or is damaged: {error}") from None


def _read_opsets(imports: Sequence[tuple[str, int]]) -> dict[str, int]:
    opsets: dict[str, int] = {}
    for name, version in imports:
        domain = "" if name == "ai.onnx" else name
        if domain in opsets:
            raise FormatError(f"the file names two versions of operator set {quote(domain)}")
        opsets[domain] = version
    if "" not in opsets:
        raise FormatError("the file does not say which version of the ONNX operators it uses")
    return opsets


def _read_constant(node: Node) -> OnnxTensor:
    name = node.output[0]
    try:
        value = next(iter(attributes(node).values()))
        if isinstance(value, Tensor):
            return OnnxTensor(name, value.elem_type, value.dims, memoryview(number_bytes(value)))
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        data = memoryview(array.tobytes())
        return OnnxTensor(name, element_type(array.dtype), array.shape, data)
    except (FormatError, ValueError, TypeError, KeyError, StopIteration) as error:
        raise FormatError(f"{describe_node(node)} cannot be read: {error}") from None
