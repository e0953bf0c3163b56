"""The instruction sets that the kernels were built for, and the one in use.

``EDGEH2O_ISA`` in the environment forces one before the first import.
"""

from __future__ import annotations

from .errors import UsageError


def available() -> list[str]:
    """Names of the instruction sets that this build has and this machine runs, weakest first."""
    from . import _core

    return _core.available_isas()


def active() -> str:
    """Name of the instruction set that the kernels use now.

    Raises UsageError that lists what exists when ``EDGEH2O_ISA`` names none of them.
    """
    from . import _core

    try:
        return _core.active_isa()
    except ValueError as error:
        raise UsageError(f"EDGEH2O_ISA: {error}") from None


def use(name: str) -> None:
    """Takes the kernels of ``name`` for models loaded from now on.

    Raises UsageError that lists what exists when this machine or this build has no such name.
    """
    from . import _core

    try:
        _core.use_isa(name)
    except ValueError as error:
        raise UsageError(f"isa (--isa): {error}") from None


def attention_precision(name: str, *, has_key_bias: bool = False, may_round: bool = False) -> str:
    """The number type that the products of prefill attention take: "f32", "bf16", "f16" or "int8".

    "auto" is what the instruction set in use is known to be fastest with, and "f32" for keys with a
    bias: Qwen 2 has some in the hundreds, where a step of bf16 is 1 or 2. It is "int8" only for
    those who ``may_round``, where there are such products. Raises UsageError for a type of which
    the instruction set has no products.
    """
    from . import _core

    if name == "auto":
        if may_round and "int8" in _core.attention_precisions():
            return "int8"
        return "f32" if has_key_bias else _core.best_attention_precision()
    if name not in _core.attention_precisions():
        raise UsageError(
            f"attention_precision (--attention-precision) {name}: the instruction set {active()} "
            "has no such products; use auto or f32"
        )
    return name
