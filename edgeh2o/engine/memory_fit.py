"""Whether a session fits in memory, told before anything of it is allocated."""

from __future__ import annotations

import warnings
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ..attention.base import SparseAttentionConfig
from ..errors import ResourceError
from ..host import memory
from ..rope_config import ROPE_OF_FILE
from ..runners.base import SessionShape
from .context_size import CONTEXT_STEP, context_limit, least_context, memory_cures
from .models import device_memory_left, leave_on_disk, may_stay_on_disk

if TYPE_CHECKING:
    from ..runners.base import Runner
    from .models import DescribedModel, LoadedModel, ModelFile
    from .plan import RunPlan

# Left to the interpreter and its libraries when memory is counted, and the rest of it for a context
# that was checked when the weights were loaded: part of it may be in use since.
RESERVE_BYTES = 64 * 2**20
RECHECK_RESERVE_BYTES = 16 * 2**20
ON_DISK_CURE = ", or leave weights on the disk (--packed-weights auto)"

# Bytes of a session, by what takes them.
SessionEstimate = Callable[[SparseAttentionConfig, SessionShape], Mapping[str, int]]
# The same of sessions of one plan by their number of positions.
SessionSizes = Callable[[int], Mapping[str, int]]


def check_load(plan: RunPlan, file: ModelFile, draft: DescribedDraft | None = None) -> RunPlan:
    """The plan, with ``most_context`` where memory does not hold a short context that nobody named.

    Raises ResourceError if weights and the context asked for, or any other, do not fit in memory.
    ``draft`` takes memory besides. Warns when the context asked for is longer than what the model
    was trained on.
    """
    weight_bytes = 0 if plan.has_device_memory else file.n_weight_bytes
    mapped_bytes = file.n_mapped_bytes
    estimate: SessionEstimate = file.estimate_session_bytes
    if draft is not None:
        estimate = _with_draft(estimate, draft)
        weight_bytes += draft.n_weight_bytes
        mapped_bytes += draft.n_mapped_bytes
    room = find_room(plan.threads, weight_bytes, mapped_bytes)
    context = least_context(plan)
    sizes = host_sizes(plan.for_length(context), plan.shape(context), estimate)
    needed = sum(sizes(context).values())
    weight_room = room + weight_bytes - needed
    may_stay = not plan.has_device_memory and may_stay_on_disk(file)
    if needed > room and may_stay and leave_on_disk(file, weight_room):
        warnings.warn(
            f"weights of {memory.format_bytes(weight_bytes)} do not fit in memory, which has room "
            f"for {memory.format_bytes(weight_room)} of them: the others are read from the disk "
            "whenever they are needed",
            stacklevel=3,
        )
        weight_bytes, room = weight_room, needed
    if plan.context_size is None:
        on_device = _find_largest_on_device(plan, file, context, file.n_weight_bytes)
        largest = min(find_largest_context(context, sizes, room), on_device)
        if 0 < largest < context:
            return replace(plan, most_context=largest)
    cure = ON_DISK_CURE if may_stay else ""
    require_fit(context, sizes, room, weight_bytes=weight_bytes, other_cure=cure)
    trained = plan.config.context_length
    scales = plan.rope == ROPE_OF_FILE and plan.config.has_rope
    if (plan.context_size or 0) > trained:
        warnings.warn(
            f"a context of {plan.context_size} is longer than the {trained} positions that "
            "the model was trained on; expect poor answers beyond them"
            + ("; --rope-scaling yarn helps" if scales else ""),
            stacklevel=3,
        )
    return plan


def limit_to_memory(plan: RunPlan, model: LoadedModel) -> RunPlan:
    """The plan, with ``most_context`` where nobody named a context and memory holds no longer one.

    Of what the model was trained on; the weights are loaded.
    """
    if plan.context_size is not None:
        return plan
    limit = context_limit(plan)
    sizes = host_sizes(plan.for_length(limit), plan.shape(limit), model.estimate_session_bytes)
    largest = find_largest_context(limit, sizes, find_room(plan.threads))
    largest = min(largest, _find_largest_on_device(plan, model, limit))
    if largest >= limit:
        return plan
    return replace(plan, most_context=max(largest, least_context(plan)))


def start_runner(
    plan: RunPlan, model: LoadedModel, context: int, *, all_rows: bool = False
) -> Runner:
    """A runner with room for ``context`` tokens. Raises ResourceError if it does not fit."""
    shape = plan.shape(context, all_rows=all_rows)
    check_start(plan, model, shape)
    return model.start_session(plan.attention, shape)


def fit_context(
    plan: RunPlan, model: LoadedModel, context: int, least: int, freed_bytes: int = 0
) -> int:
    """``context``, or as much of it from ``least`` on as fits once ``freed_bytes`` more are free.

    Raises ResourceError where not even that does. A GPU is looked at once they are: its part of
    them is not known, and a session that it does not hold is refused as it starts.
    """
    if not freed_bytes:
        context = max(least, _find_largest_on_device(plan, model, context))
    try:
        check_start(plan, model, plan.shape(context), freed_bytes)
    except ResourceError:
        if least >= context:
            raise
        sizes = host_sizes(plan, plan.shape(context), model.estimate_session_bytes)
        room = find_room(plan.threads) + freed_bytes
        largest = find_largest_context(context, sizes, room)
        if largest < least:
            check_start(plan, model, plan.shape(least), freed_bytes)
            return least
        return largest
    return context


def _find_largest_on_device(
    plan: RunPlan, model: DescribedModel, most: int, weight_bytes: int = 0
) -> int:
    """As ``find_largest_context``, of a GPU's own memory beside weights; ``most`` without one."""
    left = device_memory_left(model)
    if left is None:
        return most
    sizes = session_sizes(
        plan.for_length(most), plan.shape(most), _of_device(model.estimate_session_bytes)
    )
    return find_largest_context(most, sizes, left - weight_bytes)


def check_start(
    plan: RunPlan, model: LoadedModel, shape: SessionShape, freed_bytes: int = 0
) -> None:
    """Raises ResourceError if a runner does not fit, once ``freed_bytes`` more are free."""
    context = shape.max_context
    is_named = plan.context_size is not None or plan.most_context is not None
    is_checked = is_named and context == context_limit(plan)
    room = find_room(plan.threads, is_checked=is_checked) + freed_bytes
    require_fit(context, host_sizes(plan, shape, model.estimate_session_bytes), room)


def host_sizes(plan: RunPlan, shape: SessionShape, estimate: SessionEstimate) -> SessionSizes:
    """As ``session_sizes``, of the host's memory alone."""
    return session_sizes(plan, shape, _of_host(estimate) if plan.has_device_memory else estimate)


def session_sizes(plan: RunPlan, shape: SessionShape, estimate: SessionEstimate) -> SessionSizes:
    """What sessions of ``shape`` take, those of other lengths by their budgets."""

    def sizes(context: int) -> Mapping[str, int]:
        chosen = plan if context == shape.max_context else plan.for_length(context)
        batch_size = min(shape.batch_size, plan.shape(context).batch_size)
        return estimate(
            chosen.attention, replace(shape, max_context=context, batch_size=batch_size)
        )

    return sizes


class DescribedDraft(Protocol):
    """What drafts take of memory."""

    @property
    def n_weight_bytes(self) -> int:
        """Bytes of weights yet to be loaded."""

    @property
    def n_mapped_bytes(self) -> int:
        """Addresses that those will take."""

    def estimate_session_bytes(self, context: int) -> int:
        """What is allocated for texts of ``context`` tokens."""


def _with_draft(estimate: SessionEstimate, draft: DescribedDraft) -> SessionEstimate:
    """What a session and that of its drafts take."""
    return lambda attention, shape: {
        **estimate(attention, shape),
        "draft_session": draft.estimate_session_bytes(shape.max_context),
    }


def _of_host(estimate: SessionEstimate) -> SessionEstimate:
    """What a session on a GPU takes of the host; its model checks what it takes of the GPU."""
    from ..runners.cuda import on_host

    return lambda attention, shape: on_host(estimate(attention, shape))


def _of_device(estimate: SessionEstimate) -> SessionEstimate:
    """What a session on a GPU takes of the GPU."""
    from ..runners.cuda import on_device

    return lambda attention, shape: on_device(estimate(attention, shape))


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


def require_fit(
    context: int,
    sizes: SessionSizes,
    room: int,
    *,
    weight_bytes: int = 0,
    other_cure: str = "",
) -> None:
    """Raises ResourceError for a session of ``context`` positions that takes more than ``room``.

    ``weight_bytes`` are weights yet to be loaded. The message gives the parts, what is available,
    the limit that leaves no more, and the largest context that fits.
    """
    parts = dict(sizes(context))
    if sum(parts.values()) <= room:
        return
    if weight_bytes:
        parts["weights"] = weight_bytes
    breakdown = ", ".join(
        f"{name.replace('_', ' ')} {memory.format_bytes(size)}" for name, size in parts.items()
    )
    largest, limit = find_largest_context(context, sizes, room), memory.binding_limit()
    if largest:
        cure = f"the largest context that fits is -c {largest}"
    else:
        cure = f"no context fits: {memory_cures(is_limit_named=True)}{other_cure}"
    within = f" within the limit {limit}" if limit else ""
    raise ResourceError(
        f"a context of {context} positions needs "
        f"{memory.format_bytes(sum(parts.values()))} ({breakdown}) and "
        f"{memory.format_bytes(max(0, room + weight_bytes))} are available{within}; {cure}"
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
