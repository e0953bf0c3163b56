"""Pictures of results. matplotlib comes with ``pip install 'edgeh2o[plot]'``.

Every function writes one PNG. Call ``check_picture`` before the work whose results are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ResourceError, UsageError
from ..formats.atomic_file import check_writable, write_file
from .reporting import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from ..host.memory_profile import MemoryProfile
    from .ablation import AblationReport, AblationResult
    from .long_suite import TaskReport
    from .needle import NeedleReport
    from .throughput import Throughput

# Text stays readable when the picture is shown at half its size.
_FONT_POINTS = 15
_DPI = 110
# The palette of Okabe and Ito (2008), which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
_MARKERS = "os^vDPX"
# What fits above the narrowest picture.
_MAX_NAME_CHARACTERS = 45


def check_picture(path: Path) -> None:
    """Raises UsageError if ``path`` is no name of a PNG file, ResourceError if none can be made."""
    check_matplotlib()
    if path.suffix.lower() != ".png":
        raise UsageError(f"pictures are PNG files; name it {path.name}.png, got {path}")
    check_writable(path, "--plot")


def check_matplotlib() -> None:
    """Raises ResourceError that names the extra if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ResourceError("pictures need matplotlib: pip install 'edgeh2o[plot]'")


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in inches, written to ``path`` at the end."""
    import matplotlib
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {
            "font.size": _FONT_POINTS,
            "axes.titlesize": "medium",
            "figure.titlesize": "medium",
            "axes.prop_cycle": cycler(color=_COLOURS),
        }
    ):
        figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        # Not to a file: what encodes the picture does not say why one cannot be written.
        content = BytesIO()
        figure.savefig(content, format="png")
        write_file(path, content.getvalue(), what="the picture")


def mark_thousands(axis: Axis) -> None:
    """Tick labels with a comma at every third digit, as in titles and tables."""
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def label_speed_over_length(axes: Axes, lengths: Sequence[int]) -> None:
    """Axes of prefill speed over the prompt length, with a tick at each of ``lengths``."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * axes.dataLim.y1)  # results that are alike stay below the border
    mark_thousands(axes.yaxis)
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("prefill (tokens/s)")


def shorten_name(model: str) -> str:
    """The name of a model file, without its middle where it is too long for a title."""
    if len(model) <= _MAX_NAME_CHARACTERS:
        return model
    n_end = _MAX_NAME_CHARACTERS // 3  # quantisation and number of the file
    return f"{model[: _MAX_NAME_CHARACTERS - 3 - n_end]}...{model[-n_end:]}"


def draw_needle(report: NeedleReport, path: Path) -> None:
    """Share of exact answers over depth and length, dense beside sparse.

    A cell shows the share of the places inside a chunk, and the mean log-probability.
    """
    lengths, depths = report.grid.lengths, report.grid.depths
    titles = {"dense": "dense", "sparse": str(report.attention["algorithm"])}
    with picture(path, 5.0 + 2.4 * len(lengths), 2.6 + 0.9 * len(depths)) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (side, title) in zip(panels, titles.items(), strict=True):
            shares = np.empty((len(depths), len(lengths)))
            for row, column in np.ndindex(shares.shape):
                cell = report.select(length=lengths[column], depth=depths[row])
                summary, n_prompts = cell.summary(), len(cell.results)
                share = shares[row, column] = summary[f"{side}_exact"]
                axes.text(
                    column,
                    row,
                    f"{round(share * n_prompts)}/{n_prompts}\n{summary[f'{side}_logprob']:.2f}",
                    ha="center",
                    va="center",
                    color="white" if share < 0.55 else "black",
                )
            image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            axes.set_yticks(range(len(depths)), [f"{100 * depth:g} %" for depth in depths])
            axes.set_xlabel("prompt tokens")  # a panel of one length is narrow
            axes.set_title(title)
        panels[0].set_ylabel("depth of the passkey")
        bar = figure.colorbar(image, ax=panels, label="exact answers")
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        figure.suptitle("Passkey retrieval: exact answers,\nmean log-probability of a right token")


def draw_throughput(
    results: Sequence[Throughput],
    path: Path,
    *,
    peer: Mapping[str, Sequence[tuple[int, float]]] = MappingProxyType({}),
) -> None:
    """Tokens per second of the prefill tests over the prompt length, with the range of samples.

    ``peer`` adds lines of (prompt length, tokens/s) under their names.
    """
    lines: dict[str, list[Throughput]] = {}
    for result in results:
        if result.workload.n_prompt:
            lines.setdefault(_line_name(result), []).append(result)
    with picture(path, 10, 6) as figure:
        axes = figure.subplots()
        for name, line in lines.items():
            line = sorted(line, key=lambda result: result.workload.n_prompt)
            medians = [result.median_tps for result in line]
            low = [result.median_tps - min(result.samples_tps) for result in line]
            high = [max(result.samples_tps) - result.median_tps for result in line]
            lengths = [result.workload.n_prompt for result in line]
            style = "o-" if line[0].mode == "sparse" else "s--"
            axes.errorbar(lengths, medians, yerr=[low, high], fmt=style, capsize=4, label=name)
        for name, points in peer.items():
            peer_lengths, rates = zip(*points, strict=True)
            axes.errorbar(peer_lengths, rates, fmt="^:", label=name)
        lengths = sorted(
            {result.workload.n_prompt for line in lines.values() for result in line}
            | {length for points in peer.values() for length, _ in points}
        )
        label_speed_over_length(axes, lengths)
        axes.set_title(f"{shorten_name(results[0].model)}, {results[0].isa}: median and range")
        axes.grid(alpha=0.3)
        axes.legend()


def _line_name(result: Throughput) -> str:
    return f"{result.attention}, {format_count(result.threads, 'thread')}"


def draw_memory(results: Sequence[Throughput], path: Path) -> None:
    """Allocated bytes by purpose over the prompt length: a bar per mode, of the first threads."""
    bars = [r for r in results if r.workload.n_prompt and r.threads == results[0].threads]
    bars.sort(key=lambda result: (result.workload.n_prompt, result.mode))
    lengths = sorted({result.workload.n_prompt for result in bars})
    modes = sorted({result.mode for result in bars})
    width = 0.8 / len(modes)
    centres = [
        lengths.index(result.workload.n_prompt)
        + width * (modes.index(result.mode) - (len(modes) - 1) / 2)
        for result in bars
    ]
    with picture(path, 4.5 + 2.0 * len(lengths), 6.5) as figure:
        axes = figure.subplots()
        bottoms = np.zeros(len(bars))
        for purpose in bars[0].memory_bytes:
            heights = np.array([result.memory_bytes[purpose] for result in bars]) / 2**20
            label = purpose.replace("_", " ")
            axes.bar(centres, heights, 0.92 * width, bottom=bottoms, label=label)
            bottoms += heights
        for centre, top, result in zip(centres, bottoms, bars, strict=True):
            axes.text(centre, top, f"{result.mode}\n{top:,.0f}", ha="center", va="bottom")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_xlabel("prompt length (tokens)")
        axes.set_ylabel("allocated memory (MiB)")
        axes.set_ylim(top=1.18 * bottoms.max())
        mark_thousands(axes.yaxis)
        batch_size = max(result.batch_size for result in bars)
        figure.suptitle(f"{shorten_name(bars[0].model)}\nbatches of up to {batch_size:,} tokens")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", reverse=True)


def draw_ablation(report: AblationReport, path: Path) -> None:
    """Loss with its standard error over keys per query.

    A line joins the settings that differ in the last field of the grid alone; its values stand at
    the points.
    """
    *_, last = report.results[0].setting.values
    lines: dict[str, list[AblationResult]] = {}
    for result in report.results:
        others = [f"{n} {v}" for n, v in result.setting.values.items() if n != last]
        lines.setdefault(", ".join(others), []).append(result)
    with picture(path, 10, 6.5) as figure:
        axes = figure.subplots()
        # Labels of lines that run close stand on different sides of their points.
        sides = cycle(((7, 5, "left", "bottom"), (-7, -5, "right", "top")))
        for (name, line), marker, side in zip(lines.items(), cycle(_MARKERS), sides, strict=False):
            line = sorted(line, key=lambda result: result.keys_per_query)
            qualities = [report.quality(result) for result in line]
            costs = [result.keys_per_query for result in line]
            losses = [quality.loss_percent for quality in qualities]
            errors = [quality.loss_percent_error for quality in qualities]
            axes.errorbar(costs, losses, yerr=errors, fmt=f"{marker}-", capsize=4, label=name)
            for cost, loss, result in zip(costs, losses, line, strict=True):
                axes.annotate(
                    str(result.setting.values[last]),
                    (cost, loss),
                    xytext=side[:2],
                    textcoords="offset points",
                    fontsize="small",
                    ha=side[2],
                    va=side[3],
                )
        axes.axhline(0, color="black", linewidth=1)
        axes.margins(x=0.08)
        mark_thousands(axes.xaxis)
        axes.set_xlabel(f"keys per query (dense: {report.dense_keys_per_query:,.0f})")
        axes.set_ylabel("perplexity loss (%)")
        windows = format_count(report.n_windows, "window")
        axes.set_title(
            f"{shorten_name(report.model)}, {windows} of {report.context:,} tokens, "
            f"range '{report.range_name}'\nvalues at the points: {last}"
        )
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend()


def draw_tasks(report: TaskReport, path: Path) -> None:
    """Share of right answers by task, dense beside sparse; bars: error of their difference."""
    tasks = report.tasks
    places = np.arange(len(tasks))
    with picture(path, 3.0 + 1.3 * len(tasks), 6.5) as figure:
        axes = figure.subplots()
        axes.bar(places - 0.2, [task.dense_percent for task in tasks], 0.4, label="dense")
        axes.bar(
            places + 0.2,
            [task.sparse_percent for task in tasks],
            0.4,
            yerr=[task.difference_error for task in tasks],
            capsize=4,
            label=str(report.attention["algorithm"]),
        )
        axes.set_xticks(places, [task.task for task in tasks], rotation=20)
        axes.set_ylim(0, 108)
        axes.set_xlabel("task")
        axes.set_ylabel("right answers (%)")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(loc="upper right", ncols=2)
        figure.suptitle(
            f"{shorten_name(report.model)}: texts of {report.context:,} tokens, "
            f"{report.keys_per_query:,.0f} keys per query"
        )


def draw_memory_profile(profile: MemoryProfile, allocated: Mapping[str, int], path: Path) -> None:
    """Resident and unique memory over time with its phases, beside the bytes by purpose."""
    # The profile may still run: the samples end where the last of these phases does.
    phases, unit = profile.phases, 2**20
    stop_s = phases[-1].stop_s
    samples = [sample for sample in profile.samples if sample.time_s <= stop_s]
    with picture(path, 13, 6.5) as figure:
        axes, bar = figure.subplots(1, 2, width_ratios=[5, 1], sharey=True)
        times = [sample.time_s for sample in samples]
        axes.plot(times, [sample.rss_bytes / unit for sample in samples], label="RSS (resident)")
        unique = [(s.time_s, s.uss_bytes / unit) for s in samples if s.uss_bytes is not None]
        axes.plot(*zip(*unique, strict=True), ".--", label="USS (this process alone)")
        top = 1.25 * max(sample.rss_bytes for sample in samples) / unit
        for index, phase in enumerate(phases):
            if index % 2:
                axes.axvspan(phase.start_s, phase.stop_s, color="black", alpha=0.06, linewidth=0)
            if phase.stop_s - phase.start_s >= stop_s / 30:
                centre = (phase.start_s + phase.stop_s) / 2
                axes.text(centre, 0.99 * top, phase.name, rotation=90, ha="center", va="top")
        axes.set_xlim(0, stop_s)
        axes.set_ylim(0, top)
        mark_thousands(axes.yaxis)
        axes.set_xlabel("time (s)")
        axes.set_ylabel("memory (MiB)")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        bottom = 0.0
        for purpose, size in allocated.items():
            label = f"{purpose.replace('_', ' ')}: {size / unit:,.1f}"
            bar.bar(0, size / unit, 0.8, bottom=bottom, label=label)
            bottom += size / unit
        bar.set_xticks([])
        bar.set_xlabel("allocated")
        figure.legend(
            *bar.get_legend_handles_labels(),
            loc="outside right upper",
            reverse=True,
            title="allocated (MiB)",
        )
