"""The masks, lengths and positions that a graph computes for its attention, tried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError
from ..formats.metadata import quote
from ..model_config import ModelConfig
from .cut import Cut, Site
from .graph import describe_node
from .segment_sessions import LoadedSegment
from .sites import AttentionSite
from .windows import ConfigWindow

if TYPE_CHECKING:
    from numpy.typing import NDArray


def check_masks(cut: Cut, segment: LoadedSegment | None, config: ModelConfig) -> list[Site]:
    """The sites of all layers, with the windows that their masks have.

    What a graph computes for masks, lengths and positions is dropped: the attention is causal and
    knows where it stands. So the graph must compute just that, which is tried out. Raises
    FormatError naming the node if it does not.
    """
    if segment is None:
        return list(cut.sites)
    longest = max(16, config.context_length)
    cases = [(longest - 1, 1), (0, 1), (0, 7), (3, 1), (5, 4)]
    windows: dict[str, int] = {}
    for n_past, n_new in cases:
        found = segment.run(segment.context_feed(n_past, n_new, config))
        for site in cut.attention:
            for name, kind in site.masks:
                _check_mask(site, name, kind, found[name], n_past, n_new, windows)
    return [
        replace(site, window=max([site.window, *(windows.get(name, 0) for name, _ in site.masks)]))
        if isinstance(site, AttentionSite)
        else site
        for site in cut.sites
    ]


def add_windows(
    sites: Sequence[Site], window: ConfigWindow | None, context_length: int
) -> list[Site]:
    """The sites of all layers, with the windows of the configuration, where the graph has none.

    Raises FormatError if nothing says which layers have it, or for layers that the model does not
    have, or that are not those of the graph.
    """
    if window is None:
        return list(sites)
    attention = [i for i, site in enumerate(sites) if isinstance(site, AttentionSite)]
    layers = attention if isinstance(window.layers, str) else window.layers
    for layer in layers or ():
        if layer not in attention:
            has = f"{len(sites)} layers" if layer >= len(sites) else "no attention in it"
            raise FormatError(
                f"{window.place} gives layer {layer}, counted from 0, a sliding window, but the "
                f"graph has {has}; the files belong to different models, fetch them again"
            )
    if window.width >= context_length:
        return list(sites)
    own = [i for i, site in enumerate(sites) if isinstance(site, AttentionSite) and site.window]
    if own:
        if layers and layers is not attention and sorted(set(layers)) != own:
            raise FormatError(
                f"{window.place} gives layers {sorted(set(layers))} a sliding window, the "
                f"graph layers {own}; the files belong to different models, fetch them again"
            )
        return list(sites)
    if layers is None:
        raise FormatError(
            f"{window.place} names a sliding window of {window.width} positions, but neither it "
            "nor the graph says which layers have it; name them there (sliding_window.layers of "
            "genai_config.json, layer_types of config.json), or remove sliding_window if none has"
        )
    return [
        replace(site, window=window.width)
        if i in layers and isinstance(site, AttentionSite)
        else site
        for i, site in enumerate(sites)
    ]


def _check_mask(
    site: AttentionSite,
    name: str,
    kind: str,
    value: NDArray[Any],
    n_past: int,
    n_new: int,
    windows: dict[str, int],
) -> None:
    total = n_past + n_new
    if kind == "last position":
        is_right = value.size == 1 and int(value.ravel()[0]) == total - 1
    elif kind == "total length":
        is_right = value.size == 1 and int(value.ravel()[0]) == total
    elif kind == "positions":
        is_right = np.array_equal(value.ravel(), np.arange(n_past, total))
    elif kind == "no padding":
        is_right = bool((value == total).all() if value.size == 1 else (value != 0).all())
    else:
        is_right = _is_causal(value, n_past, n_new, kind, name, windows)
    if not is_right:
        raise FormatError(
            f"{describe_node(site.node)}: its input {quote(name)} is not what a causal decoder "
            f"has for {n_new} tokens after {n_past} ({kind}); this attention is not supported"
        )


def _is_causal(
    value: NDArray[Any], n_past: int, n_new: int, kind: str, name: str, windows: dict[str, int]
) -> bool:
    """Whether a mask, additive or boolean, hides what is to come, or what is past a window."""
    total = n_past + n_new
    if value.ndim < 2 or value.shape[-1] < total or value.shape[-2] not in (1, n_new):
        return False
    rows = value[..., :total]
    if value.dtype == np.bool_:
        visible, hidden = rows, ~rows
    else:
        visible, hidden = rows == 0, rows.astype(np.float64) <= -1e4
    if not np.array_equal(visible, ~hidden):
        return False
    flat = np.broadcast_to(visible, (*visible.shape[:-2], n_new, total)).reshape(-1, n_new, total)
    if not (flat == flat[0]).all():
        return False
    distance = np.arange(n_past, total)[:, None] - np.arange(total)
    if name not in windows:  # the first case: one token at the end of the longest context
        n_visible = int(flat[0, -1].sum())
        windows[name] = 0 if n_visible == total else n_visible
    window = windows[name] or total
    expected = (distance >= 0) & (distance < window)
    if kind == "bias" and flat[0].all():  # the node itself is causal
        return True
    return np.array_equal(flat[0], expected)
