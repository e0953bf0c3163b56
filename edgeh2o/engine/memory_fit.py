"""Whether a session fits in memory, told before anything of it is allocated."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping

from ..attention.base import SparseAttentionConfig
from ..errors import ResourceError
from ..host import memory
from ..runners.base import SessionShape

# Contexts that nobody asked for are a multiple of it.
CONTEXT_STEP = 256
# Left to the interpreter and its libraries when memory is counted, and the rest of it for a context
# that was checked when the weights were loaded: part of it may be in use since.
RESERVE_BYTES = 64 * 2**20
RECHECK_RESERVE_BYTES = 16 * 2**20

# Bytes of a session, by what takes them.
SessionEstimate = Callable[[SparseAttentionConfig, SessionShape], Mapping[str, int]]
# The same of sessions of one plan by their number of positions.
SessionSizes = Callable[[int], Mapping[str, int]]


def with_draft(estimate: SessionEstimate, draft_session: Callable[[int], int]) -> SessionEstimate:
    """What a session and that of its draft model take."""
    return lambda attention, shape: {
        **estimate(attention, shape),
        "draft_session": draft_session(shape.max_context),
    }


def of_host(estimate: SessionEstimate) -> SessionEstimate:
    """What a session on a GPU takes of the host; its model checks what it takes of the GPU."""
    from ..runners.cuda import on_host

    return lambda attention, shape: on_host(estimate(attention, shape))


def find_room(
    threads: int, weight_bytes: int = 0, mapped_bytes: int = 0, *, is_checked: bool = False
) -> int:
    """Bytes that a session of so many threads may take besides weights yet to be loaded.

    ``mapped_bytes`` is what those take of the addresses, which count where they are limited: then
    the stacks of threads are set aside. ``is_checked``: this was asked before, for its context.
    """
    addresses = memory.address_space_left_bytes()
    reserve = RECHECK_RESERVE_BYTES if is_checked else RESERVE_BYTES
    room = memory.available_bytes() - reserve - weight_bytes
    if addresses is None or is_checked:
        return room
    return min(room, addresses - reserve - mapped_bytes - threads * memory.thread_stack_bytes())


def require_fit(context: int, sizes: SessionSizes, room: int, *, weight_bytes: int = 0) -> None:
    """Raises ResourceError for a session of ``context`` positions that takes more than ``room``.

    ``weight_bytes`` are weights yet to be loaded. The message gives the parts, what is available
    and the largest context that fits.
    """
    parts = dict(sizes(context))
    if sum(parts.values()) <= room:
        return
    if weight_bytes:
        parts["weights"] = weight_bytes
    breakdown = ", ".join(
        f"{name.replace('_', ' ')} {memory.format_bytes(size)}" for name, size in parts.items()
    )
    largest = find_largest_context(context, sizes, room)
    if largest:
        cure = f"the largest context that fits is -c {largest}"
    else:
        cure = "no context fits: free memory, use a smaller model or smaller -b and -ub"
    raise ResourceError(
        f"a context of {context} positions needs "
        f"{memory.format_bytes(sum(parts.values()))} ({breakdown}) and "
        f"{memory.format_bytes(max(0, room + weight_bytes))} are available; {cure}"
    )


def find_largest_context(most: int, sizes: SessionSizes, room: int) -> int:
    """The longest context up to ``most`` positions that takes no more than ``room`` bytes, or 0.

    A shorter one is a multiple of ``CONTEXT_STEP``.
    """

    def size(context: int) -> int:
        return sum(sizes(context).values())

    if size(most) <= room:
        return most
    steps = range(1, -(-most // CONTEXT_STEP))
    return CONTEXT_STEP * bisect(steps, room, key=lambda step: size(step * CONTEXT_STEP))
