"""config.json as the metadata that a GGUF file of the model would have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import FormatError
from ...formats.metadata import Metadata, StoredNumbers, StoredValue, quote
from ..hyperparameters import MAX_LAYERS
from ..layer_keys import MAX_HEAD_DIM
from ..spec import ArchitectureSpec, find_architecture
from .families import FAMILIES, TEXT_TYPES, expected_values
from .family import TransformersFamily
from .rope import read_rope
from .settings import Settings
from .sources import Factors

_NEEDED = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "intermediate_size": "feed_forward_length",
}
_RENAMED = {"num_local_experts": "num_experts"}
# What the family is found by.
_TAKEN_BEFORE = ("model_type", "architectures", "quantization_config", "text_config")
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedFolder:
    """What config.json says: the family, GGUF's metadata, and small tables that GGUF has as
    tensors of F32. ``ties``: the output is the embedding; None: as the weights have it. ``factors``
    are those that sources name."""

    family: TransformersFamily
    spec: ArchitectureSpec
    metadata: Metadata
    tables: Mapping[str, bytes]
    factors: Mapping[str, Factors]
    ties: bool | None


def describe_config(values: Mapping[str, Any], name: str) -> DescribedFolder:
    """Reads the object of a config.json. ``name`` is what the model is called.

    Raises FormatError that names the key which is missing, malformed or not understood.
    """
    settings = Settings(values)
    family = _find_family(settings)
    settings = Settings(_rename(values, family), ignored=family.ignored)
    for key in _TAKEN_BEFORE:
        settings.take(key)
    spec = find_architecture(family.architecture)
    for key, allowed in expected_values(family).items():
        settings.require(key, allowed)
    keys: dict[str, Any] = {
        suffix: settings.integer(key) for key, suffix in _NEEDED.items() if key not in family.absent
    }
    if keys["block_count"] > MAX_LAYERS:
        raise FormatError(
            f"{settings.label('num_hidden_layers')} is {keys['block_count']}, more than "
            f"{MAX_LAYERS}"
        )
    n_heads, width = keys["attention.head_count"], keys["embedding_length"]
    keys["attention.head_count_kv"] = settings.integer("num_key_value_heads", default=n_heads)
    head_dim = settings.integer("head_dim", default=max(width // n_heads, 1))
    if head_dim > MAX_HEAD_DIM:
        raise FormatError(f"{settings.label('head_dim')} is {head_dim}, more than {MAX_HEAD_DIM}")
    keys["attention.key_length"] = keys["attention.value_length"] = head_dim
    kind = "" if spec.norm == "layer" else "rms_"
    eps = family.norm_eps
    keys[f"attention.layer_norm_{kind}epsilon"] = (
        settings.number("rms_norm_eps") if eps is None else eps
    )
    rotary_dim = _read_rotary_dim(settings, head_dim, family.rotary_share)
    keys["rope.dimension_count"] = rotary_dim
    _read_numbers(settings, family, keys)
    _read_windows(settings, family, spec, keys)
    _read_no_rope(settings, keys["block_count"])
    _check_activation(settings, family)
    if family.has_query_scalar:
        _check_query_scalar(settings, spec, keys)
    factors = family.read_more(settings, keys) if family.read_more else None
    rope = read_rope(settings, family, keys["rope.dimension_count"], keys["context_length"])
    ties = settings.flag("tie_word_embeddings")
    settings.refuse_rest()
    stored: dict[str, StoredValue] = {
        "general.architecture": spec.name,
        "general.name": name,
        **{f"{spec.name}.{suffix}": value for suffix, value in {**keys, **rope.keys}.items()},
    }
    return DescribedFolder(
        family=family,
        spec=spec,
        metadata=Metadata(stored),
        tables=rope.tables,
        factors=factors or {},
        ties=False if family.unties else True if ties is None and family.ties_by_default else ties,
    )


def _rename(values: Mapping[str, Any], family: TransformersFamily) -> dict[str, Any]:
    """Keys of texts, by the names that all others have."""
    texts = values.get("text_config")
    if isinstance(texts, dict):  # a model of images too, which texts do without
        outer = ("tie_word_embeddings", "tokenizer_class", *family.ignored)
        values = {**texts, **{key: values[key] for key in outer if key in values}}
    layers = values.get("layers_block_type")
    if isinstance(layers, list):  # from which transformers 5 counts them
        values = {"num_hidden_layers": len(layers), **values}
    renamed = {**_RENAMED, **family.renamed}
    return dict(family.defaults) | {
        renamed[key] if key in renamed and renamed[key] not in values else key: value
        for key, value in values.items()
        if value is not None or key not in family.renamed
    }


def _find_family(settings: Settings) -> TransformersFamily:
    name = settings.take("model_type")
    texts = settings.section("text_config")
    is_of_images = isinstance(name, str) and name in TEXT_TYPES
    if is_of_images:
        known = TEXT_TYPES[str(name)]
        inner = texts.take("model_type", known[0]) if texts else known[0]
        name = inner if inner in known else f"{name} of {inner}"
    family = FAMILIES.get(name) if isinstance(name, str) else None
    quantisation = settings.take("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    has_blocks = method == "mxfp4" and family is not None and family.has_mxfp4
    if quantisation is not None and not has_blocks:
        raise FormatError(
            f"{settings.label('quantization_config')}: the weights are quantised already "
            f"({quote(str(method))}), which cannot be read; fetch the original model or a GGUF file"
        )
    if family is None:
        names = ", ".join(sorted({*FAMILIES, *TEXT_TYPES}))
        raise FormatError(
            f"{settings.label('model_type')} is {quote(str(name))}, which is not supported from "
            f"safetensors; supported: {names}. Use a GGUF file of the model"
        )
    kinds = settings.take("architectures")
    if kinds is not None and not isinstance(kinds, list):
        raise FormatError(f"{settings.label('architectures')} must be a list of names")
    endings = ("ForCausalLM", *(("ForConditionalGeneration",) if is_of_images else ()))
    if kinds and not any(str(kind).endswith(endings) for kind in kinds):
        raise FormatError(
            f"{settings.label('architectures')} is {kinds!r:.60}: this is no model that generates "
            "text; use one whose architecture ends in ForCausalLM"
        )
    return family


def _read_rotary_dim(settings: Settings, head_dim: int, usual: float) -> int:
    share = settings.number("partial_rotary_factor", default=usual)
    parameters = settings.take("rope_parameters")
    if isinstance(parameters, dict) and "partial_rotary_factor" in parameters:
        share = Settings(parameters).number("partial_rotary_factor")
    if not 0.0 < share <= 1.0:
        raise FormatError(
            f"{settings.label('partial_rotary_factor')} is {share:g}, but must be above 0 and at "
            "most 1"
        )
    return int(head_dim * share)


def _read_numbers(settings: Settings, family: TransformersFamily, keys: dict[str, Any]) -> None:
    for key, suffix in family.keys.items():
        if suffix.endswith(("count", "length")):
            keys[suffix] = settings.integer(key)
        else:
            keys[suffix] = settings.number(key)


def _read_windows(
    settings: Settings, family: TransformersFamily, spec: ArchitectureSpec, keys: dict[str, Any]
) -> None:
    """The width of windows, and which layers have one where that is not the usual pattern."""
    if family.needs_windows and not settings.has("sliding_window"):
        raise FormatError(
            f"{settings.label('sliding_window')} is missing; it must be a width, or null"
        )
    width = settings.take("sliding_window")
    settings.require("sliding_window_size", (width, None))  # as Gemma 2 repeats it
    kinds = settings.kinds("layer_types", keys["block_count"], (*_LAYER_TYPES, *family.layer_types))
    settings.take("max_window_layers")
    period = settings.take("sliding_window_pattern", settings.take("_sliding_window_pattern"))
    n_layers = keys["block_count"]
    pattern = [_LAYER_TYPES.get(kind, False) for kind in kinds] if kinds else None
    if not family.has_windows:
        if pattern and any(pattern):
            raise FormatError(
                f"{settings.label('layer_types')}: layers with a sliding window are not supported "
                "for this model; use a GGUF file of it"
            )
        return
    if width is None:
        if pattern and any(pattern):
            raise FormatError(f"{settings.label('sliding_window')} is missing")
        return
    keys["attention.sliding_window"] = settings.integer("sliding_window")
    usual = spec.windows.full_every if spec.windows else 0
    if pattern is None and period is not None:
        if type(period) is not int or period < 1:
            raise FormatError(
                f"{settings.label('sliding_window_pattern')} is {period!r:.40}, but must be a "
                "whole number of at least 1"
            )
        pattern = [(layer + 1) % period != 0 for layer in range(n_layers)]
    if pattern and pattern != [not usual or (i + 1) % usual != 0 for i in range(n_layers)]:
        keys["attention.sliding_window_pattern"] = StoredNumbers(bytes(pattern), "?")


def _read_no_rope(settings: Settings, n_layers: int) -> None:
    """SmolLM3's list of the layers with positions, 1 for those; it must be its usual one."""
    given = settings.take("no_rope_layers")
    if given is not None and given != [int((i + 1) % 4 != 0) for i in range(n_layers)]:
        raise FormatError(
            f"{settings.label('no_rope_layers')} is not every fourth layer, which is not supported"
        )


def _check_activation(settings: Settings, family: TransformersFamily) -> None:
    names = [settings.take("hidden_activation"), settings.take("hidden_act")]
    name = next((each for each in names if each is not None), family.activations[0])
    if name not in family.activations:
        raise FormatError(
            f"{settings.label('hidden_act')} is {name!r:.40}, but the model is only known with "
            f"{family.activations[0]}"
        )


def _check_query_scalar(
    settings: Settings, spec: ArchitectureSpec, keys: Mapping[str, Any]
) -> None:
    n_heads, width = keys["attention.head_count"], keys["embedding_length"]
    is_by_width = keys["block_count"] == spec.n_layers_scaled_by_width
    expected = width / n_heads if is_by_width else keys["attention.key_length"]
    scalar = settings.number("query_pre_attn_scalar", default=expected)
    if not math.isclose(scalar, expected, rel_tol=1e-6):
        raise FormatError(
            f"{settings.label('query_pre_attn_scalar')} is {scalar:g}, but {expected:g} is what "
            "this architecture computes with"
        )
