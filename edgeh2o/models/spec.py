"""How an architecture reads a model file: a declarative table, and the one reader that uses it.

A family is an ``ArchitectureSpec`` passed to ``register_architecture``: no code, only the names
of its tensors, the sizes of their dimensions and a few flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ..config import ModelConfig
from ..errors import FormatError
from ..formats.gguf import GgufFile, TensorInfo
from ..formats.gguf_types import COMPUTABLE_TYPES
from ..formats.metadata import Metadata, quote
from .hyperparameters import Hyperparameters, read_hyperparameters
from .rope import check_factors, half_split_row_order, inverse_frequencies

if TYPE_CHECKING:
    import numpy as np

VECTOR_TYPES = ("F32", "F16", "BF16")
OUTPUT_TENSOR = "output.weight"
_MAX_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One tensor of a family, or one per layer if the name contains ``{layer}``.

    ``shape`` names sizes (see ``Hyperparameters.sizes``), contiguous dimension first. ``rotated``
    marks Q and K, whose rows RoPE turns in pairs.
    """

    name: str
    shape: tuple[str, ...]
    required: bool
    rotated: bool


def tensor(name: str, *shape: str, required: bool = True, rotated: bool = False) -> TensorRule:
    """A ``TensorRule`` written as one line of a table."""
    return TensorRule(name, shape, required, rotated)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureSpec:
    """How files of one ``general.architecture`` are read.

    ``qk_row_order`` is how pairs of rotated rows lie in the file. ``rope_factors`` names an
    optional tensor of frequency divisors. ``scales`` maps a scale of ``ModelConfig`` to the key,
    after the architecture's name, that may override it.
    """

    name: str
    tensors: tuple[TensorRule, ...]
    qk_row_order: Literal["interleaved", "half_split"]
    activation: str
    rope_factors: str | None = None
    scales: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorBinding:
    """A tensor of the file and the name by which the core knows it.

    ``row_order[i]`` is the source row that becomes row ``i`` (for a vector: the source element),
    int32 of shape ``[rows]``; None keeps the order of the file.
    """

    info: TensorInfo
    name: str
    row_order: np.ndarray | None


_ARCHITECTURES: dict[str, ArchitectureSpec] = {}


def register_architecture(spec: ArchitectureSpec) -> ArchitectureSpec:
    """Make ``read_model`` accept files of this architecture. Raises ValueError for a known name."""
    if spec.name in _ARCHITECTURES:
        raise ValueError(f"architecture {spec.name!r} is registered already")
    _ARCHITECTURES[spec.name] = spec
    return spec


def registered_architectures() -> tuple[str, ...]:
    """Names of the architectures that can be read, sorted."""
    return tuple(sorted(_ARCHITECTURES))


def read_model(gguf: GgufFile) -> tuple[ModelConfig, list[TensorBinding]]:
    """Check a file against its architecture; return its configuration and its weights.

    Bindings are in file order. Raises ``FormatError`` that names the key or the tensor.
    """
    try:
        spec = _find_spec(gguf.metadata)
        shape = read_hyperparameters(gguf.metadata, spec.name)
        factors_info = gguf.tensors.get(spec.rope_factors) if spec.rope_factors else None
        factors = _read_rope_factors(gguf, factors_info, shape) if factors_info else ()
        bindings = _bind_tensors(gguf, spec, shape)
        return _make_config(gguf, spec, shape, factors), bindings
    except FormatError as error:
        raise FormatError(f"{gguf.path}: {error}") from None


def _find_spec(metadata: Metadata) -> ArchitectureSpec:
    n_parts = metadata.get_int("split.count", default=1)
    if n_parts > 1:
        raise FormatError(
            f"this is one of {n_parts} parts of a split model; join them with "
            "'llama-gguf-split --merge' of llama.cpp"
        )
    name = metadata.get_str("general.architecture")
    spec = _ARCHITECTURES.get(name)
    if spec is None:
        raise FormatError(
            f"architecture {quote(name)} (metadata key 'general.architecture') is not supported; "
            f"supported: {', '.join(registered_architectures())}"
        )
    return spec


def _make_config(
    gguf: GgufFile, spec: ArchitectureSpec, shape: Hyperparameters, factors: tuple[float, ...]
) -> ModelConfig:
    config = ModelConfig(
        architecture=spec.name,
        n_layers=shape.n_layers,
        model_dim=shape.model_dim,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        rotary_dim=shape.rotary_dim,
        ffn_dim=shape.ffn_dim,
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        norm_eps=shape.norm_eps,
        rope_inv_freq=inverse_frequencies(
            shape.rotary_dim,
            shape.rope_base,
            linear_factor=shape.rope_linear_factor,
            factors=factors,
        ),
        rope_attention_factor=shape.rope_attention_factor,
        attention_scale=1.0 / math.sqrt(shape.head_dim),
        tied_embeddings=OUTPUT_TENSOR not in gguf.tensors,
        activation=spec.activation,
    )
    keys = {name: f"{spec.name}.{key}" for name, key in spec.scales.items()}
    scales: dict[str, Any] = {
        name: gguf.metadata.get_float(key, above=0.0, below=1e6)
        for name, key in keys.items()
        if key in gguf.metadata
    }
    return replace(config, **scales)


def _bind_tensors(
    gguf: GgufFile, spec: ArchitectureSpec, shape: Hyperparameters
) -> list[TensorBinding]:
    rules = _expand_rules(spec, shape.n_layers)
    missing = [n for n, rule in rules.items() if rule.required and n not in gguf.tensors]
    if missing:
        raise FormatError(
            f"{_count(missing, 'tensor')} of architecture {spec.name!r} missing: "
            f"{_some(missing)}; the file is incomplete"
        )
    unknown = [n for n in gguf.tensors if n not in rules and n != spec.rope_factors]
    if unknown:
        raise FormatError(
            f"{_count(unknown, 'tensor')} that architecture {spec.name!r} with {shape.n_layers} "
            f"layers does not use: {_some(unknown)}; the model is of a variant that is not "
            "supported, and leaving them out would give wrong answers"
        )

    sizes = shape.sizes
    row_orders: dict[int, np.ndarray] = {}
    bindings = []
    for name, info in gguf.tensors.items():
        rule = rules.get(name)
        if rule is None:
            continue
        _check_tensor(info, rule, sizes)
        row_order = None
        if rule.rotated and spec.qk_row_order == "interleaved":
            n_rows = info.shape[-1]
            if n_rows not in row_orders:
                row_orders[n_rows] = half_split_row_order(n_rows, shape.head_dim, shape.rotary_dim)
            row_order = row_orders[n_rows]
        bindings.append(TensorBinding(info, name, row_order))
    return bindings


def _expand_rules(spec: ArchitectureSpec, n_layers: int) -> dict[str, TensorRule]:
    rules: dict[str, TensorRule] = {}
    for rule in spec.tensors:
        layers = range(n_layers) if "{layer}" in rule.name else range(1)
        rules.update((rule.name.format(layer=layer), rule) for layer in layers)
    return rules


def _check_tensor(info: TensorInfo, rule: TensorRule, sizes: Mapping[str, int]) -> None:
    expected = tuple(sizes[size] for size in rule.shape)
    if info.shape != expected:
        raise FormatError(
            f"tensor {quote(info.name)} has shape {list(info.shape)}, but the hyperparameters "
            f"make it {list(expected)} ({', '.join(rule.shape)}); the file is damaged or was "
            "converted wrongly"
        )
    supported = COMPUTABLE_TYPES if len(expected) > 1 else VECTOR_TYPES
    if info.type_name not in supported:
        raise FormatError(
            f"tensor {quote(info.name)} is of type {info.type_name}, which is not supported here; "
            f"supported: {', '.join(supported)}; quantise the model to one of these"
        )


def _read_rope_factors(
    gguf: GgufFile, info: TensorInfo, shape: Hyperparameters
) -> tuple[float, ...]:
    import numpy as np

    expected = (shape.rotary_dim // 2,)
    if info.shape != expected or info.type_name != "F32":
        raise FormatError(
            f"tensor {quote(info.name)} is {info.type_name} of shape {list(info.shape)}, but RoPE "
            f"factors must be F32 of shape {list(expected)} (half of rope.dimension_count)"
        )
    factors = tuple(np.frombuffer(gguf.tensor_bytes(info), dtype="<f4").tolist())
    check_factors(info.name, factors)
    return factors


def _count(names: list[str], noun: str) -> str:
    return f"1 {noun}" if len(names) == 1 else f"{len(names)} {noun}s"


def _some(names: list[str]) -> str:
    shown = ", ".join(quote(name) for name in names[:_MAX_NAMES_SHOWN])
    return shown + (", ..." if len(names) > _MAX_NAMES_SHOWN else "")
