"""Pictures of what every layer and head keeps of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..formats.atomic_file import check_writable, make_folder, write_file
from . import figures
from .decode_reads import record_reads
from .progress import Progress
from .reporting import format_count, format_csv, format_json
from .selection import (
    N_SINKS,
    Selection,
    SelectionReport,
    describe_selection,
    head_similarity,
    record_selection,
    sink_kept,
    sink_score,
)
from .windows import DEFAULT_CONTEXT, cut_windows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from ..engine.session import OnProgress
    from ..llm import LLM

Float = NDArray[np.float64]

DEFAULT_FOLDER = Path("attention_heatmaps")
SUMMARY_NAME = "summary.csv"
# Columns of a heat map: more than a screen shows are averaged.
_MAX_COLUMNS = 512
_SHOWN_LAYERS = 4
# Heads of a layer that stand below each other in a picture.
_MAX_PANEL_ROWS = 8


def visualize_attention_patterns(
    llm: LLM,
    text: str,
    folder: Path | str = DEFAULT_FOLDER,
    *,
    context_size: int = DEFAULT_CONTEXT,
    layers: Sequence[int] | None = None,
    on_progress: OnProgress | None = None,
    on_report: Callable[[SelectionReport], None] | None = None,
) -> SelectionReport:
    """Draws which positions the attention of ``llm`` keeps of a window of ``text``.

    The first window is read twice and the second one, if there is one, once. Writes to ``folder``
    kept_positions.png and scores.png (all heads), layer_NN.png for each of ``layers`` (by default
    a few; every chunk of every head), decode_reads.png (what the last tokens read when they are
    decoded; on the CPU), sinks.png, head_similarity.png, similarity.png, summary.csv and
    summary.json. ``on_progress("evaluate", done, total)`` counts tokens; ``on_report`` gets
    the report before anything is written.

    Raises ResourceError without matplotlib or room for the files, before any work, and UsageError
    for a text that is too short, a window of a single chunk or a layer that the model does not
    have.
    """
    figures.check_matplotlib()
    layers = _check_layers(layers, llm.config.n_layers)
    windows = cut_windows(llm, text, context_size, None)[:2]
    folder = Path(folder)
    check_writable(folder / SUMMARY_NAME, "--folder", makes_folders=True)
    llm.profile_budgets(windows[0])
    prompts = [windows[0], windows[0], *windows[1:]]
    progress = Progress(on_progress, context_size * (len(prompts) + 1))
    selection, again, *others = (
        record_selection(llm, prompt, on_tokens=progress.advance) for prompt in prompts
    )
    reads = record_reads(llm, windows[0], on_tokens=progress.advance)
    report = SelectionReport(
        model=llm.model_path.name,
        attention=llm.report_attention(context_size),
        chunk_size=llm.chunk_size,
        context=context_size,
        heads=describe_selection(selection, again, others[0] if others else None),
    )
    if on_report is not None:
        on_report(report)
    make_folder(folder)
    write_file(folder / SUMMARY_NAME, format_csv(report.to_records()) + "\n")
    write_file(folder / "summary.json", format_json(report.to_dict()) + "\n")
    draw_kept_positions(selection, folder / "kept_positions.png")
    if any(scores is not None for scores in selection.scores):
        draw_scores(selection, folder / "scores.png")
    for layer in layers:
        draw_layer(selection, layer, folder / f"layer_{layer:02}.png")
    if reads is not None:
        draw_decode_reads(selection, reads, folder / "decode_reads.png")
    draw_sinks(selection, folder / "sinks.png")
    draw_head_similarity(selection, folder / "head_similarity.png")
    draw_similarity(report, folder / "similarity.png")
    return report


def _check_layers(layers: Sequence[int] | None, n_layers: int) -> list[int]:
    if layers is None:
        spread = np.linspace(0, n_layers - 1, min(_SHOWN_LAYERS, n_layers))
        return sorted({round(layer) for layer in spread.tolist()})
    for layer in layers:
        if not 0 <= layer < n_layers:
            raise UsageError(f"there is no layer {layer}: the model has 0 to {n_layers - 1}")
    return list(layers)


def draw_kept_positions(selection: Selection, path: Path) -> None:
    """What the last chunk read: one row per layer and head, one column per few positions."""
    mask = selection.kept(len(selection.begins) - 1).astype(np.float64)
    with figures.picture(path, 12, 9) as figure:
        axes = figure.subplots()
        _show_heads(figure, axes, selection, _column_means(mask), "share kept")
        axes.set_title(f"Positions that the chunk at {selection.begins[-1]:,} reads besides itself")


def draw_decode_reads(selection: Selection, reads: Float, path: Path) -> None:
    """The share of generated tokens that read a position: what ``record_reads`` gave."""
    with figures.picture(path, 12, 9) as figure:
        axes = figure.subplots()
        n_heads = len(reads) // selection.n_layers
        rows = replace(selection, n_layer_heads=n_heads, by_query_head=False)
        _show_heads(figure, axes, rows, _column_means(reads), "share of tokens", reads.shape[1])
        axes.set_title("Positions that generated tokens read, their own included")


def draw_scores(selection: Selection, path: Path) -> None:
    """Accumulated scores over their mean, logarithmic; heads without scores stay empty."""
    values = np.full((selection.n_slots, selection.begins[-1]), np.nan)
    for row, scores in zip(values, selection.scores, strict=True):
        if scores is not None and scores[: len(row)].any():
            row[:] = scores[: len(row)] / scores[: len(row)].mean()
    with figures.picture(path, 12, 9) as figure, np.errstate(divide="ignore"):
        axes = figure.subplots()
        shown = np.maximum(np.log10(_column_means(values)), -2.0)
        _show_heads(figure, axes, selection, shown, "log10(score / mean score)")
        note = _note_missing(values)
        axes.set_title(f"Scores when the chunk at {selection.begins[-1]:,} was reached{note}")


def draw_layer(selection: Selection, layer: int, path: Path) -> None:
    """What every chunk read, a panel for each head of one layer."""
    n_heads, n_chunks = selection.n_layer_heads, len(selection.begins)
    n_columns = -(-n_heads // _MAX_PANEL_ROWS)
    n_rows = -(-n_heads // n_columns)
    size = 4.0 + 8.0 * n_columns, 1.5 + n_rows * (1.0 + 0.1 * n_chunks)
    with figures.picture(path, *size) as figure:
        grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
        panels = list(grid.T.flat)
        for axes in panels[n_heads:]:
            axes.set_visible(False)
        for head, axes in enumerate(panels[:n_heads]):
            kept = np.full((n_chunks, selection.begins[-1]), np.nan)
            for chunk, begin in enumerate(selection.begins):
                kept[chunk, :begin] = selection.kept(chunk)[layer * n_heads + head]
            image = axes.imshow(
                _column_means(kept),
                extent=(0, selection.begins[-1], n_chunks + 0.5, 0.5),
                vmin=0,
                vmax=1,
                cmap="viridis",
                aspect="auto",
                interpolation="nearest",
            )
            axes.set_ylabel(f"{selection.head_name} {head}\nchunk")
            _mark_integers(axes.yaxis)
            figures.mark_thousands(axes.xaxis)
        for axes in grid[-1]:
            axes.set_xlabel("position (tokens)")
        figure.colorbar(image, ax=panels, label="share kept")
        figure.suptitle(f"Layer {layer}: positions that each chunk reads besides itself")


def draw_sinks(selection: Selection, path: Path) -> None:
    """The first positions: how often they are kept, and their share of the scores."""
    shape = selection.n_layers, selection.n_layer_heads
    rows = (
        (f"Kept of the first {N_SINKS} positions", "share kept", sink_kept(selection)),
        (f"Scores of the first {N_SINKS} positions", "share of scores", sink_score(selection)),
    )
    with figures.picture(path, 12, 6.5) as figure:
        panels = figure.subplots(2, 1, sharex=True)
        for axes, (title, label, values) in zip(panels, rows, strict=True):
            image = axes.imshow(
                values.reshape(shape).T, vmin=0, vmax=1, cmap="viridis", aspect="auto"
            )
            axes.set_ylabel(selection.head_name)
            _mark_integers(axes.yaxis)
            axes.set_title(f"{title}{_note_missing(values)}")
            figure.colorbar(image, ax=axes, label=label)
        axes.set_xlabel("layer")
        _mark_integers(axes.xaxis)


def draw_head_similarity(selection: Selection, path: Path) -> None:
    """Jaccard similarity of every pair of heads, mean over the chunks."""
    with figures.picture(path, 10, 8.5) as figure:
        axes = figure.subplots()
        image = axes.imshow(head_similarity(selection), vmin=0, vmax=1, cmap="viridis")
        ticks, names = _layer_ticks(selection)
        axes.set_xticks(ticks, names)
        axes.set_yticks(ticks, names)
        axes.set_xlabel(_layer_label(selection))
        axes.set_ylabel("layer")
        axes.set_title("Positions kept by two heads, less those kept by all")
        figure.colorbar(image, ax=axes, label="Jaccard similarity")


def draw_similarity(report: SelectionReport, path: Path) -> None:
    """Mean Jaccard similarities of each layer's heads: runs, chunks, heads, texts."""
    lines = {
        "same text again": "same_text_similarity",
        "next chunk": "next_chunk_similarity",
        "other heads": "other_heads_similarity",
        "other text": "other_text_similarity",
    }
    layers = sorted({head.layer for head in report.heads})
    with figures.picture(path, 11, 6) as figure:
        axes = figure.subplots()
        for marker, (label, name) in zip("os^v", lines.items(), strict=True):
            means = [
                np.mean([np.nan if (v := getattr(head, name)) is None else v for head in heads])
                for heads in ([h for h in report.heads if h.layer == layer] for layer in layers)
            ]
            if not np.isnan(means).all():
                axes.plot(layers, means, f"{marker}-", label=label)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("layer")
        _mark_integers(axes.xaxis)
        axes.set_ylabel("Jaccard similarity")
        axes.set_title(f"{figures.shorten_name(report.model)}: are the same positions kept?")
        axes.grid(alpha=0.3)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _show_heads(
    figure: Figure,
    axes: Axes,
    selection: Selection,
    values: Float,
    label: str,
    end: int | None = None,
) -> None:
    """A heat map with a row per layer and head over the positions before the last chunk.

    Or before ``end``.
    """
    image = axes.imshow(
        values,
        extent=(0, end or selection.begins[-1], selection.n_slots - 0.5, -0.5),
        cmap="viridis",
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_yticks(*_layer_ticks(selection))
    axes.set_xlabel("position (tokens)")
    figures.mark_thousands(axes.xaxis)
    axes.set_ylabel(_layer_label(selection))
    figure.colorbar(image, ax=axes, label=label)


def _note_missing(values: Float) -> str:
    """What white means, where a head has no scores."""
    return " (white: heads without any)" if np.isnan(values).any() else ""


def _mark_integers(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _layer_label(selection: Selection) -> str:
    return f"layer ({format_count(selection.n_layer_heads, selection.head_name)} each)"


def _layer_ticks(selection: Selection) -> tuple[list[int], list[str]]:
    """Rows of the first head of some layers, and the layers' names."""
    step = max(1, selection.n_layers // 10)
    layers = range(0, selection.n_layers, step)
    return [layer * selection.n_layer_heads for layer in layers], [str(layer) for layer in layers]


def _column_means(values: Float) -> Float:
    """[n, m] as [n, at most _MAX_COLUMNS]: means of neighbouring columns over what is not NaN."""
    n_rows, n_columns = values.shape
    width = -(-n_columns // _MAX_COLUMNS)
    n_groups = -(-n_columns // width)
    padded = np.full((n_rows, n_groups * width), np.nan)
    padded[:, :n_columns] = values
    groups = padded.reshape(n_rows, n_groups, width)
    known = ~np.isnan(groups)
    counts = known.sum(axis=2)
    sums = np.where(known, groups, 0.0).sum(axis=2)
    return np.where(counts, sums / np.maximum(counts, 1), np.nan)
