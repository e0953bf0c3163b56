"""Pictures of results. matplotlib comes with ``pip install 'edgeh2o[plot]'``.

Every function writes one PNG. Call ``check_picture`` before the work whose results are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ResourceError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .needle import NeedleReport

# Text stays readable when the picture is shown at half its size.
_FONT_POINTS = 15
_DPI = 110


def check_picture(path: Path) -> None:
    """Raises ResourceError without matplotlib, UsageError if ``path`` cannot become a PNG file."""
    check_matplotlib()
    if path.suffix.lower() != ".png":
        raise UsageError(f"pictures are PNG files; name it {path.name}.png, got {path}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the picture {path.name}")


def check_matplotlib() -> None:
    """Raises ResourceError that names the extra if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ResourceError("pictures need matplotlib: pip install 'edgeh2o[plot]'")


def make_folder(path: Path) -> Path:
    """The folder for pictures, made if it is missing. Raises UsageError if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {path}: {error.strerror}") from None
    return path


def draw_needle(report: NeedleReport, path: Path) -> None:
    """Share of exact answers over depth and length, dense beside sparse.

    A cell shows the share of the places inside a chunk, and the mean log-probability.
    """
    lengths, depths = report.grid.lengths, report.grid.depths
    titles = {"dense": "dense", "sparse": str(report.attention["algorithm"])}
    with _picture(path, 5.0 + 2.4 * len(lengths), 2.6 + 0.9 * len(depths)) as figure:
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
            axes.set_xlabel("prompt length (tokens)")
            axes.set_title(title)
        panels[0].set_ylabel("depth of the passkey")
        bar = figure.colorbar(image, ax=panels, label="exact answers")
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        figure.suptitle("Passkey retrieval: exact answers, mean log-probability of a token")


@contextmanager
def _picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in inches, written to ``path`` at the end."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": _FONT_POINTS, "axes.titlesize": "medium"}):
        figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        try:
            figure.savefig(path)
        except OSError as error:
            raise UsageError(f"cannot write the picture {path}: {error.strerror}") from None
