"""The pictures of the examples, in one style."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into a file; needs no screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, FAINT = "#1f2933", "#9aa5b1"
# One colour for each rank or curve, in this order.
COLORS = ("#3b82c4", "#d1495b", "#2a9d8f", "#e9a23b", "#7b5ea7", "#5c677d", "#9c6644", "#84a59d")


@contextmanager
def picture(path: Path, panels: int = 1, size: tuple[float, float] = (8, 4.5)) -> Iterator[list[Axes]]:
    """Yield the axes of a picture, side by side, and save it as a PNG at the end; ``size`` is in inches."""
    figure: Figure
    figure, axes = plt.subplots(1, panels, figsize=size, dpi=150, layout="constrained", squeeze=False)
    for each in axes[0]:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(colors=INK)
    yield list(axes[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def save_curve(path: Path, heading: str, values: Sequence[float], *, x: str, y: str, first: int = 0) -> None:
    """Draw one curve with a heading as a PNG; ``first`` is the first value's place on the x axis."""
    with picture(path) as (axes,):
        curves(axes, {y: (range(first, first + len(values)), values)}, x=x, y=y)
        title(axes, heading)


def title(axes: Axes, text: str) -> None:
    """Write a title above the axes, at the left."""
    axes.set_title(text, loc="left", fontsize=12, color=INK, pad=12)


def curves(
    axes: Axes, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str, log: bool = False
) -> None:
    """Draw lines; a legend names them if there are several.

    Args:
        axes: where to draw.
        lines: x and y values by name.
        x: what the x axis shows, with its unit.
        y: what the y axis shows, with its unit.
        log: True for a logarithmic y axis.
    """
    for (name, (positions, values)), color in zip(lines.items(), COLORS, strict=False):
        axes.plot(positions, values, color=color, linewidth=1.8, label=name)
    if log:
        axes.set_yscale("log")
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(axis="y", color=FAINT, alpha=0.3, linewidth=0.6)
    if len(lines) > 1:
        axes.legend(frameon=False, labelcolor="linecolor")
