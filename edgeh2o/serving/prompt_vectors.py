"""Vectors of the texts of a request, read beside the kept conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from ..engine.context_size import rotate_alike
from ..engine.embedding import (
    count_read,
    embed_prompt,
    longest_first,
    project,
    require_rows,
)
from ..engine.memory_fit import check_start
from ..runners.runner_calls import use_small_pages
from .api_error import PromptTooLongError
from .call_grid import PromptShape
from .shared_runner import SHARED_PARTS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..engine.embedding import EmbeddingModel
    from ..engine.plan import RunPlan
    from ..runners.base import EmbeddingRunner
    from .conversations import ConversationPool


def embed_prompts(
    pool: ConversationPool,
    prompts: Sequence[NDArray[np.int32]],
    pooling: str,
    *,
    adapter_scales: tuple[float, ...],
    require: Callable[[], None],
) -> list[NDArray[np.float32]]:
    """The vector of each prompt, of pooling "none" all rows, as ``embed_prompt`` has it.

    They are read one after the other, by the rules and in calls of prompts that are answered, whose
    calls have turns in between. ``require`` raises once the request is not wanted any more. Raises
    PromptTooLongError, ResourceError for what does not fit in memory.
    """
    for ids in prompts:
        if len(ids) > pool.context_limit:
            raise PromptTooLongError(len(ids), pool.context_limit)
    config = pool.plan.config
    read = [ids[: count_read(len(ids), pooling, config)] for ids in prompts]
    vectors: dict[int, NDArray[np.float32]] = {}
    running: RunPlan | None = None
    with ExitStack() as held:
        runner: Any = None
        for i in longest_first(list(map(len, read))):
            plan, context = pool.plan_of(len(read[i]), 0)
            plan = plan.with_adapters(adapter_scales)
            serves = runner is not None and rotate_alike(plan.config, runner.max_context, context)
            if not serves or plan != running:
                runner = None
                held.close()
                started = _start_runner(pool, plan, context, len(read[i]), require)
                runner = held.enter_context(started)
                running = plan
            vectors[i] = _embed(pool, plan, runner, read[i], pooling, require)
        del runner  # before its memory is given back
    return [vectors[i] for i in range(len(prompts))]


@contextmanager
def _start_runner(
    pool: ConversationPool, plan: RunPlan, context: int, n_tokens: int, require: Callable[[], None]
) -> Iterator[EmbeddingRunner]:
    """As a conversation of ``context`` positions has it, with memory for ``n_tokens``."""
    model, written = pool.model.model, plan.shape(n_tokens)
    sizes = pool.model.estimate_session_bytes(plan.attention, written)
    n_bytes = sum(size for part, size in sizes.items() if part not in SHARED_PARTS)
    with pool.reserve(n_bytes, require):
        check_start(plan, model, written)
        start = partial(model.start_session, plan.attention, plan.shape(context))
        runner = require_rows(pool.scheduler.call(start))
        use_small_pages(runner)  # rows that are not written take no memory
        yield runner


def _embed(
    pool: ConversationPool,
    plan: RunPlan,
    runner: EmbeddingRunner,
    ids: NDArray[np.int32],
    pooling: str,
    require: Callable[[], None],
) -> NDArray[np.float32]:
    n_tokens = len(ids)
    pool.scheduler.call(runner.reset)
    grid = pool.model.call_grid(plan.attention, plan.shape(runner.max_context))
    ends = grid.ends(0, n_tokens, PromptShape(n_tokens, 0), 0, is_last=True)

    def embed(tokens: NDArray[np.int32], **wanted: Any) -> NDArray[np.float32]:
        watched = partial(runner.embed, tokens, **wanted, on_layer=lambda *_: require())
        return pool.scheduler.call(watched)

    with pool.scheduler.reading():
        calls = (slice(*ends_of_call) for ends_of_call in pairwise([0, *ends]))
        vector = embed_prompt(embed, ids, pooling, calls)
    return project(vector, cast("EmbeddingModel", pool.model.model), plan.config)
