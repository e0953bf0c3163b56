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


def attention_precision(
    name: str, *, has_key_bias: bool = False, has_even_keys: bool = True, may_round: bool = False
) -> str:
    """The number type that the products of prefill attention take.

    That is "f32", "bf16", "f16", "int8" or "int16". "auto" is what the instruction set in use is
    known to be fastest with. It is "f32" instead of "bf16" for keys with a bias, of which Qwen 2
    has some in the hundreds, where a step of bf16 is 1 or 2, and instead of integers unless keys
    are even: a few large dimensions leave few steps for the others. It is "int8" only for those who
    ``may_round`` such keys, where there are such products. Raises UsageError for a type of which
    the instruction set has no products.
    """
    from . import _core

    if name == "auto":
        if has_even_keys and may_round and "int8" in _core.attention_precisions():
            return "int8"
        best: str = _core.best_attention_precision()
        is_fit = has_even_keys if best == "int16" else not has_key_bias
        return best if is_fit else "f32"
    if name not in _core.attention_precisions():
        raise UsageError(
            f"attention_precision (--attention-precision) {name}: the instruction set {active()} "
            "has no such products; use auto or f32"
        )
    return name
