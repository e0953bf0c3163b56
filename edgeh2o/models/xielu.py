"""xIELU (Huang and Schlag 2024): an activation with numbers of its own in every layer."""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import FormatError
from ..formats.metadata import Metadata, quote
from ..layer_config import LayerConfig, Xielu

# Without the architecture's name, as llama.cpp has them.
_KEYS = ("xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps")
_LARGEST = 1e3


def with_xielu(metadata: Metadata, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """The layers with the numbers of their activations, of which files hold the logarithms.

    Raises ``FormatError`` that names the key.
    """
    columns = [_read(metadata, key, len(layers)) for key in _KEYS]
    return tuple(
        replace(
            layer,
            xielu=Xielu(
                positive=math.log1p(math.exp(alpha_p)),
                negative=beta + math.log1p(math.exp(alpha_n)),
                beta=beta,
                eps=eps,
            ),
        )
        for layer, alpha_p, alpha_n, beta, eps in zip(layers, *columns, strict=True)
    )


def _read(metadata: Metadata, key: str, n_layers: int) -> list[float]:
    """A number per layer: of an array, or the same for all."""
    if isinstance(metadata.get(key), (int, float)):
        numbers = [metadata.get_float(key)] * n_layers
    else:
        numbers = [float(number) for number in metadata.get_array(key, kinds="f").tolist()]
    # The softplus of more overflows; eps takes the place of 0, and is below it.
    largest = 0.0 if key.endswith("eps") else 80.0
    if len(numbers) != n_layers or not all(-_LARGEST < number <= largest for number in numbers):
        raise FormatError(
            f"metadata key {quote(key)} must hold {n_layers} numbers, each above {-_LARGEST:g} and "
            f"at most {largest:g}; the file is damaged"
        )
    return numbers
