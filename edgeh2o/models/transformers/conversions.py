"""Which stored tensors each tensor of GGUF is made of, and how."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import FormatError
from ...formats.gguf_header import TensorInfo
from ...formats.gguf_types import stored_bytes
from ...formats.metadata import quote
from ...formats.safetensors import SafetensorsFile, StoredTensor
from ..experts import MAX_EXPERTS
from ..hyperparameters import Hyperparameters
from ..rope import half_split_row_order
from ..spec import ArchitectureSpec
from ..tensors import TensorRule, expand_rules
from ..written_types import choose_type
from .config import DescribedFolder
from .family import TransformersFamily
from .sources import Factors, Order, Source

MXFP4_VALUES, MXFP4_BYTES = 32, 16  # of a block, without its scale
_PIECE_BYTES = 16 * 2**20  # that are compared at a time
WEIGHT_TYPES = ("F32", "F16", "BF16")
# Buffers that old checkpoints keep; they follow from the settings.
_BUFFERS = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
    *(".attention.bias", ".attention.masked_bias"),
)
_AS_IT_IS = Source(name="")


@dataclass(frozen=True, slots=True)
class Conversion:
    """Where a tensor comes from: stored ones, one after the other, or ``table``.

    Each has ``n_matrices`` of ``shape`` rows and columns, whose ``rows`` and ``columns`` are taken,
    None for all as they are. ``factors`` are of the rows, if there are some. ``scales`` are those
    of stored blocks of MXFP4, one for each.
    """

    stored: tuple[StoredTensor, ...]
    source: Source = _AS_IT_IS
    n_matrices: int = 1
    shape: tuple[int, int] = (1, 1)
    rows: Sequence[int] | None = None
    columns: Sequence[int] | None = None
    scales: tuple[StoredTensor, ...] = ()
    factors: tuple[float, ...] = ()
    table: bytes = b""

    @property
    def is_plain(self) -> bool:
        """Whether rows stay where they are."""
        return self.rows is None and self.columns is None and not self.source.is_transposed

    @property
    def out_shape(self) -> tuple[int, int]:
        """Rows and columns of each matrix that comes out."""
        n_rows = self.shape[0] if self.rows is None else len(self.rows)
        n_cols = self.shape[1] if self.columns is None else len(self.columns)
        return (n_cols, n_rows) if self.source.is_transposed else (n_rows, n_cols)


def plan_tensors(
    described: DescribedFolder, files: Sequence[SafetensorsFile], target: str
) -> tuple[dict[str, TensorInfo], dict[str, Conversion]]:
    """The tensors of the GGUF file that a folder could be, of a type, and what they are made of.

    Raises FormatError that names a tensor which is missing, malformed or not understood.
    """
    family, metadata = described.family, described.metadata
    prefix = described.spec.name
    n_layers = metadata.get_int(f"{prefix}.block_count")
    stored = _named_as_expected(family, files, n_layers)
    known = _matrix_names(family, "output", "lm_head")
    outputs = known & stored.keys()
    ties = described.ties if described.ties is not None else not outputs
    if not (ties or outputs or family.unties):
        raise FormatError(
            f"tensor {quote(min(known))} is missing, and 'tie_word_embeddings' of config.json is "
            "false: it is not the embedding; fetch all files of the model"
        )
    if ties:
        ties = _tie(stored, _matrix_names(family, "token_embd", ""), outputs, files)
    shape = described.spec.read_shape(metadata)
    n_experts = metadata.get_int(f"{prefix}.expert_count", default=1, maximum=MAX_EXPERTS)
    rotated = rotated_order(described.spec, family, shape)
    infos: dict[str, TensorInfo] = {}
    conversions: dict[str, Conversion] = {}
    used = {
        template.format(layer=layer)
        for template in family.layer_numbers.values()
        for layer in range(n_layers)
    }
    sizes = [shape.sizes(layer) for layer in shape.layers]
    rules = expand_rules(described.spec.rules(shape), shape.layers)
    for name, (rule, layer) in rules.items():
        source = _find_source(family, name, layer, stored)
        names = stored_names(source, layer, n_experts) if source else []
        missing = [each for each in names if each not in stored]
        if not names or missing:
            is_there_in_part = len(missing) < len(names)
            is_others = rule.stand_in or (rule.of_kv and shape.layers[layer].kv_distance)
            is_needed = rule.required and not is_others and not (name == "output.weight" and ties)
            if is_needed or (is_there_in_part and names):
                raise FormatError(
                    f"tensor {quote(missing[0] if missing else name)} of a model of type {prefix} "
                    "is missing; fetch all files of the model"
                )
            continue
        assert source is not None
        used.update(names)
        found = [stored[each] for each in names]
        scales = _find_scales(source, names, stored)
        if source.scales:
            used.add(_scales_name(source, names))
        conversion = _plan(
            source,
            found,
            scales,
            sizes[layer],
            rotated if rule.rotated else None,
            is_of_vectors=rule.is_vectors,
        )
        if source.factors:
            row_factors = expand_factors(described.factors[source.factors], sizes[layer])
            conversion = replace(conversion, factors=row_factors)
        n_matrices = len(found) * conversion.n_matrices
        out = _out_shape(conversion, rule, sizes[layer], n_matrices)
        kind = "F32" if rule.is_vectors else "MXFP4"
        if not (rule.is_vectors or scales):
            kind = choose_type(name, out, target, n_layers=len(shape.layers), is_tied=ties)
        conversions[name], infos[name] = conversion, _info(name, kind, out)
    unknown = [n for n in stored if n not in used and not n.endswith(_BUFFERS)]
    if unknown:
        raise FormatError(
            f"{len(unknown)} tensors that a model of type {prefix} does not use: "
            f"{', '.join(map(quote, unknown[:4]))}; the model is of a variant that is not "
            "supported, and leaving them out would give wrong answers"
        )
    for name, table in described.tables.items():
        conversions[name] = Conversion((), table=table)
        infos[name] = _info(name, "F32", (len(table) // 4,))
    return infos, conversions


def _named_as_expected(
    family: TransformersFamily, files: Sequence[SafetensorsFile], n_layers: int
) -> dict[str, StoredTensor]:
    """The tensors by their names, of texts only, and without a prefix that some have.

    Of a model of ``n_layers`` one behind the last may guess tokens ahead.
    """
    return {
        known: tensor
        for file in files
        for name, tensor in file.tensors.items()
        if (known := text_name(family, name, n_layers)) is not None
    }


def text_name(family: TransformersFamily, name: str, n_layers: int) -> str | None:
    """A name of a checkpoint of ``n_layers`` as its family has it; None: texts do without it."""
    drafting = f"model.layers.{n_layers}." if family.has_drafting_layers else None
    if name.startswith(family.left_out) or (drafting and name.startswith(drafting)):
        return None
    prefix = next((each for each in family.prefixes if name.startswith(each)), "")
    return family.prefixes.get(prefix, "") + name[len(prefix) :]


def _matrix_names(family: TransformersFamily, name: str, usual: str) -> set[str]:
    """What the embedding or the output matrix is called."""
    entry = family.tensors.get(name, usual)
    choices = entry if isinstance(entry, tuple) else (entry,)
    return {f"{each}.weight" for each in choices if isinstance(each, str)}


def _tie(
    stored: dict[str, StoredTensor],
    embeddings: Collection[str],
    outputs: Collection[str],
    files: Sequence[SafetensorsFile],
) -> bool:
    """Leaves one matrix for the embedding and the output; whether they are one.

    As in transformers 5: two that differ stay two, whatever config.json says, and where only the
    output is stored it is the embedding too.
    """
    owners = {name: file for file in files for name in file.tensors}
    for embedding in embeddings:
        for output in outputs:
            if not _are_equal(stored.setdefault(embedding, stored[output]), stored[output], owners):
                return False
    for output in outputs:
        del stored[output]
    return True


def _are_equal(
    first: StoredTensor, second: StoredTensor, owners: Mapping[str, SafetensorsFile]
) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    for start in range(0, first.n_bytes if first != second else 0, _PIECE_BYTES):
        n_bytes = min(_PIECE_BYTES, first.n_bytes - start)
        one, other = (
            owners[each.name].read(each.offset + start, n_bytes) for each in (first, second)
        )
        if one != other:
            return False
    return True


def _find_source(
    family: TransformersFamily, name: str, layer: int, stored: Mapping[str, StoredTensor]
) -> Source | None:
    """What a tensor is made of; of several the one that is there. None: the family has none."""
    choices = sources_of(family, name, layer)
    there = (each for each in choices if stored_names(each, layer, 1)[0] in stored)
    return next(there, choices[0] if choices else None)


def sources_of(family: TransformersFamily, name: str, layer: int) -> list[Source]:
    """What a tensor may be made of, one of which a checkpoint has; nothing: the family has none."""
    key = name.replace(f"blk.{layer}.", "blk.{layer}.", 1)
    stem, _, suffix = key.rpartition(".")
    entry = family.tensors.get(key, family.tensors.get(stem))
    if entry is None:
        return []
    is_shifted = family.adds_one and suffix == "weight" and "norm" in stem
    return [
        Source(name=f"{each}.{suffix}", change="add_one" if is_shifted else "none")
        if isinstance(each, str)
        else each
        for each in (entry if isinstance(entry, tuple) else (entry,))
    ]


def stored_names(source: Source, layer: int, n_experts: int) -> list[str]:
    """Of one tensor, in the order of its parts."""
    experts = range(n_experts) if "{expert}" in source.name else range(1)
    return [source.name.format(layer=layer, expert=expert) for expert in experts]


def _find_scales(
    source: Source, names: Sequence[str], stored: Mapping[str, StoredTensor]
) -> tuple[StoredTensor, ...]:
    """Those of blocks of MXFP4. Raises FormatError for what are none."""
    if not source.scales:
        return ()
    blocks = stored[names[0]]
    scales = stored.get(_scales_name(source, names))
    expected = (*blocks.shape[:3], MXFP4_BYTES)
    if (
        scales is None
        or (blocks.dtype, scales.dtype) != ("U8", "U8")
        or (blocks.shape, scales.shape) != (expected, blocks.shape[:3])
        or not blocks.n_bytes
    ):
        raise FormatError(
            f"tensor {quote(blocks.name)} is {blocks.dtype} of shape {list(blocks.shape)}, which "
            f"are not the blocks of MXFP4 that belong to scales {quote(source.scales)}; the file "
            "is damaged"
        )
    return (scales,)


def _scales_name(source: Source, names: Sequence[str]) -> str:
    return names[0].removesuffix("_blocks") + source.scales


def _plan(
    source: Source,
    found: Sequence[StoredTensor],
    scales: tuple[StoredTensor, ...],
    sizes: Mapping[str, int],
    rotated: Order | None,
    *,
    is_of_vectors: bool,
) -> Conversion:
    """Raises FormatError for tensors that cannot be what they are called."""
    first = found[0]
    if not scales:
        _check_alike(found)
    dims = first.shape
    if scales:
        dims = (*dims[:2], dims[2] * MXFP4_VALUES)
    elif is_of_vectors and len(dims) == 3 and dims[1] == 1:  # taps of channels
        dims = (dims[0], dims[2])
    n_matrices, n_rows = (dims[0], dims[1]) if len(dims) == 3 else (1, dims[0] if dims else 0)
    n_cols = dims[-1] if len(dims) > 1 else 1
    if not 1 <= len(dims) <= 3:
        raise FormatError(f"tensor {quote(first.name)} has {len(dims)} dimensions")
    try:
        n_in_one, rows, columns = arrange(source, rotated, (n_rows, n_cols), sizes)
        if source.stacked and len(dims) != 2:
            raise ValueError("a stack of matrices lies in one of two dimensions")
    except ValueError as error:
        raise FormatError(
            f"tensor {quote(first.name)} has shape {list(first.shape)}: {error}; the file is "
            "damaged"
        ) from None
    return Conversion(
        tuple(found),
        source,
        n_matrices * n_in_one,
        (n_rows // n_in_one, n_cols),
        rows or None,
        columns or None,
        scales,
    )


def arrange(
    source: Source, rotated: Order | None, shape: tuple[int, int], sizes: Mapping[str, int]
) -> tuple[int, Sequence[int], Sequence[int]]:
    """How many matrices lie below each other in one of ``shape`` rows and columns.

    And the rows and columns of each that are taken, in their order; empty for all. Raises
    ValueError for a shape that cannot be.
    """
    n_rows, n_cols = shape
    n_matrices = sizes[source.stacked] if source.stacked else 1
    if n_rows % n_matrices:
        raise ValueError(f"it holds no {n_matrices} equal matrices")
    n_rows //= n_matrices
    rows = (rotated or source.rows or _all)(n_rows, sizes)
    columns = (source.columns or _all)(n_cols, sizes)
    if any(order and max(order) >= n for order, n in ((rows, n_rows), (columns, n_cols))):
        raise ValueError(f"{n_rows} x {n_cols} are fewer than the settings make them")
    return n_matrices, rows, columns


def expand_factors(factors: Factors, sizes: Mapping[str, int]) -> tuple[float, ...]:
    """One for each row, or one for all."""
    return tuple(factor for name, factor in factors for _ in range(sizes[name] if name else 1))


def _all(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    """Nothing is reordered."""
    return ()


def _check_alike(found: Sequence[StoredTensor]) -> None:
    first = found[0]
    for tensor in found:
        if tensor.dtype not in WEIGHT_TYPES:
            raise FormatError(
                f"tensor {quote(tensor.name)} is of dtype {tensor.dtype}; only "
                f"{', '.join(WEIGHT_TYPES)} can be read, fetch the original model"
            )
        if tensor.shape != first.shape or tensor.dtype != first.dtype or not tensor.n_bytes:
            raise FormatError(
                f"tensor {quote(tensor.name)} is {tensor.dtype} of shape {list(tensor.shape)}, but "
                f"{quote(first.name)} {first.dtype} of {list(first.shape)}; the file is damaged"
            )


def _out_shape(
    conversion: Conversion, rule: TensorRule, sizes: Mapping[str, int], n_matrices: int
) -> tuple[int, ...]:
    """In GGUF's order, contiguous dimension first."""
    n_rows, n_cols = conversion.out_shape
    if n_matrices > 1 or len(rule.shape) == 3:
        return n_cols, n_rows, n_matrices
    if len(rule.shape) == 2:
        expected = (sizes[rule.shape[0]], sizes[rule.shape[1]])
        is_vector = n_cols == 1 and expected[0] * expected[1] == n_rows
        return expected if is_vector else (n_cols, n_rows)
    # The gate of a shared expert is a matrix of one row there.
    return (n_rows * n_cols,) if 1 in (n_rows, n_cols) else (n_cols, n_rows)


def _info(name: str, kind: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, kind, shape, stored_bytes(kind, math.prod(shape)), 0)


def rotated_order(
    spec: ArchitectureSpec, family: TransformersFamily, shape: Hyperparameters
) -> Order | None:
    """The stored row of each row of Q or K where halves become neighbours; None: nothing does."""
    if spec.qk_row_order != "interleaved" or not family.has_half_split_rows:
        return None
    head_dim, rotary_dim = shape.head_dim, shape.rotary_dim

    def order(n_rows: int, sizes: Mapping[str, int]) -> Sequence[int]:
        if n_rows % head_dim or rotary_dim % 2:
            raise ValueError(f"{n_rows} rows are no whole heads of {head_dim}")
        rows = [0] * n_rows
        for stored, row in enumerate(half_split_row_order(n_rows, head_dim, rotary_dim)):
            rows[row] = stored
        return rows

    return order
