"""Which tensors a family has, and how those of a file become the weights of the core."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from .. import _core
from ..errors import FormatError
from ..formats.gguf_header import TensorInfo
from ..formats.gguf_types import stored_bytes
from ..formats.metadata import quote
from .rope import half_split_row_order

if TYPE_CHECKING:
    from ..layer_config import LayerConfig
    from .hyperparameters import Hyperparameters

VECTOR_TYPES = ("F32", "F16", "BF16")
_MAX_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Consecutive rows of a fused tensor, and the name by which the core knows them.

    ``rows`` names a size (see ``Hyperparameters.sizes``). ``rotated`` marks Q and K, whose rows
    RoPE turns in pairs. The core holds what is ``transposed`` so, in floats.
    """

    name: str
    rows: str
    rotated: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One tensor of a family, or one per layer if the name contains ``{layer}``.

    ``shape`` names sizes, contiguous dimension first. ``parts`` covers all rows of a matrix that
    holds several weights of the core, or all of each of the matrices of a stack. One of three
    dimensions holds a matrix per entry of the last, which the core knows by the tensor's name with
    its number: ``ffn_up_exps.7.weight``. ``core_name`` is the name in the core of a whole tensor,
    if it is another one. A part whose name contains ``{part}`` is one of several, equal but for the
    last. Layers that share keys and values leave out what is ``of_kv``, or have it for nothing.
    ``is_vectors``: rows are vectors, not a matrix. Only layers ``of`` a kind have it, if one is
    named: a mixer, "experts" and "dense" in a mixture of experts with layers of both, "indexer",
    "ngrams", "shared_values" (of RWKV-7's layers behind the first), "wkv_gates", "wkv_norms" or
    "mixer_norm" (layers that have one).
    ``groups`` names the number of groups of rows, each of which has two halves: the core has the
    second halves of all groups first if ``swaps_halves``, else the first. ``tail_of`` names the
    size of a head whose last rows are those that RoPE turns, of a matrix that is ``rotated``,
    ``head_of`` that of one whose first rows are, if its heads are not those of attention.
    ``rotated_part`` names the size of what comes first and is rotated, of a vector that is
    ``rotated`` in part.
    ``repeats`` names how often the ``parts`` follow each other; names that contain ``{part}`` then
    get the number of the repetition. A layer without the tensor has that of the name ``stand_in``
    in its place, if one is named. What ``flattens`` is one vector, which may have several rows in a
    file.
    """

    name: str
    shape: tuple[str, ...]
    required: bool
    rotated: bool
    parts: tuple[TensorPart, ...]
    core_name: str = ""
    of_kv: bool = False
    is_vectors: bool = False
    of: str = ""
    groups: str = ""
    swaps_halves: bool = False
    tail_of: str = ""
    repeats: str = ""
    stand_in: str = ""
    head_of: str = ""
    rotated_part: str = ""
    flattens: bool = False


def tensor(
    name: str,
    *shape: str,
    required: bool = True,
    rotated: bool = False,
    parts: Sequence[TensorPart] = (),
    core_name: str = "",
    of_kv: bool = False,
    is_vectors: bool = False,
    of: str = "",
    groups: str = "",
    swaps_halves: bool = False,
    tail_of: str = "",
    repeats: str = "",
    stand_in: str = "",
    rotated_part: str = "",
    flattens: bool = False,
) -> TensorRule:
    """A ``TensorRule`` written as one line of a table."""
    return TensorRule(
        name,
        shape,
        required,
        rotated,
        tuple(parts),
        core_name,
        of_kv,
        is_vectors,
        of,
        groups,
        swaps_halves,
        tail_of,
        repeats,
        stand_in,
        rotated_part=rotated_part,
        flattens=flattens,
    )


def tensors_of(kind: str, rules: Iterable[TensorRule]) -> tuple[TensorRule, ...]:
    """The rules, for layers of a kind only."""
    return tuple(replace(rule, of=kind) for rule in rules)


@dataclass(frozen=True, slots=True)
class TensorBinding:
    """Rows of a tensor of the file and the name by which the core knows them.

    ``row_order[i]`` is the source row, counted from ``first_row``, that becomes row ``i`` (for a
    vector: the source element), int32 of shape ``[n_rows]``; None keeps the order of the file.
    ``is_transposed``: see ``TensorPart``.
    """

    info: TensorInfo
    name: str
    row_order: array[int] | None
    first_row: int
    n_rows: int
    is_transposed: bool = False

    @property
    def first_byte(self) -> int:
        """Where the rows begin in the tensor's bytes."""
        return self.info.n_bytes // self.info.rows * self.first_row

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows in memory, where some types are held as others."""
        n_weights = self.n_rows * self.info.cols
        if self.is_transposed:
            return stored_bytes(self.packed_type, n_weights)
        held = _widened_types().get(self.info.type_name)
        if held is None:
            return self.n_bytes
        block_values, block_bytes = held
        return n_weights // block_values * block_bytes

    @property
    def packed_type(self) -> str:
        """The type of what is packed: the file's, or floats of a matrix that is transposed."""
        if not self.is_transposed:
            return self.info.type_name
        return "F32" if self.info.type_name in ("F32", "BF16") else "F16"

    @property
    def n_bytes(self) -> int:
        return self.info.n_bytes // self.info.rows * self.n_rows


def bind_tensors(
    tensors: Mapping[str, TensorInfo],
    rules: Iterable[TensorRule],
    shape: Hyperparameters,
    *,
    architecture: str,
    interleaved: bool,
    read_elsewhere: Iterable[str],
) -> list[TensorBinding]:
    """Checks the tensors of a file against the rules and binds them, in the order of the file.

    ``interleaved`` says that pairs of rotated rows are neighbours in the file. The tensors
    ``read_elsewhere`` may be there but are not bound. Raises ``FormatError`` that names a tensor
    which is missing, unknown, or of the wrong shape or type.
    """
    by_name = expand_rules(rules, shape.own_layers)
    unread = {
        name
        for name, (rule, layer) in by_name.items()
        if rule.of_kv and shape.own_layers[layer].kv_distance
    }
    missing = [
        name
        for name, (rule, _) in by_name.items()
        if rule.required
        and name not in tensors
        and rule.stand_in not in tensors
        and name not in unread
    ]
    standing_in = {
        rule.stand_in: rule.core_name or name
        for name, (rule, _) in by_name.items()
        if rule.stand_in and name not in tensors and name not in unread
    }
    if missing and not tensors:
        raise FormatError(
            "the file has no weights, as those that hold a vocabulary alone; fetch the model itself"
        )
    if missing:
        raise FormatError(
            f"{_count(missing, 'tensor')} of architecture {architecture!r} missing: "
            f"{_some(missing)}; the file is incomplete, or the model is of a variant that is not "
            "supported"
        )
    ignored = set(read_elsewhere)
    unknown = [n for n in tensors if n not in by_name and n not in ignored]
    if unknown:
        raise FormatError(
            f"{_count(unknown, 'tensor')} that architecture {architecture!r} with "
            f"{len(shape.own_layers)} layers does not use: {_some(unknown)}; the model is of a "
            "variant that is not supported, and leaving them out would give wrong answers"
        )
    bindings: list[TensorBinding] = []
    row_orders: dict[tuple[int, int, int, str], array[int]] = {}
    sizes = [shape.sizes(layer) for layer in shape.own_layers]
    for name, info in tensors.items():
        if name not in by_name:
            continue
        rule, layer = by_name[name]
        if rule.flattens:
            info = replace(info, shape=(prod(info.shape),))
        _check_tensor(info, rule, sizes[layer])
        if name in unread:
            continue
        for part, first_row, n_rows in _parts(info, rule, sizes[layer]):
            row_order = None
            if rule.groups:
                row_order = _split_halves(n_rows, sizes[layer][rule.groups], rule.swaps_halves)
            if part.rotated and interleaved:
                n_ordered = n_rows if len(info.shape) > 1 else info.cols
                head_dim = sizes[layer][rule.tail_of or rule.head_of or "head_dim"]
                n_rotated = sizes[layer][rule.rotated_part] if rule.rotated_part else n_ordered
                key = n_ordered, n_rotated, head_dim, rule.tail_of
                if key not in row_orders:
                    order = half_split_row_order(
                        n_rotated, head_dim, shape.rotary_dim, is_tail=bool(rule.tail_of)
                    )
                    row_orders[key] = order + array("i", range(n_rotated, n_ordered))
                row_order = row_orders[key]
            bindings.append(
                TensorBinding(info, part.name, row_order, first_row, n_rows, part.transposed)
            )
        if name in standing_in:
            bindings.append(TensorBinding(info, standing_in[name], None, 0, info.rows))
    return bindings


def expand_rules(
    rules: Iterable[TensorRule], layers: Sequence[LayerConfig]
) -> dict[str, tuple[TensorRule, int]]:
    """Rules by the name of the tensor, and the layer; those of no layer have 0."""
    by_name: dict[str, tuple[TensorRule, int]] = {}
    for rule in rules:
        n_layers = len(layers) if "{layer}" in rule.name else 1
        for layer in range(n_layers):
            if rule.of and rule.of not in _kinds(layers[layer]):
                continue
            parts = tuple(
                replace(part, name=part.name.replace("{layer}", str(layer))) for part in rule.parts
            )
            name = rule.name.replace("{layer}", str(layer))
            core_name = rule.core_name.replace("{layer}", str(layer))
            stand_in = rule.stand_in.replace("{layer}", str(layer))
            own = replace(rule, name=name, parts=parts, core_name=core_name, stand_in=stand_in)
            by_name[name] = own, layer
    return by_name


def _split_halves(n_rows: int, n_groups: int, swaps: bool) -> array[int]:
    """Rows of one half of every group, then those of the other."""
    width = n_rows // n_groups // 2
    halves = (1, 0) if swaps else (0, 1)
    return array(
        "i",
        [
            (2 * group + half) * width + row
            for half in halves
            for group in range(n_groups)
            for row in range(width)
        ],
    )


def _kinds(layer: LayerConfig) -> tuple[str, ...]:
    more = [
        ("indexer", layer.index_heads),
        ("shared_values", layer.wkv_value_rank),
        ("wkv_gates", layer.wkv_gate_rank),
        ("wkv_norms", layer.wkv_norms_heads),
        ("mixer_norm", layer.has_mixer_norm),
        ("ngrams", layer.history_rows),
    ]
    own = [name for name, is_there in more if is_there]
    return layer.mixer, "dense" if layer.is_dense else "experts", *own


def _parts(
    info: TensorInfo, rule: TensorRule, sizes: Mapping[str, int]
) -> Iterator[tuple[TensorPart, int, int]]:
    """Every part with its first row and its number of rows."""
    if len(rule.shape) == 3:
        first_row = 0
        for index in range(info.shape[2]):
            for part in rule.parts or (TensorPart(rule.name, rule.shape[1]),):
                name = part.name.replace(".weight", f".{index}.weight")
                yield replace(part, name=name), first_row, sizes[part.rows]
                first_row += sizes[part.rows]
        return
    if not rule.parts:
        yield TensorPart(rule.core_name or rule.name, rule.shape[-1], rule.rotated), 0, info.rows
    first_row = 0
    if rule.repeats:
        for number in range(sizes[rule.repeats]):
            for part in rule.parts:
                own = replace(part, name=part.name.replace("{part}", str(number)))
                yield own, first_row, sizes[part.rows]
                first_row += sizes[part.rows]
        return
    for part in rule.parts:
        n_rows = sizes[part.rows]
        for index in range(-(-info.rows // n_rows) if "{part}" in part.name else 1):
            count = min(n_rows, info.rows - first_row)
            yield replace(part, name=part.name.replace("{part}", str(index))), first_row, count
            first_row += count


def _check_tensor(info: TensorInfo, rule: TensorRule, sizes: Mapping[str, int]) -> None:
    expected = tuple(sizes[size] for size in rule.shape)
    # ggml leaves out dimensions of 1 at the end when it writes a file anew.
    is_one_vector = rule.is_vectors and expected[1:] == (1,) and info.shape == expected[:1]
    # Some convolutions have another one between, and files as they are converted more at the end.
    is_stack = rule.is_vectors and info.rows == expected[-1]
    is_stack &= expected in (info.shape[:1] + info.shape[i : i + 1] for i in (1, 2, 3))
    if info.shape != expected and not is_one_vector and not is_stack:
        raise FormatError(
            f"tensor {quote(info.name)} has shape {list(info.shape)}, but the hyperparameters "
            f"make it {list(expected)} ({', '.join(rule.shape)}); the file is damaged or was "
            "converted wrongly"
        )
    is_matrix = len(expected) > 1 and not rule.is_vectors
    supported = readable_types() if is_matrix else VECTOR_TYPES
    if info.type_name not in supported:
        raise FormatError(
            f"tensor {quote(info.name)} is of type {info.type_name}, which is not supported here; "
            f"supported: {', '.join(supported)}; fetch the model in one of these, such as Q4_K_M"
        )


@cache
def readable_types() -> tuple[str, ...]:
    """Types that matrices may have, those that are held as others last."""
    return (*_core.supported_types(), *_widened_types())


@cache
def _widened_types() -> dict[str, tuple[int, int]]:
    return _core.widened_types()


def _count(names: list[str], noun: str) -> str:
    return f"1 {noun}" if len(names) == 1 else f"{len(names)} {noun}s"


def _some(names: list[str]) -> str:
    shown = ", ".join(quote(name) for name in names[:_MAX_NAMES_SHOWN])
    return shown + (", ..." if len(names) > _MAX_NAMES_SHOWN else "")
