"""Many requests of a file on the workers of a Dask cluster: one model per worker process.

Every item is a task that may run again; a worker that dies gives its tasks to others. Results go to
the one output file as they come, so that a run whose driver was killed goes on as ``batch`` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..config import PrefillConfig, RuntimeConfig
from ..errors import ResourceError, UsageError
from ..sampling_config import SamplingParams
from .batch import BatchItem, OnDone, ResultFile, answer_item

if TYPE_CHECKING:
    from distributed import Client

    from ..attention.base import SparseAttentionConfig
    from .answers import AnswerEngine

# What a worker may offer (``dask worker --resources edgeh2o=1``): items that it answers at once.
RESOURCE = "edgeh2o"
RETRIES = 3
# Tasks that wait for a worker, for each that one can run: so that none of them runs dry.
TASKS_PER_PLACE = 3
CONNECT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker needs to answer: the model, by a path or a name of its own, and how."""

    model: str
    model_name: str
    runtime: RuntimeConfig
    prefill: PrefillConfig
    attention: SparseAttentionConfig
    sampling: SamplingParams
    template: Mapping[str, Any] = field(default_factory=dict)
    prefix_ram_bytes: int | None = None


class _Loaded:
    """The engine of this process, for one kind of settings at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._settings: str | None = None
        self._stack = ExitStack()
        self._engine: AnswerEngine | None = None

    def engine(self, settings: WorkerSettings) -> AnswerEngine:
        """Loads the model, fetched before where its name is known, unless it is there."""
        with self._lock:
            if self._engine is None or self._settings != repr(settings):
                self._engine = None  # also where the next one cannot be loaded
                self._stack.close()
                self._engine, self._settings = self._load(settings), repr(settings)
            return self._engine

    def _load(self, settings: WorkerSettings) -> AnswerEngine:
        from ..formats.model_cache import resolve_model
        from ..llm import LLM
        from .answers import AnswerEngine

        opened: list[Any] = []
        runtime = settings.runtime
        self._stack = ExitStack()
        self._stack.enter_context(
            LLM(
                resolve_model(settings.model),
                **{name: getattr(runtime, name) for name in runtime.__dataclass_fields__},
                prefill=settings.prefill,
                attention=settings.attention,
                **settings.template,
                check=opened.append,
            )
        )
        opened[0].check_options(settings.sampling)  # else every request would be refused
        engine = AnswerEngine(opened[0], prefix_ram_bytes=settings.prefix_ram_bytes)
        self._stack.callback(engine.close)
        return engine


_loaded = _Loaded()


def answer_on_worker(settings: WorkerSettings, item: BatchItem) -> dict[str, Any]:
    """The task: what a line says besides its ids. Raises what another worker may have luck with."""
    engine = _loaded.engine(settings)
    return answer_item(engine, item, settings.model_name, settings.sampling)


def run_on_cluster(
    address: str,
    settings: WorkerSettings,
    items: Sequence[BatchItem],
    results: ResultFile,
    *,
    on_done: OnDone | None = None,
) -> None:
    """Answers what has no result yet.

    Raises UsageError without the package, ResourceError where no scheduler answers, where nobody
    works, and at the end for items that failed on ``RETRIES`` workers more.
    """
    client = _connect(address)
    try:
        _Run(client, settings, items, results, on_done).run()
    finally:
        client.close()


def _connect(address: str) -> Client:
    try:
        from distributed import Client
    except ImportError:
        raise UsageError('--dask needs distributed: pip install "edgeh2o[dask]"') from None
    try:
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ResourceError(f"no Dask scheduler answers at {address}: {reason}") from None
    try:
        client.wait_for_workers(1, timeout=CONNECT_S)
    except TimeoutError:
        client.close()
        raise ResourceError(
            f"the Dask scheduler at {address} has no workers; start one per board by "
            f"'dask worker {address} --nthreads 1 --resources {RESOURCE}=1'"
        ) from None
    return client


class _Run:
    def __init__(
        self,
        client: Client,
        settings: WorkerSettings,
        items: Sequence[BatchItem],
        results: ResultFile,
        on_done: OnDone | None,
    ) -> None:
        self._client, self._results = client, results
        self._settings = settings  # goes with every task: scattered data dies with its worker
        self._left = deque(item for item in items if item.digest not in results.done)
        self._n_all, self._n_done = len(items), len(items) - len(self._left)
        self._report: Callable[[int, int], None] = on_done or (lambda done, total: None)

    def run(self) -> None:
        from distributed import as_completed

        self._report(self._n_done, self._n_all)
        futures: dict[str, BatchItem] = {}
        running: Any = as_completed(loop=self._client.loop)
        failures = []
        self._submit(futures, running)
        while futures:
            future = next(running)
            item = futures.pop(future.key)
            error = future.exception() if future.status != "finished" else None
            if error is None:
                self._results.add(item, future.result())
                self._n_done += 1
                self._report(self._n_done, self._n_all)
            else:
                failures.append(f"{item.custom_id}: {error}")
            future.release()
            self._submit(futures, running)
        if failures:
            raise ResourceError(
                f"{len(failures)} requests have no result, such as {failures[0]:.300}; run it again"
            )

    def _submit(self, futures: dict[str, BatchItem], running: Any) -> None:
        """As many tasks as the workers of the moment have use for."""
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        offers = [worker.get("resources", {}).get(RESOURCE, 0) for worker in workers]
        places = int(sum(offers)) or sum(worker["nthreads"] for worker in workers)
        resources = {RESOURCE: 1} if sum(offers) else None
        while self._left and len(futures) < max(1, places * TASKS_PER_PLACE):
            item = self._left.popleft()
            future = self._client.submit(
                answer_on_worker,
                self._settings,
                item,
                key=f"edgeh2o-{item.digest}",
                pure=False,
                retries=RETRIES,
                resources=resources,
            )
            futures[future.key] = item
            running.add(future)
