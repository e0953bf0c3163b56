"""A folder of PEFT as an adapter in the words of GGUF.

What is done with the rows and columns of a matrix, when a checkpoint becomes GGUF, is done with the
rows of B and the columns of A: the product is then that of the matrix as GGUF has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import FormatError
from ...formats.gguf_header import TensorInfo
from ...formats.lora_file import LowRankPart, show_shape
from ...formats.metadata import Metadata, quote
from ..hyperparameters import Hyperparameters
from ..lora import MERGE
from ..reader import OUTPUT_TENSOR
from ..spec import ArchitectureSpec, find_architecture
from ..tensors import TensorRule, expand_rules
from .conversions import (
    arrange,
    expand_factors,
    rotated_order,
    sources_of,
    stored_names,
    text_name,
)
from .families import FAMILIES
from .family import TransformersFamily
from .peft import PeftFolder, PeftModule
from .sources import Factors, Order, Source, first_half, second_half

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# The parameter that holds matrices of all experts of a layer, and which of its rows are theirs.
_JOINED: Mapping[str, tuple[str, Order | None]] = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", first_half)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", second_half)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", None)),
}
# Of Granite, whose checkpoints have a module for each.
_RENAMED = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}


@dataclass(frozen=True, slots=True)
class _Use:
    """A tensor, or the ``matrix`` of a stack, that a module changes; see ``TensorRule``.

    ``key`` is what patterns of the settings are for. The module has updates of ``n_matrices``, of
    which that of the same number is meant.
    """

    tensor: str
    matrix: int
    module: PeftModule
    key: str
    source: Source
    rule: TensorRule
    layer: int
    n_matrices: int = 1

    @property
    def rank(self) -> int:
        return self.module.rank // self.n_matrices


@dataclass(frozen=True, slots=True)
class _Found:
    """What the modules of an adapter change in a model of ``family``.

    The model does not have what is ``unknown``. Of that, names that are ``tied`` would be the
    output, which is the embedding here.
    """

    family: TransformersFamily
    uses: Sequence[_Use]
    unknown: Sequence[PeftModule]
    tied: Collection[str]


@dataclass(frozen=True, slots=True)
class _Arranged:
    """Rows of a module's B, and columns of its A, as a matrix of GGUF has them.

    ``first_row`` and ``n_rows`` are of the matrix that is meant, of several below each other.
    ``rows`` are counted from there; empty sequences stand for all. ``factors`` are one per row, one
    for all, or none; ``factor`` is what the product counts.
    """

    use: _Use
    factor: float
    first_row: int
    n_rows: int
    rows: Sequence[int]
    columns: Sequence[int]
    factors: tuple[float, ...]
    is_transposed: bool


class ConvertedAdapter:
    """See ``models.lora.Adapter``. It owns ``folder``."""

    def __init__(self, folder: PeftFolder, matrices: Mapping[str, Mapping[int, _Arranged]]) -> None:
        self._folder, self._matrices = folder, matrices

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def changed(self) -> Collection[str]:
        """Names of the tensors that it changes."""
        return self._matrices.keys()

    @property
    def fingerprint(self) -> str:
        """As ``PeftFolder.fingerprint``."""
        return self._folder.fingerprint

    def part(self, name: str, matrix: int) -> LowRankPart | None:
        """What is added to a tensor, of a stack to the matrix of this number; None: nothing."""
        found = self._matrices.get(name, {}).get(matrix)
        if found is None:
            return None
        rank = found.use.rank

        def down() -> NDArray[np.float32]:
            return self._down(found)

        def up() -> NDArray[np.float32]:
            return self._up(found)

        if not found.is_transposed:
            return LowRankPart(rank, found.factor, down, up)
        return LowRankPart(rank, found.factor, lambda: up().T, lambda: down().T)

    def _down(self, found: _Arranged) -> NDArray[np.float32]:
        import numpy as np

        use = found.use
        first = use.matrix * use.rank if use.n_matrices > 1 else 0
        values = self._folder.read(use.module.a)[first:][: use.rank]
        return values[:, np.asarray(found.columns)] if found.columns else values

    def _up(self, found: _Arranged) -> NDArray[np.float32]:
        import numpy as np

        use = found.use
        values = self._folder.read(use.module.b)[found.first_row :][: found.n_rows]
        if use.n_matrices > 1:
            values = values[:, use.matrix :: use.n_matrices]
        if found.rows:
            values = values[np.asarray(found.rows)]
        if found.factors:
            values = values * np.asarray(found.factors, np.float32)[:, np.newaxis]
        return values

    def close(self) -> None:
        """Closes the folder."""
        self._folder.close()


def open_adapter(
    path: Path,
    metadata: Metadata,
    tensors: Mapping[str, TensorInfo],
    family: TransformersFamily | None = None,
    factors: Mapping[str, Factors] | None = None,
) -> ConvertedAdapter:
    """Opens a folder of PEFT, or the file of its tensors, for the model of ``tensors``.

    ``family`` is the model's, None: one of those of its architecture, of which the first with all
    modules is taken. ``factors`` are those that its sources name, None: they are not known. Raises
    FormatError that names the module which the model does not have, or which takes no update, and
    as ``PeftFolder``.
    """
    folder = PeftFolder(path)
    try:
        return ConvertedAdapter(folder, _convert(folder, metadata, tensors, family, factors))
    except FormatError as error:
        folder.close()
        base = folder.config.base_model
        trained_on = f" (trained on {quote(base)})" if base else ""
        raise FormatError(f"{path}{trained_on}: {error}") from None
    except BaseException:
        folder.close()
        raise


def _convert(
    folder: PeftFolder,
    metadata: Metadata,
    tensors: Mapping[str, TensorInfo],
    family: TransformersFamily | None,
    factors: Mapping[str, Factors] | None,
) -> dict[str, dict[int, _Arranged]]:
    spec = find_architecture(metadata.get_str("general.architecture"))
    families = [each for each in FAMILIES.values() if each.architecture == spec.name]
    if not families:
        raise FormatError(
            f"the names of models of architecture {quote(spec.name)} in PEFT are not known; make a "
            "GGUF file of the adapter by convert_lora_to_gguf.py of llama.cpp"
        )
    shape = spec.read_shape(metadata)
    found = [
        _find_uses(each, folder, spec, shape, tensors)
        for each in ([family] if family else families)
    ]
    best = min(found, key=lambda each: len(each.unknown))
    if best.unknown:
        raise FormatError(_unknown_message(best, is_folder=family is not None))
    if not best.uses:
        raise FormatError("it changes nothing that a text is computed with")
    rotated = rotated_order(spec, best.family, shape)
    matrices: dict[str, dict[int, _Arranged]] = {}
    for use in best.uses:
        sizes = shape.sizes(shape.layers[use.layer])
        factor = folder.config.factor(use.key, use.rank)
        arranged = _arrange(use, factor, tensors[use.tensor], rotated, sizes, factors)
        for number, each in enumerate(arranged, start=use.matrix):
            matrices.setdefault(use.tensor, {})[number] = each
    return matrices


def _find_uses(
    family: TransformersFamily,
    folder: PeftFolder,
    spec: ArchitectureSpec,
    shape: Hyperparameters,
    tensors: Mapping[str, TensorInfo],
) -> _Found:
    """What the modules change, if the model is of ``family``."""
    modules = {
        name: module
        for each, module in folder.modules.items()
        if (name := text_name(family, each, len(shape.layers))) is not None
    }
    uses: list[_Use] = []
    n_experts = shape.feed_forward.n_experts
    for tensor, (rule, layer) in expand_rules(spec.rules(shape), shape.layers).items():
        for source in sources_of(family, tensor, layer):
            for expert, name in enumerate(stored_names(source, layer, n_experts or 1)):
                module = modules.get(name.removesuffix(".weight"))
                if module is not None and name.endswith(".weight"):
                    use = _Use(tensor, expert, module, module.name, source, rule, layer)
                    uses.append(use)
            if n_experts and len(rule.shape) == 3 and tensor in tensors:
                uses += _find_parameters(source, modules, tensors[tensor], rule, layer)
    there = [use for use in uses if use.tensor in tensors]
    used = {use.module.name for use in there}
    tied = {use.module.name for use in uses if use.tensor == OUTPUT_TENSOR} - used
    unknown = [module for module in modules.values() if module.name not in used]
    return _Found(family, there, unknown, tied)


def _find_parameters(
    source: Source,
    modules: Mapping[str, PeftModule],
    info: TensorInfo,
    rule: TensorRule,
    layer: int,
) -> Iterator[_Use]:
    """The stack of experts of ``info`` as a part of a parameter, in which one has all of a layer.

    Transformers 5 makes such of those of each expert.
    """
    if source.scales:  # the same matrix, as blocks
        return
    stem, is_of_experts, matrix = source.name.format(layer=layer, expert="*").partition(".*.")
    if is_of_experts:
        if (joined := _JOINED.get(matrix.removesuffix(".weight"))) is None:
            return
        parameter, rows = joined
        places = [(stem, parameter)]
    else:
        stem, _, parameter = stem.rpartition(".")
        rows = source.columns if source.is_transposed else source.rows
        outer, _, linear = stem.rpartition(".")
        places = [(stem, parameter)]
        if linear in _RENAMED:
            places.append((f"{outer}.experts", _RENAMED[linear]))
    n_cols, n_rows, n_experts = info.shape
    whole = (n_rows if rows is None else 2 * n_rows, n_cols)
    for name, parameter in places:
        for module in (modules.get(name), modules.get(f"{name}.base_layer")):
            # Names do not say of which parameter it is, but shapes do.
            if module and module.shape == whole and module.rank % n_experts == 0:
                key = f"{module.name.replace('.base_layer', '')}.{parameter}"
                part = Source(name=key, rows=rows)
                for expert in range(n_experts):
                    yield _Use(info.name, expert, module, key, part, rule, layer, n_experts)


def _unknown_message(found: _Found, *, is_folder: bool) -> str:
    if found.tied:
        name = quote(min(found.tied))
        return f"module {name} is the embedding in this model, which takes no update; {MERGE}"
    names = [quote(module.name) for module in found.unknown]
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    message = f"the model has no matrix of module {shown}; the adapter is for another model"
    if not is_folder:
        message += (
            ", or its names are not known here: then make a GGUF file of it by "
            "convert_lora_to_gguf.py of llama.cpp"
        )
    return message


def _arrange(
    use: _Use,
    factor: float,
    info: TensorInfo,
    rotated: Order | None,
    sizes: Mapping[str, int],
    factors: Mapping[str, Factors] | None,
) -> Iterator[_Arranged]:
    """One for each of the matrices of a tensor that a module has below each other."""
    module, source, rule = use.module, use.source, use.rule
    name = quote(module.name)
    is_vector = rule.is_vectors or len(info.shape) < 2
    if is_vector or source.change != "none" or source.scales:
        raise FormatError(f"module {name} is {quote(use.tensor)}, which takes no update; {MERGE}")
    row_factors: tuple[float, ...] = ()
    if source.factors:
        if factors is None:
            raise FormatError(
                f"module {name} is multiplied by a number of config.json, which a GGUF file does "
                f"not have; run the folder of the model, or {MERGE}"
            )
        row_factors = expand_factors(factors[source.factors], sizes)
    n_rows, n_cols = module.shape
    try:
        order = rotated if rule.rotated else None
        n_matrices, rows, columns = arrange(source, order, module.shape, sizes)
        out = (len(rows) or n_rows // n_matrices, len(columns) or n_cols)
        out = out[::-1] if source.is_transposed else out
        n_there = info.shape[2] if len(info.shape) > 2 else 1
        if info.shape[:2] != out[::-1] or (source.stacked and n_matrices != n_there):
            raise ValueError(f"that is none of {show_shape(info.shape)} ({use.tensor})")
    except ValueError as error:
        raise FormatError(
            f"module {name} changes a matrix of {n_rows} rows and {n_cols} columns: {error}; the "
            "adapter is for another model"
        ) from None
    n_rows //= n_matrices
    for number in range(n_matrices):
        yield _Arranged(
            use, factor, number * n_rows, n_rows, rows, columns, row_factors, source.is_transposed
        )
