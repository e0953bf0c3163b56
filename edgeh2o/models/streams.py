"""What Gemma 3n has around and in its layers: residual streams, LAuReL, gates that are cut off."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import FormatError
from ..layer_config import LayerConfig
from .keys import ArchitectureKeys

COUNT_KEY = "altup.num_inputs"
ACTIVE_KEY = "altup.active_idx"
CUTOFFS_KEY = "activation_sparsity_scale"
# As the core has them.
N_STREAMS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRule:
    """An architecture whose tokens have ``N_STREAMS`` residual streams (AltUp).

    Attributes:
        laurel_rank: width between the matrices of LAuReL, which files do not say.
        default_cutoff: where the gates of the first ``n_cut_layers`` are cut off, in standard
            deviations above their mean, if the file does not say.
    """

    laurel_rank: int
    default_cutoff: float
    n_cut_layers: int


def with_cutoffs(
    keys: ArchitectureKeys, rule: StreamRule, layers: tuple[LayerConfig, ...]
) -> tuple[LayerConfig, ...]:
    """The layers with the cutoffs of their gates. Raises ``FormatError`` that names the key."""
    for key, value in ((COUNT_KEY, N_STREAMS), (ACTIVE_KEY, 0)):
        found = keys.integer(key, minimum=0, maximum=2**31 - 1, default=value)
        if found != value:
            raise FormatError(
                f"{keys.quoted(key)} is {found}, but only {value} is supported, which the "
                "published models have"
            )
    cutoffs = [
        rule.default_cutoff if i < rule.n_cut_layers else -math.inf for i in range(len(layers))
    ]
    if keys.has(CUTOFFS_KEY):
        array = keys.metadata.get_array(keys.full(CUTOFFS_KEY), kinds="f", length=len(layers))
        cutoffs = [float(number) for number in array.tolist()]
    # Minus infinity is the quantile of a share of 0: nothing is cut off.
    if not all(number == -math.inf or abs(number) < 100.0 for number in cutoffs):
        raise FormatError(
            f"{keys.quoted(CUTOFFS_KEY)} must hold standard deviations between -100 and 100, or "
            "-inf; the file is damaged"
        )
    return tuple(
        replace(layer, gate_cutoff=None if cutoff == -math.inf else cutoff)
        for layer, cutoff in zip(layers, cutoffs, strict=True)
    )
