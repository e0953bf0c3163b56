"""What a run cost: times, rates, memory, query-key pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..attention.base import describe_settings
from ..host.memory import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Seconds end in ``_s``, bytes in ``_bytes``, tokens per second in ``_tps``.

    ``prompt_tokens`` includes ``cached_tokens``, which an earlier prompt left in the cache.
    ``ttft_s`` runs from the request, tokenisation included, to the first token. Rates and
    ``ttft_s`` are None when the run ended before they could be measured. Pairs are averaged over
    layers and KV heads; ``memory_bytes`` lists what the run allocated by purpose. ``note`` says why
    a prompt was read dense that was to be read sparse, and why tokens after it were; empty for
    others. ``attention_error`` is the
    norm of what the sparse attention is wrong by, relative to its output, measured on a sample of
    queries, None where nothing was; ``heads_read_densely`` counts memory sets, of query heads or KV
    heads, of logical batches that read everything because of it. With prompt lookup or a draft
    model, ``decode_calls`` gave the tokens after the first, and ``accepted_tokens`` of the
    ``drafted_tokens`` were right, those of the ``draft_model`` included, which took ``draft_s`` of
    ``decode_s``; all are 0 without.
    ``context_shifts`` counts how often a full context was cut to half and read again, which is part
    of ``decode_s``; ``evicted_tokens`` counts those that every KV head dropped from its cache.
    ``cache_bytes_per_token`` were read of the cache, and of what a rule chooses by, for a generated
    token after the first; None where none was or where that is not counted.
    """

    model: str
    isa: str
    threads: int
    attention: Mapping[str, Any] = field(hash=False)
    batch_size: int
    chunk_size: int
    context_size: int
    cache_type: str
    attention_precision: str
    seed: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    load_s: float
    prefill_s: float
    ttft_s: float | None
    decode_s: float
    prefill_tps: float | None
    decode_tps: float | None
    peak_rss_bytes: int
    pairs_computed: int
    pairs_dense: int
    memory_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)
    device: str = "cpu"
    note: str = ""
    attention_error: float | None = None
    heads_read_densely: int = 0
    decode_calls: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_model: str = ""
    model_drafted_tokens: int = 0
    model_accepted_tokens: int = 0
    draft_s: float = 0.0
    context_shifts: int = 0
    evicted_tokens: int = 0
    cache_bytes_per_token: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, fit for JSON."""
        return asdict(self)

    @property
    def fills_context(self) -> bool:
        """Whether there is no room for another token: the last one drawn is not in the cache."""
        n_tokens = self.prompt_tokens + self.generated_tokens
        goes_on = self.context_shifts + self.evicted_tokens > 0
        return not goes_on and n_tokens > self.context_size

    def format_table(self) -> str:
        """A few aligned lines for a terminal, without a final newline."""
        attention = describe_settings(self.attention)
        n_new = self.prompt_tokens - self.cached_tokens
        prefill = _format_rate(n_new, self.prefill_tps)
        if self.ttft_s is None:  # interrupted
            n_read = round((self.prefill_tps or 0) * self.prefill_s)
            prefill = f"{n_read:,} of {prefill}"
        if self.cached_tokens:
            prefill += f" ({self.cached_tokens:,} more from the cache)"
        pairs = f"{self.pairs_computed:,} of {self.pairs_dense:,} dense"
        if self.pairs_computed:
            pairs += f" ({self.pairs_dense / self.pairs_computed:.2f}x fewer)"
        parts = ", ".join(
            f"{name.replace('_', ' ')} {format_bytes(size)}"
            for name, size in self.memory_bytes.items()
        )
        decode = _format_rate(self.generated_tokens, self.decode_tps)
        if self.cache_bytes_per_token:
            decode += f" ({format_bytes(round(self.cache_bytes_per_token))} of the cache for each)"
        place = self.isa if self.device == "cpu" else f"{self.device}, {self.isa}"
        rows = [
            ("load", f"{self.load_s:.2f} s"),
            ("first token", "-" if self.ttft_s is None else f"{self.ttft_s:.2f} s"),
            ("prefill", prefill),
            ("decode", decode),
            ("pairs", pairs),
            ("memory", f"peak RSS {format_bytes(self.peak_rss_bytes)} ({parts})"),
            ("run", f"{place}, threads {self.threads}, {attention}, seed {self.seed}"),
        ]
        if self.drafted_tokens:
            rows.insert(3, ("drafts", self._format_drafts()))
        if self.context_shifts:
            rows.insert(-1, ("context", f"full and cut to half {self.context_shifts:,} times"))
        if self.evicted_tokens:
            rows.insert(-1, ("context", f"full, {self.evicted_tokens:,} tokens evicted"))
        attention_notes = [self._describe_error(), self.note]
        if any(attention_notes):
            rows.insert(-1, ("attention", "; ".join(filter(None, attention_notes))))
        return "\n".join(f"{name:<12} {value}" for name, value in rows)

    def _format_drafts(self) -> str:
        per_call = (self.decode_calls + self.accepted_tokens) / self.decode_calls
        n_looked_up = self.drafted_tokens - self.model_drafted_tokens
        n_found = self.accepted_tokens - self.model_accepted_tokens
        parts = [f"{n_found:,} of {n_looked_up:,} looked up accepted"] if n_looked_up else []
        if self.model_drafted_tokens:
            parts.append(
                f"{self.model_accepted_tokens:,} of {self.model_drafted_tokens:,} of the draft "
                f"model, which took {self.draft_s:.2f} s"
            )
        return f"{per_call:.2f} tokens a call: " + ", ".join(parts)

    def _describe_error(self) -> str:
        if self.attention_error is None:
            return ""
        text = f"error {100 * self.attention_error:.1f} %"
        again = self.heads_read_densely
        if again:
            text += f", {again:,} head{'s' if again > 1 else ''} read densely"
        return text


def _format_rate(n_tokens: int, tokens_per_second: float | None) -> str:
    rate = "-" if tokens_per_second is None else f"{tokens_per_second:,.1f} tokens/s"
    return f"{n_tokens:,} tokens, {rate}"
