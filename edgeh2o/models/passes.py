"""Layers that are gone through several times: how often, and in which order."""

from __future__ import annotations

from ..errors import FormatError
from ..formats.metadata import Metadata, quote
from ..layer_config import LayerConfig
from .keys import ArchitectureKeys

LOOPS_KEY, LOOP_NORM_KEY = "num_loops", "skip_loop_final_norm"
STACK_KEY, HIGH_KEY, LOW_KEY = "hrm.layers_per_stack", "hrm.h_cycles", "hrm.l_cycles"


def read_loops(keys: ArchitectureKeys, max_layers: int) -> tuple[tuple[int, ...], bool]:
    """Passes over the one stack of a file, none for one, and whether there are norms between."""
    most = max_layers // keys.n_layers
    n_loops = keys.integer(LOOPS_KEY, minimum=1, maximum=most, default=1)
    if n_loops == 1:
        return (), False
    return (0,) * n_loops, not keys.metadata.get_bool(keys.full(LOOP_NORM_KEY), default=False)


def read_cycles(
    metadata: Metadata, architecture: str, n_layers: int
) -> tuple[tuple[int, ...], int]:
    """Passes over a low and a high stack (HRM), and the layers of both together.

    ``n_layers`` are those of all passes, as the file counts them. A cycle goes through the low
    stack some times and then through the high one. Raises ``FormatError`` that names the key.
    """
    per_stack, n_high, n_low = (
        metadata.get_int(f"{architecture}.{key}", minimum=1, maximum=n_layers)
        for key in (STACK_KEY, HIGH_KEY, LOW_KEY)
    )
    if per_stack * n_high * (n_low + 1) != n_layers:
        raise FormatError(
            f"metadata key {quote(f'{architecture}.block_count')} is {n_layers}, but {n_high} "
            f"cycles of {n_low} passes through one stack of {per_stack} layers and one through the "
            "other are another number; the file is damaged or was converted wrongly"
        )
    return ((0,) * n_low + (1,)) * n_high, 2 * per_stack


def layers_of_passes(
    own: tuple[LayerConfig, ...], passes: tuple[int, ...]
) -> tuple[LayerConfig, ...]:
    """The layers of all passes, of those of all stacks."""
    if not passes:
        return own
    n = len(own) // (1 + max(passes))
    return tuple(layer for stack in passes for layer in own[stack * n : (stack + 1) * n])
