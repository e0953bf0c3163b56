"""Sizes and constants of an ONNX model, from its graph and the files beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError
from ..formats.metadata import quote
from ..model_config import ModelConfig
from ..runners.base import SessionShape
from .convolutions import ConvolutionSite
from .cut import LOGITS, Cut, Site
from .folder import OnnxFolder
from .graph import OnnxGraph
from .sites import AttentionSite

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Of models that do not say for how many positions they were made.
DEFAULT_CONTEXT = 2048
# What a file of `edgeh2o export-onnx` knows of the weights: whose budget table is theirs.
FINGERPRINT_PROPERTY = "edgeh2o.fingerprint"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxLayer:
    """Heads of a layer, and the positions that its window has; 0: all.

    One without heads is a short convolution, which keeps ``n_recurrent`` numbers.
    """

    n_heads: int
    n_kv_heads: int
    window: int = 0
    n_recurrent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxConfig(ModelConfig):
    """With its layers; their windows, and ``model_dim``, once it was loaded."""

    layers: tuple[OnnxLayer, ...]
    model_dim: int = 0
    latent: None = None

    @property
    def layer_heads(self) -> Sequence[tuple[int, int]]:
        return [(layer.n_heads, layer.n_kv_heads) for layer in self.layers]

    @property
    def is_recurrent(self) -> bool:
        return any(layer.n_recurrent for layer in self.layers)

    @property
    def has_like_layers(self) -> bool:
        return not self.is_recurrent


def read_config(folder: OnnxFolder, graph: OnnxGraph, cut: Cut) -> OnnxConfig:
    """Sizes from the graph, checked against the configuration. Raises FormatError."""
    sites = cut.attention
    found = {"n_layers": len(cut.sites), **_head_sizes(graph, sites), **_vocab_size(graph)}
    sizes = {**folder.sizes, **found}
    for name, value in found.items():
        if folder.sizes.get(name, value) != value:
            raise FormatError(
                f"{folder.config_name} says {name} = {folder.sizes[name]}, the graph has {value}; "
                "the files belong to different models"
            )
    if "head_dim" not in sizes and {"model_dim", "n_heads"} <= sizes.keys():
        sizes["head_dim"] = sizes["model_dim"] // sizes["n_heads"]
    sizes.setdefault("n_kv_heads", sizes.get("n_heads", 0))
    for name in ("n_heads", "n_kv_heads", "head_dim", "vocab_size"):
        if sizes.get(name, 0) <= 0:
            raise FormatError(
                f"neither the graph nor {folder.config_name} says how large {name} is; "
                "put config.json or genai_config.json of the model beside it"
            )
    if sizes["n_heads"] % sizes["n_kv_heads"]:
        raise FormatError(
            f"{sizes['n_heads']} query heads cannot share {sizes['n_kv_heads']} KV heads"
        )
    tables = [
        tensor.shape[0]
        for site in sites
        if site.rotary is not None and (tensor := graph.constant(site.rotary.cos)) is not None
    ]
    context = sizes.get("context_length", min(tables, default=DEFAULT_CONTEXT))
    tables += [site.max_context for site in sites if site.max_context is not None]
    own_print = graph.properties.get(FINGERPRINT_PROPERTY, "")
    is_print = re.fullmatch(r"[0-9a-f]{32}", own_print) is not None
    scale = sites[0].scale or sizes["head_dim"] ** -0.5
    return OnnxConfig(
        architecture=folder.architecture,
        has_key_bias=folder.architecture.startswith("qwen2"),
        n_layers=len(cut.sites),
        layers=make_layers(cut.sites, sizes["n_heads"], sizes["n_kv_heads"]),
        n_heads=sizes["n_heads"],
        n_kv_heads=sizes["n_kv_heads"],
        head_dim=sizes["head_dim"],
        vocab_size=sizes["vocab_size"],
        context_length=min([context, *tables]),
        attention_scale=scale,
        attention_soft_cap=sites[0].soft_cap,
        fingerprint=own_print if is_print else graph.digest,
    )


def make_layers(sites: Sequence[Site], n_heads: int, n_kv_heads: int) -> tuple[OnnxLayer, ...]:
    """The layers of a model whose attention has so many heads."""
    return tuple(
        OnnxLayer(n_heads=n_heads, n_kv_heads=n_kv_heads, window=site.window)
        if isinstance(site, AttentionSite)
        else OnnxLayer(n_heads=0, n_kv_heads=0, n_recurrent=site.n_recurrent)
        for site in sites
    )


def _head_sizes(graph: OnnxGraph, sites: Sequence[AttentionSite]) -> dict[str, int]:
    """Sizes that the graph declares. Raises FormatError if layers differ."""
    sizes: dict[str, int] = {}
    for site in sites:
        own: dict[str, int] = {}
        if site.n_heads is not None:
            own["n_heads"] = site.n_heads
        if site.n_kv_heads is not None:
            own["n_kv_heads"] = site.n_kv_heads
        past = graph.inputs.get(site.past_key)
        dims = () if past is None else past.dims or ()
        if len(dims) == 4:
            own |= {name: dims[i] for name, i in (("n_kv_heads", 1), ("head_dim", 3)) if dims[i]}
            if site.n_kv_heads is not None and own["n_kv_heads"] != site.n_kv_heads:
                raise FormatError(
                    f"the cache {quote(site.past_key)} has {dims[1]} KV heads, its attention "
                    f"{site.n_kv_heads}"
                )
        for name, value in own.items():
            if sizes.setdefault(name, value) != value:
                raise FormatError(
                    f"the layers differ in {name} ({sizes[name]} and {value}); such models are "
                    "not supported"
                )
    same = {(site.scale, site.soft_cap) for site in sites}
    if len(same) > 1:
        raise FormatError(f"the layers differ in scale or soft cap: {sorted(map(str, same))}")
    return sizes


def _vocab_size(graph: OnnxGraph) -> dict[str, int]:
    dims = graph.output_dims(LOGITS)
    return {"vocab_size": dims[-1]} if dims and dims[-1] > 0 else {}


def attention_args(config: OnnxConfig, shape: SessionShape) -> dict[str, Any]:
    """Arguments of a ``_core.ChunkedAttention`` for all layers, but its policy."""
    return {
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "n_layers": config.n_layers,
        "scale": config.attention_scale,
        "soft_cap": config.attention_soft_cap,
        "recurrent": [layer.n_recurrent for layer in config.layers],
        **{name: value for name, value in shape.sizes().items() if name != "all_rows"},
    }


def read_rotary(
    graph: OnnxGraph, site: Site, config: ModelConfig
) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """Tables of cos and sin [positions, pairs] of a node that rotates, else None.

    Raises FormatError for tables that do not fit the heads.
    """
    if not isinstance(site, AttentionSite) or site.rotary is None:
        return None
    tables = []
    for name in (site.rotary.cos, site.rotary.sin):
        tensor = graph.constant(name)
        if tensor is None:
            raise FormatError(f"the rotary table {quote(name)} is no constant of the model")
        tables.append(tensor.array().astype(np.float32, copy=False))
    cos, sin = tables
    if cos.ndim != 2 or cos.shape != sin.shape or not 1 <= cos.shape[1] <= config.head_dim // 2:
        raise FormatError(
            f"the rotary tables {quote(site.rotary.cos)} and {quote(site.rotary.sin)} have shapes "
            f"{list(cos.shape)} and {list(sin.shape)}, the heads {config.head_dim} dimensions"
        )
    return cos, sin


def read_sinks(graph: OnnxGraph, site: Site, config: ModelConfig) -> NDArray[np.float32] | None:
    """The sinks [heads] of a node that has some, else None. Raises FormatError for wrong ones."""
    if not isinstance(site, AttentionSite) or not site.sinks:
        return None
    tensor = graph.constant(site.sinks)
    if tensor is None:
        raise FormatError(f"the attention sinks {quote(site.sinks)} are no constant of the model")
    sinks = tensor.array().astype(np.float32).reshape(-1)
    if len(sinks) != config.n_heads or not np.isfinite(sinks).all():
        raise FormatError(
            f"the attention sinks {quote(site.sinks)} are not {config.n_heads} finite numbers"
        )
    return sinks


def read_taps(graph: OnnxGraph, site: Site) -> NDArray[np.float32] | None:
    """The weights [n_taps, dim] of a convolution, else None."""
    if not isinstance(site, ConvolutionSite):
        return None
    tensor = graph.constant(site.weights)
    assert tensor is not None, "it was found"
    return np.ascontiguousarray(tensor.array()[:, 0].T, np.float32)


def check_finite(graph: OnnxGraph) -> None:
    """Raises FormatError, naming the constant, for one with a NaN or infinite value."""
    for tensor in graph.tensors.values():
        if tensor.elem_type in (1, 10, 11) and not np.isfinite(tensor.array()).all():
            raise FormatError(
                f"{graph.path}: constant {quote(tensor.name)} has a NaN or infinite value; the "
                "file is damaged or was converted wrongly, fetch it again"
            )
