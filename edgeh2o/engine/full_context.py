"""What goes on being read once an answer has filled the context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..errors import ResourceError, UsageError
from ..runners.runner_calls import free_positions, n_evicted, plan_calls
from ..sampling_config import EVICT_WHEN_FULL, STOP_WHEN_FULL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..attention.base import SparseAttentionConfig
    from ..runners.base import EvictingRunner, Runner, SessionShape
    from .models import LoadedModel

# A shorter context would be read again every few tokens.
LEAST_CONTEXT = 64
# Tokens that an eviction drops, but no more than a quarter of the context.
EVICTED_TOKENS = 256


def prepare_full_context(runner: Runner, way: str) -> None:
    """Lets ``runner`` go on past its context, as ``context_full`` says.

    Raises UsageError for a context that is too short for that, and for a runner that cannot.
    """
    check_length(runner.max_context, way)
    allow_eviction(runner, way == EVICT_WHEN_FULL)


def check_length(context: int, way: str) -> None:
    """Raises UsageError for a context that is too short to go on past it."""
    if way != STOP_WHEN_FULL and context < LEAST_CONTEXT:
        raise UsageError(
            f"a context of {context} positions is too short to go on past its end "
            f"(--context-full {way}); use -c {LEAST_CONTEXT} or more"
        )


def allow_eviction(runner: Any, is_allowed: bool) -> None:
    """As ``EvictingRunner`` has it. Raises UsageError for a runner that cannot."""
    allow = getattr(runner, "allow_eviction", None)
    if allow is None and is_allowed:
        raise no_eviction()
    if allow is not None:
        with _explained():
            allow(is_allowed)


def check_eviction(
    model: LoadedModel, attention: SparseAttentionConfig, shape: SessionShape
) -> None:
    """Raises what ``allow_eviction`` would for a session that is yet to be made."""
    check = getattr(model, "check_eviction", None)
    if check is None:
        raise no_eviction()
    with _explained():
        check(attention, shape)


def no_eviction() -> UsageError:
    """What is said where runners of a kind cannot evict."""
    return UsageError(
        "--context-full evict is for GGUF and safetensors models on the CPU; "
        "use --context-full shift"
    )


@contextmanager
def _explained() -> Iterator[None]:
    """Makes a UsageError of what the core refuses."""
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"the context cannot go on by --context-full evict: {error}") from None


def make_room(runner: Runner, n_tokens: int) -> int:
    """Evicts until ``n_tokens`` fit, a quarter of the context at most; returns how many went."""
    n_missing = n_tokens - free_positions(runner)
    if n_missing <= 0:
        return 0
    n = max(n_missing, min(EVICTED_TOKENS, runner.max_context // 4))
    cast("EvictingRunner", runner).evict(n)
    return n


def cut_call(call: slice, runner: Runner) -> Iterator[slice]:
    """The parts of a call that ``make_room`` makes room for, each when those before were read."""
    step = runner.max_context // 4
    step -= step % min(step, runner.chunk_size)
    start = call.start
    while start < call.stop:
        n_left = call.stop - start
        fits = n_left <= max(step, free_positions(runner))
        # Two alike in the end, rather than one of a few tokens: the last ones may read more.
        stop = (
            call.stop if fits else start + (n_left + 1) // 2 if n_left < 2 * step else start + step
        )
        yield slice(start, stop)
        start = stop


def choose_kept(tokens: NDArray[np.int32], n_prompt: int) -> NDArray[np.int32]:
    """Of the ``tokens`` [n] of a full context, about half.

    The beginning of the prompt, which says what is to be done, but no more than an eighth, and the
    latest ones.
    """
    n_kept = max(1, len(tokens) // 2)
    n_first = min(n_prompt, len(tokens) // 8)
    return np.concatenate([tokens[:n_first], tokens[len(tokens) - (n_kept - n_first) :]])


def shift_context(
    runner: Runner, n_prompt: int, batch_size: int, *, stays_open: bool
) -> NDArray[np.int32]:
    """Reads the kept half again, from position 0; returns its tokens.

    The cache then holds what it would after a prompt of these tokens: nothing that was dropped
    leaves a trace in keys or values, and every kind of cache and of layer can do it.
    """
    kept = choose_kept(np.asarray(runner.token_ids, np.int32), n_prompt)
    runner.reset()
    for call in plan_calls(0, len(kept), runner, batch_size):
        runner.prefill(kept[call], is_last=call.stop == len(kept), stays_open=stays_open)
    return kept


def require_whole(runner: Runner) -> None:
    """Raises ResourceError for a runner of whose cache something was evicted."""
    if n := n_evicted(runner):
        raise ResourceError(
            f"the session cannot be saved: {n} of its tokens were evicted, as --context-full evict "
            "has it; use --context-full shift, or a larger context (-c) that holds them all"
        )
