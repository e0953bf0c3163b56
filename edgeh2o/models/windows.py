"""Sliding windows: which layers have one, and how wide it is."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import FormatError
from ..formats.metadata import quote
from ..option_fields import MAX_CONTEXT
from .keys import ArchitectureKeys

WINDOW_KEY = "attention.sliding_window"
PATTERN_KEY = "attention.sliding_window_pattern"
MAX_WINDOW = 2**31 - 1
MAX_PERIOD = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindows:
    """What an architecture assumes of its sliding windows where the file does not say.

    Attributes:
        full_every: every so many layers one has full attention, the last of each period; 0 means
            that all layers have a window.
        is_full_first: it is the first of each period.
        default: width in positions if the file has no key; None: a file without it has no windows.
        n_layers_by_default: the default is for the model of the family with so many layers; 0: all.
        is_required: the file must say how wide they are and which layers have one.
        has_own_heads: heads of layers with a window have another size, which the file gives, and a
            rotary embedding of their own, without the tensors of the others.
        has_own_rotary_dim: files may say how much of a head is rotated in layers with a window.
        halves_full_rotary: layers without one rotate half of what files say.
        rope_base: base of the rotary embedding in layers with a window; None: that of the model.
        has_plain_rope: RoPE scaling is only for the layers with full attention.
        is_chunked: a query sees the chunk of so many positions that it is in, up to its own. Files
            may say that there are none, by a width of 0.
        is_width_required: the file must say how wide they are.
        is_symmetric: a query sees half of the width before it and half of it behind it.
    """

    full_every: int = 0
    is_full_first: bool = False
    default: int | None = None
    n_layers_by_default: int = 0
    is_required: bool = False
    has_own_heads: bool = False
    has_own_rotary_dim: bool = False
    halves_full_rotary: bool = False
    rope_base: float | None = None
    has_plain_rope: bool = False
    is_chunked: bool = False
    is_width_required: bool = False
    is_symmetric: bool = False

    @property
    def may_be_whole(self) -> bool:
        """Whether a width of the whole context or more is none: nothing else goes by it."""
        special = self.rope_base or self.has_own_heads or self.has_plain_rope
        return self.full_every == 0 and not special


def read_windows(keys: ArchitectureKeys, rule: SlidingWindows | None) -> tuple[int, ...]:
    """Width of the window of every layer, 0 for none.

    A query at position ``i`` of a layer with one sees positions ``i - width + 1`` to ``i``, or, of
    one that is symmetric, to ``i + width - 1``.
    """
    default = 0
    if rule and rule.default and rule.n_layers_by_default in (0, keys.n_layers):
        default = rule.default
    is_required = rule is not None and (rule.is_required or rule.is_width_required)
    may_be_none = rule is None or rule.is_chunked or not default
    window = keys.integer(
        WINDOW_KEY,
        minimum=0 if may_be_none and not is_required else 1,
        maximum=MAX_WINDOW,
        default=None if is_required else default,
    )
    if rule is not None and rule.may_be_whole:
        window *= window < keys.integer("context_length", maximum=MAX_CONTEXT)
    if window == 0:
        return (0,) * keys.n_layers
    if rule is None:
        raise FormatError(
            f"{keys.quoted(WINDOW_KEY)} is {window}, but sliding windows are not supported for "
            f"architecture {quote(keys.architecture)}"
        )
    if rule.is_required and not keys.has(PATTERN_KEY):
        raise FormatError(f"{keys.quoted(PATTERN_KEY)} is missing; the file is incomplete")
    width = window // 2 + 1 if rule.is_symmetric else window
    return tuple(width * has_window for has_window in _read_pattern(keys, rule))


def _read_pattern(keys: ArchitectureKeys, rule: SlidingWindows) -> tuple[bool, ...]:
    """An array with an entry per layer, or the period of an alternating pattern."""
    import numpy as np  # here, because the weights are being read before it is imported

    name = keys.full(PATTERN_KEY)
    if isinstance(keys.metadata.get(name), np.ndarray):
        return keys.flags(PATTERN_KEY)
    period = keys.metadata.get_int(name, default=rule.full_every, minimum=0, maximum=MAX_PERIOD)
    full = 0 if rule.is_full_first else period - 1
    return tuple(period == 0 or layer % period != full for layer in range(keys.n_layers))
