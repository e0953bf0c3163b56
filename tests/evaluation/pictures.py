"""What a picture is, without looking at it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edgeh2o.evaluation.figures import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file; an assertion fails for any other file."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@contextmanager
def checked_picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """``figures.picture`` with an assertion that its text is there and whole."""
    with picture(path, width, height) as figure:
        yield figure
        figure.canvas.draw()
        check_figure(figure)


def check_figure(figure: Figure) -> None:
    """Axes and colour bars have labels, nothing is clipped, notes stay inside their axes."""
    drawn = figure.get_tightbbox()
    assert min(drawn.x0, drawn.y0) >= -0.01, f"clipped: {drawn}"
    assert drawn.x1 <= figure.get_figwidth() + 0.01, f"clipped: {drawn}"
    assert drawn.y1 <= figure.get_figheight() + 0.01, f"clipped: {drawn}"
    for legend in figure.legends:
        for text in figure.texts:
            assert not legend.get_window_extent().overlaps(text.get_window_extent()), text
    for axes in figure.axes:
        if axes.get_label() == "<colorbar>":
            assert axes.get_ylabel(), "a colour bar without a label"
            continue
        columns, rows = axes.get_shared_x_axes(), axes.get_shared_y_axes()
        assert any(other.get_xlabel() for other in columns.get_siblings(axes)), "no label of x"
        assert any(other.get_ylabel() for other in rows.get_siblings(axes)), "no label of y"
        for note in axes.texts:
            box, frame = note.get_window_extent(), axes.bbox.padded(1)
            assert frame.x0 <= box.x0 <= box.x1 <= frame.x1, f"{note} leaves its axes"
            assert frame.y0 <= box.y0 <= box.y1 <= frame.y1, f"{note} leaves its axes"
