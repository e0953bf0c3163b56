"""The rotary position embedding that a run asks for, where it is not that of the file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

from .errors import UsageError
from .option_fields import MAX_CONTEXT, check_int, check_real, label, option

ROPE_SCALINGS = ("none", "linear", "yarn")
_YARN_FIELDS = ("original_context", "beta_fast", "beta_slow")
_KEEP_ROPE = "leave it out to keep the file's"
_ROPE_RANGES = {
    "scale": (1e-3, 1e6),
    "freq_scale": (1e-6, 1e3),
    "freq_base": (1.0, 1e12),
    "beta_fast": (0.0, 1e6),
    "beta_slow": (0.0, 1e6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding other than a GGUF file says; None leaves it as it is.

    ``scaling`` stretches positions over ``scale`` times the original context: "linear" divides all
    frequencies (Chen et al. 2023), "yarn" the slow ones, with a correction of the attention (Peng
    et al. 2023), "none" undoes what the file says. ``freq_scale`` is the inverse of ``scale``.
    """

    scaling: str | None = option(
        None,
        "--rope-scaling",
        help="how positions are stretched beyond the trained length (default: as the file says)",
        choices=ROPE_SCALINGS,
    )
    scale: float | None = option(
        None, "--rope-scale", help="by what factor (default: as the file says)", metavar="X"
    )
    freq_scale: float | None = option(
        None, "--rope-freq-scale", help="the inverse of --rope-scale, in its place", metavar="X"
    )
    freq_base: float | None = option(
        None,
        "--rope-freq-base",
        help="base of the frequencies, as in NTK-aware scaling (default: as the file says)",
        metavar="X",
    )
    original_context: int | None = option(
        None,
        "--yarn-orig-ctx",
        help="positions before the stretching, for yarn (default: as the file says)",
    )
    beta_fast: float | None = option(
        None,
        "--yarn-beta-fast",
        help="turns over the original context from which a frequency stays (default: 32)",
        metavar="X",
    )
    beta_slow: float | None = option(
        None,
        "--yarn-beta-slow",
        help="turns over it up to which a frequency is divided (default: 1)",
        metavar="X",
    )

    def __post_init__(self) -> None:
        if self.scaling is not None and self.scaling not in ROPE_SCALINGS:
            raise UsageError(
                f"scaling (--rope-scaling) must be one of {', '.join(ROPE_SCALINGS)}, "
                f"got {self.scaling!r}"
            )
        for name, (low, high) in _ROPE_RANGES.items():
            if getattr(self, name) is not None:
                allowed = f"above {low:g} and below {high:g}"
                check_real(self, name, allowed, partial(_is_between, low, high), _KEEP_ROPE)
        if self.original_context is not None:
            check_int(self, "original_context", 1, MAX_CONTEXT, _KEEP_ROPE)
        if self.freq_scale is not None and self.scale is not None:
            raise UsageError("--rope-freq-scale is the inverse of --rope-scale; give one of them")
        if self.scaling == "none" and self.factor not in (None, 1.0):
            raise UsageError(
                "--rope-scaling none stretches nothing; leave --rope-scale out, or take yarn"
            )
        if self.scaling not in (None, "yarn") and self.yarn_labels:
            raise UsageError(
                f"{self.yarn_labels} changes nothing with --rope-scaling {self.scaling}; "
                "leave it out, or take --rope-scaling yarn"
            )

    @property
    def factor(self) -> float | None:
        """By what positions are stretched; None is what the file says."""
        return self.scale if self.freq_scale is None else 1.0 / self.freq_scale

    @property
    def yarn_labels(self) -> str:
        """What is set that only YaRN has, as errors name it; empty without any."""
        given = [name for name in _YARN_FIELDS if getattr(self, name) is not None]
        return ", ".join(label(self, name) for name in given)

    def to_dict(self) -> dict[str, str | float]:
        """What is other than in the file."""
        return {name: value for name, value in asdict(self).items() if value is not None}


ROPE_OF_FILE = RopeConfig()


def _is_between(low: float, high: float, value: float) -> bool:
    return low < value < high
