"""Which positions each layer and head keeps, and how stable the choice is.

Similarity is that of Jaccard: the share of the positions in either set that are in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..attention.base import describe_settings, require_equal_kv_heads
from ..config import PrefillConfig
from ..errors import UsageError
from .reporting import markdown_table

if TYPE_CHECKING:
    from ..llm import LLM

Bool = NDArray[np.bool_]
Float = NDArray[np.float64]

# The first positions of a prompt, which draw attention whatever they hold (Xiao et al. 2023,
# arXiv 2309.17453).
N_SINKS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What one prompt's chunks read besides themselves.

    ``begins`` are the first positions of the chunks after the first. ``memory[c][slot]`` are the
    sorted positions that chunk c of them read; a slot is layer * n_layer_heads + head, of the KV
    heads, or ``by_query_head`` of the query heads.
    ``scores[slot]`` [n_tokens] are the scores after the last choice, None where none are kept.
    """

    n_tokens: int
    n_layers: int
    n_layer_heads: int
    begins: tuple[int, ...]
    memory: tuple[tuple[NDArray[np.int32], ...], ...]
    scores: tuple[NDArray[np.float32] | None, ...]
    by_query_head: bool = False

    @property
    def n_slots(self) -> int:
        """Layers times their heads."""
        return self.n_layers * self.n_layer_heads

    @property
    def head_name(self) -> str:
        """What has a memory set of its own."""
        return "query head" if self.by_query_head else "KV head"

    def kept(self, chunk: int) -> Bool:
        """[n_slots, begin of the chunk]: true where the chunk read the position."""
        mask = np.zeros((self.n_slots, self.begins[chunk]), dtype=np.bool_)
        for row, positions in zip(mask, self.memory[chunk], strict=True):
            row[positions] = True
        return mask


def record_selection(
    llm: LLM, tokens: NDArray[np.int32], *, on_tokens: Callable[[int], None] | None = None
) -> Selection:
    """Reads ``tokens`` [n] chunk by chunk with the attention of ``llm`` and notes every choice.

    ``on_tokens(n)`` is called after every chunk. Raises UsageError when there is only one
    chunk, and for a model whose layers differ in KV heads.
    """
    require_equal_kv_heads(llm.config, "a heatmap", "`edgeh2o perplexity` runs without them")
    chunk_size = llm.chunk_size
    if len(tokens) <= chunk_size:
        raise UsageError(
            f"a window of {len(tokens)} tokens is one chunk of {chunk_size}, which reads only "
            "itself; use larger windows (--ctx) or smaller chunks (-ub)"
        )
    one_chunk = PrefillConfig(batch_size=chunk_size, chunk_size=chunk_size)
    runner = llm.start_runner(len(tokens), prefill=one_chunk, all_rows=True)
    config, policy = llm.config, runner.policy
    n_heads = config.n_heads if policy.splits_groups else config.n_kv_heads
    slots = [(layer, head) for layer in range(config.n_layers) for head in range(n_heads)]
    memory = []
    begins = range(0, len(tokens), chunk_size)
    for begin in begins:
        chunk = tokens[begin : begin + chunk_size]
        runner.prefill(chunk, is_last=begin == begins[-1])
        if begin:
            memory.append(tuple(policy.memory_set(*slot).copy() for slot in slots))
        if on_tokens is not None:
            on_tokens(len(chunk))
    scores: list[NDArray[np.float32] | None] = []
    for slot in slots:
        try:
            scores.append(policy.scores(*slot, len(tokens)).copy())
        except ValueError:  # the rule keeps no scores here
            scores.append(None)
    return Selection(
        n_tokens=len(tokens),
        n_layers=config.n_layers,
        n_layer_heads=n_heads,
        by_query_head=policy.splits_groups,
        begins=tuple(begins[1:]),
        memory=tuple(memory),
        scores=tuple(scores),
    )


def similarity(first: Bool, second: Bool) -> Float:
    """Jaccard similarity of the rows of two masks [n, m]: [n]; two empty rows are equal."""
    union = (first | second).sum(axis=1)
    shared = (first & second).sum(axis=1)
    return np.where(union, shared / np.maximum(union, 1), 1.0)


def similarity_matrix(mask: Bool) -> Float:
    """Jaccard similarity of every pair of rows of a mask [n, m]: [n, n]."""
    counts = mask.sum(axis=1)
    shared = mask.astype(np.float32) @ mask.astype(np.float32).T
    union = counts[:, None] + counts[None, :] - shared
    return np.where(union, shared / np.maximum(union, 1), 1.0)


def head_similarity(selection: Selection) -> Float:
    """Similarity of every pair of slots, mean over the chunks: [n_slots, n_slots].

    Positions that every slot keeps, such as a local window, are left out.
    """
    matrices = []
    for chunk in range(len(selection.begins)):
        mask = selection.kept(chunk)
        matrices.append(similarity_matrix(mask[:, ~mask.all(axis=0)]))
    return _mean_over(matrices)


def chunk_similarity(selection: Selection) -> Float | None:
    """Similarity of what one chunk and the next read of the same past: [n_slots].

    The mean over neighbours; None when only one chunk has a past.
    """
    values = [
        similarity(selection.kept(chunk), selection.kept(chunk + 1)[:, :begin])
        for chunk, begin in enumerate(selection.begins[:-1])
    ]
    return _mean_over(values) if values else None


def run_similarity(first: Selection, second: Selection) -> Float:
    """Similarity of the positions that the same chunks of two prompts read: [n_slots]."""
    chunks = range(len(first.begins))
    return _mean_over([similarity(first.kept(c), second.kept(c)) for c in chunks])


def _mean_over(arrays: Sequence[Float]) -> Float:
    """The mean of arrays of one shape, element by element."""
    mean: Float = np.mean(arrays, axis=0)
    return mean


def sink_kept(selection: Selection) -> Float:
    """Share of the first positions that is kept, mean over the chunks: [n_slots]."""
    chunks = range(len(selection.begins))
    return _mean_over([selection.kept(c)[:, :N_SINKS].mean(axis=1) for c in chunks])


def sink_score(selection: Selection) -> Float:
    """Share of the scores that the first positions have: [n_slots], NaN where none are kept."""
    shares = np.full(selection.n_slots, np.nan)
    for slot, scores in enumerate(selection.scores):
        total = 0.0 if scores is None else float(scores.sum(dtype=np.float64))
        if scores is not None and total > 0:
            shares[slot] = float(scores[:N_SINKS].sum(dtype=np.float64)) / total
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPattern:
    """One head of one layer with a memory set of its own; shares and similarities are in [0, 1].

    ``kept_keys`` is the mean size of its memory set. A similarity is None when there is nothing to
    compare with: no second choice, no second text; ``sink_score`` when the rule keeps no scores.
    """

    layer: int
    head: int
    kept_keys: float
    sink_kept: float
    sink_score: float | None
    next_chunk_similarity: float | None
    other_heads_similarity: float | None
    same_text_similarity: float
    other_text_similarity: float | None


_MEASURES = [item.name for item in fields(HeadPattern) if item.name not in ("layer", "head")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionReport:
    """Patterns of all heads in one attention over windows of one text."""

    model: str
    attention: dict[str, Any]
    chunk_size: int
    context: int
    heads: tuple[HeadPattern, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, fit for JSON, with the means over all heads."""
        return {**asdict(self), "means": _means(self.heads)}

    def to_records(self) -> list[dict[str, Any]]:
        """One flat record per layer and head, fit for CSV."""
        return [asdict(head) for head in self.heads]

    def format_text(self) -> str:
        """A heading and the means of every layer, without a final newline."""
        layers = sorted({head.layer for head in self.heads})
        rows = [
            (str(layer), _means([head for head in self.heads if head.layer == layer]))
            for layer in layers
        ]
        rows.append(("all", _means(self.heads)))
        header = ["layer", *(name.replace("_", " ") for name in _MEASURES)]
        cells = [
            [name, f"{means['kept_keys']:,.0f}", *(_cell(means[key]) for key in _MEASURES[1:])]
            for name, means in rows
        ]
        heading = (
            f"{self.model}: {describe_settings(self.attention)}, chunks of {self.chunk_size:,}, "
            f"windows of {self.context:,} tokens; means over heads"
        )
        return f"{heading}\n\n{markdown_table(header, cells)}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _means(heads: Sequence[HeadPattern]) -> dict[str, float | None]:
    """Mean of every measure over the heads that have it."""
    means = {}
    for name in _MEASURES:
        values = [value for head in heads if (value := getattr(head, name)) is not None]
        means[name] = float(np.mean(values)) if values else None
    return means


def describe_selection(
    selection: Selection, again: Selection, other: Selection | None
) -> tuple[HeadPattern, ...]:
    """The pattern of every head in ``selection``.

    ``again`` is the same text once more, ``other`` another text of the same length.
    """
    n_slots = selection.n_slots
    kept = np.mean([[len(p) for p in positions] for positions in selection.memory], axis=0)
    sinks, sink_scores = sink_kept(selection), sink_score(selection)
    next_chunk = chunk_similarity(selection)
    heads = head_similarity(selection)
    other_heads = (heads.sum(axis=1) - 1) / (n_slots - 1) if n_slots > 1 else None
    same_text = run_similarity(selection, again)
    other_text = None if other is None else run_similarity(selection, other)

    def pick(values: Float | None, slot: int) -> float | None:
        return None if values is None or np.isnan(values[slot]) else float(values[slot])

    return tuple(
        HeadPattern(
            layer=slot // selection.n_layer_heads,
            head=slot % selection.n_layer_heads,
            kept_keys=float(kept[slot]),
            sink_kept=float(sinks[slot]),
            sink_score=pick(sink_scores, slot),
            next_chunk_similarity=pick(next_chunk, slot),
            other_heads_similarity=pick(other_heads, slot),
            same_text_similarity=float(same_text[slot]),
            other_text_similarity=pick(other_text, slot),
        )
        for slot in range(n_slots)
    )
