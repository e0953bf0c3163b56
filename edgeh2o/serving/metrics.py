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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..host import memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from .answers import AnswerEngine
    from .events import Finished

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
        self._of_llama_server = _LlamaServerNames(engine, self.running, self.waiting)
        registry.register(self._of_llama_server)

    def count(self, finished: Finished) -> None:
        """Adds an answer that came to its end."""
        stats = finished.stats
        self._of_llama_server.count(finished)
        self.requests.labels("answered").inc()
        self._prompt.inc(stats.prompt_tokens)
        self._cached.inc(stats.cached_tokens)
        self._generated.inc(stats.generated_tokens)
        if stats.ttft_s is not None:
            self._ttft.observe(stats.ttft_s)
        if stats.decode_tps is not None:
            self._decode.observe(stats.decode_tps)

    def count_read(self, n_tokens: int) -> None:
        """Adds a request for vectors of texts of so many tokens."""
        self.requests.labels("answered").inc()
        self._prompt.inc(n_tokens)

    def render(self) -> bytes:
        """All of it as text."""
        return generate_latest(self._registry)


class _LlamaServerNames(Collector):
    """The same by the names of llama-server, for what was made to watch that.

    Cached tokens are left out of those of prompts. Rates are means since the start, not since they
    were asked for last: several may ask. Tokens after the first take the seconds of an answer.
    """

    def __init__(self, engine: AnswerEngine, running: Gauge, waiting: Gauge) -> None:
        self._engine, self._running, self._waiting = engine, running, waiting
        self._n_read = self._n_generated = self._n_decoded = self._n_most = 0
        self._n_cached = self._n_drafted = self._n_accepted = 0
        self._read_s = self._decode_s = 0.0

    def count(self, finished: Finished) -> None:
        stats = finished.stats
        self._n_read += stats.prompt_tokens - stats.cached_tokens
        self._n_cached += stats.cached_tokens
        self._n_drafted += stats.drafted_tokens
        self._n_accepted += stats.accepted_tokens
        self._read_s += stats.prefill_s
        self._n_generated += stats.generated_tokens
        self._n_decoded += max(0, stats.generated_tokens - 1)
        self._decode_s += stats.decode_s
        self._n_most = max(self._n_most, stats.prompt_tokens + stats.generated_tokens)

    def collect(self) -> Iterator[Metric]:
        """As ``CollectorRegistry`` asks for."""
        scheduler = self._engine.scheduler
        n_steps, n_rows = scheduler.n_steps, scheduler.n_step_rows
        counters = {
            "prompt_tokens": ("Tokens of prompts that were read", self._n_read),
            "prompt_tokens_cached": ("Tokens of prompts that were not read again", self._n_cached),
            "prompt_seconds": ("Time in which they were read", self._read_s),
            "tokens_predicted": ("Tokens of answers", self._n_generated),
            "tokens_predicted_seconds": ("Time in which they were written", self._decode_s),
            "spec_decode_num_draft_tokens": ("Tokens that were drafted", self._n_drafted),
            "spec_decode_num_accepted_tokens": (
                "Of these, those that were right",
                self._n_accepted,
            ),
            "n_decode": ("Passes over the weights for generated tokens", n_steps),
        }
        gauges = {
            "prompt_tokens_seconds": (
                "Tokens of prompts read in a second",
                _rate(self._n_read, self._read_s),
            ),
            "predicted_tokens_seconds": (
                "Tokens of an answer in a second",
                _rate(self._n_decoded, self._decode_s),
            ),
            "n_busy_slots_per_decode": ("Tokens of such a pass", _rate(n_rows, n_steps)),
            "n_tokens_max": ("Most tokens of a prompt and its answer", self._n_most),
            "requests_processing": ("Requests that are being answered", _value(self._running)),
            "requests_deferred": ("Requests that wait for their turn", _value(self._waiting)),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"llamacpp:{name}", text, value)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"llamacpp:{name}", text, value)


def _value(gauge: Gauge) -> float:
    (metric,) = gauge.collect()
    return metric.samples[0].value


def _rate(count: int, per: float) -> float:
    return count / per if per > 0 else 0.0


def _find_thermal_zone() -> Path | None:
    zones = sorted(_THERMAL.glob("thermal_zone*/temp"))
    return max(zones, key=_read_temperature, default=None)


def _read_temperature(zone: Path) -> float:
    try:
        return int(zone.read_text()) / 1000
    except (OSError, ValueError):
        return float("nan")
