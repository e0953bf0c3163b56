"""A timeline of this process's memory: resident and unique bytes, by phase of a run."""

from __future__ import annotations

import csv
import io
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config import PrefillConfig
from ..errors import ResourceError, UsageError
from ..formats.atomic_file import check_writable, write_file

FIRST_PHASE = "start"
SUFFIXES = (".csv", ".json")


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory at ``time_s`` seconds after the start of the profile.

    ``rss_bytes`` is resident memory, pages of shared libraries included. ``uss_bytes`` is what
    would be freed if the process ended now; None in most samples, because the system adds it up
    page by page.
    """

    time_s: float
    phase: str
    rss_bytes: int
    uss_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryPhase:
    """A stretch of the timeline between two marks."""

    name: str
    start_s: float
    stop_s: float
    peak_rss_bytes: int


class MemoryProfile:
    """Samples memory in a background thread between ``with`` and the end of its block.

    Pass ``on_progress`` to ``LLM``: it marks the phases "load", "prefill 1", "prefill 2", ... (one
    per logical batch of ``batch_size`` tokens) and "decode". ``mark`` begins any other phase.
    RSS is read every ``interval_s`` seconds, some 20 microseconds of work; USS every
    ``uss_interval_s`` and at each mark. Raises ResourceError where the system tells neither.
    """

    def __init__(
        self,
        *,
        batch_size: int = PrefillConfig().batch_size,
        interval_s: float = 0.02,
        uss_interval_s: float = 0.5,
    ) -> None:
        self._batch_size = batch_size
        self._interval_s = interval_s
        self._uss_interval_s = uss_interval_s
        self._phase = FIRST_PHASE
        self._samples: list[MemorySample] = []
        self._lock = threading.Lock()
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-profile", daemon=True)
        self._started_at = 0.0
        self._next_uss_s = 0.0

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        """All samples so far, in order."""
        with self._lock:
            return tuple(self._samples)

    @property
    def phases(self) -> tuple[MemoryPhase, ...]:
        """The phases so far, in order; one ends where the next begins."""
        grouped: list[list[MemorySample]] = []
        for sample in self.samples:
            if not grouped or grouped[-1][0].phase != sample.phase:
                grouped.append([])
            grouped[-1].append(sample)
        stops = [group[0].time_s for group in grouped[1:]] + [grouped[-1][-1].time_s]
        return tuple(
            MemoryPhase(group[0].phase, group[0].time_s, stop, max(s.rss_bytes for s in group))
            for group, stop in zip(grouped, stops, strict=True)
        )

    def __enter__(self) -> MemoryProfile:
        import psutil

        self._started_at = time.perf_counter()
        try:
            self._process = psutil.Process()
            self._take(with_uss=True)
        except (OSError, psutil.Error) as error:
            raise ResourceError(
                f"the memory of this process cannot be read ({error}); "
                "a memory profile needs /proc, leave it out here"
            ) from None
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_ended.set()
        self._thread.join()
        self._take(with_uss=True)

    def mark(self, phase: str) -> None:
        """Begins a phase, unless it is the current one; samples both sides of the border."""
        if phase == self._phase:
            return
        self._take(with_uss=True)
        self._phase = phase
        self._take(with_uss=True)

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Marks phases from the progress reports of ``LLM``."""
        if stage != "prefill":
            self.mark(stage)
        elif done < total:
            self.mark(f"prefill {done // self._batch_size + 1}")
        else:
            self.mark("decode")

    def write(self, path: Path | str, allocated: Mapping[str, int]) -> None:
        """Writes samples, phases and ``allocated`` (bytes by purpose) as JSON or CSV.

        The CSV has a row per value: time in seconds, phase, quantity, bytes. Rows of the phase
        "allocated" are the breakdown. Raises UsageError for another suffix and ResourceError if
        the file cannot be written.
        """
        path = Path(path)
        check_profile_path(path)
        is_json = path.suffix.lower() == ".json"
        text = self._to_json(allocated) if is_json else self._to_csv(allocated)
        write_file(path, text, what="the memory profile")

    def _to_json(self, allocated: Mapping[str, int]) -> str:
        content = {
            "allocated_bytes": dict(allocated),
            "phases": [asdict(phase) for phase in self.phases],
            "samples": [asdict(sample) for sample in self.samples],
        }
        return json.dumps(content, indent=1) + "\n"

    def _to_csv(self, allocated: Mapping[str, int]) -> str:
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(("time_s", "phase", "quantity", "bytes"))
        for sample in self.samples:
            start = (f"{sample.time_s:.4f}", sample.phase)
            writer.writerow((*start, "rss", sample.rss_bytes))
            if sample.uss_bytes is not None:
                writer.writerow((*start, "uss", sample.uss_bytes))
        end = self.samples[-1].time_s
        for purpose, size in allocated.items():
            writer.writerow((f"{end:.4f}", "allocated", purpose, size))
        return text.getvalue()

    def _watch(self) -> None:
        while not self._is_ended.wait(self._interval_s):
            self._take(with_uss=self._elapsed_s() >= self._next_uss_s)

    def _take(self, *, with_uss: bool) -> None:
        with self._lock:
            uss = None
            if with_uss:
                full = self._process.memory_full_info()
                rss, uss = full.rss, full.uss
                self._next_uss_s = self._elapsed_s() + self._uss_interval_s
            else:
                rss = self._process.memory_info().rss
            self._samples.append(MemorySample(self._elapsed_s(), self._phase, rss, uss))

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started_at


def check_profile_path(path: Path) -> None:
    """Raises UsageError or ResourceError if a profile or its picture cannot be written there."""
    if path.suffix.lower() not in SUFFIXES:
        name = path.stem or "memory"
        raise UsageError(
            f"a memory profile is written as CSV or JSON, its picture {name}.png beside it; "
            f"name it {name}.csv or {name}.json, got '{path}'"
        )
    for each in (path, path.with_suffix(".png")):
        check_writable(each, "--memory-profile")
