"""What ``/metrics`` shows, in the form of Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from ..host import memory

if TYPE_CHECKING:
    from .answers import AnswerEngine, Finished

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 900)
_RATES = (1, 2, 5, 10, 20, 40, 80, 160, 320)
_THERMAL = Path("/sys/class/thermal")


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self, engine: AnswerEngine) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # resident memory, processor time, descriptors
        name = "edgeh2o_"

        def gauge(key: str, text: str) -> Gauge:
            return Gauge(name + key, text, registry=registry)

        def counter(key: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name + key, text, labels, registry=registry)

        self.running = gauge("requests_running", "Requests that are being answered")
        self.waiting = gauge("requests_waiting", "Requests that wait for their turn")
        self.requests = counter("requests", "Requests by what became of them", ("outcome",))
        self._prompt = counter("prompt_tokens", "Tokens of prompts, cached ones included")
        self._cached = counter("cached_tokens", "Tokens of prompts that were not read again")
        self._generated = counter("generated_tokens", "Tokens of answers")
        self._ttft = Histogram(
            name + "time_to_first_token_seconds",
            "From the start of the work to the first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._decode = Histogram(
            name + "decode_tokens_per_second",
            "Of answers of two tokens or more",
            buckets=_RATES,
            registry=registry,
        )
        kept = gauge("kept_conversations", "Conversations that prompts may go on from")
        kept.set_function(lambda: len(engine.pool))
        kept_bytes = gauge("kept_conversation_bytes", "Memory of their caches")
        kept_bytes.set_function(lambda: engine.pool.n_bytes)
        steps = gauge("decode_steps", "Passes over the weights for generated tokens")
        steps.set_function(lambda: engine.scheduler.n_steps)
        rows = gauge("decode_step_rows", "Tokens of all these passes")
        rows.set_function(lambda: engine.scheduler.n_step_rows)
        peak = gauge("peak_rss_bytes", "Most resident memory so far")
        peak.set_function(memory.peak_rss_bytes)
        if (zone := _find_thermal_zone()) is not None:
            heat = gauge("temperature_celsius", "Of the warmest zone; hot boards slow down")
            heat.set_function(lambda: _read_temperature(zone))

    def count(self, finished: Finished) -> None:
        """Adds an answer that came to its end."""
        stats = finished.stats
        self.requests.labels("answered").inc()
        self._prompt.inc(stats.prompt_tokens)
        self._cached.inc(stats.cached_tokens)
        self._generated.inc(stats.generated_tokens)
        if stats.ttft_s is not None:
            self._ttft.observe(stats.ttft_s)
        if stats.decode_tps is not None:
            self._decode.observe(stats.decode_tps)

    def render(self) -> bytes:
        """All of it as text."""
        return generate_latest(self._registry)


def _find_thermal_zone() -> Path | None:
    zones = sorted(_THERMAL.glob("thermal_zone*/temp"))
    return max(zones, key=_read_temperature, default=None)


def _read_temperature(zone: Path) -> float:
    try:
        return int(zone.read_text()) / 1000
    except (OSError, ValueError):
        return float("nan")
