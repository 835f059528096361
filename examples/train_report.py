"""Reports a training run: prints a table and plots the loss curve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from pictures import COLORS, FAINT, INK, picture, title
from rich.console import Console
from show import figures, mb

SMOOTHING = 12  # steps on either side that the curve averages the training loss over
TRAIN, VALIDATION = COLORS[:2]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of tensors that one rank holds.

    Attributes:
        parameters, optimizer: at rest, between two steps and after ``zero_grad()``.
        gradients: right after the optimizer step.
        peak: most bytes of all tensors alive at one time in a training step.
        gathered: most bytes of gathered parameters alive at one time, by the timeline.
        gathered_between: bytes of gathered parameters alive between forward and backward, by the timeline.
    """

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    gathered: int
    gathered_between: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends in one training step.

    Attributes:
        timeline: the sum over the collectives of the program that ran, mean over ranks.
        formula: the expected number, computed from the stage and the model's parameters alone.
        words: the formula in words.
    """

    timeline: float
    formula: float
    words: str


@dataclass(frozen=True)
class Report:
    """One run.

    Attributes:
        title: the model, its dtype, the stage and the number of ranks.
        losses: loss of each training step in nats per byte, mean over ranks.
        validation: (steps done, loss in nats per byte, mean over ranks).
        tokens_per_second: sum over ranks, in a median step of the last ones.
        kept_unsharded: the modules whose parameters stay unsharded from forward to backward, in words.
    """

    title: str
    losses: list[float]
    validation: list[tuple[int, float]]
    tokens_per_second: float
    traffic: Traffic
    memory: Memory
    kept_unsharded: str

    @property
    def loss_at_end(self) -> float:
        """Mean training loss of the last twentieth of the steps, at least one."""
        return mean(self.losses[-max(len(self.losses) // 20, 1) :])


def print_report(report: Report, console: Console) -> None:
    """Print the table, one figure per line."""
    memory, traffic = report.memory, report.traffic
    parts = f"between steps: parameters {mb(memory.parameters)}, AdamW {mb(memory.optimizer)}"
    rest = memory.parameters + memory.optimizer
    rows = (
        ("training loss, first step", f"{report.losses[0]:.3f}", "nats per byte"),
        ("training loss, end", f"{report.loss_at_end:.3f}", "mean of the last twentieth of the steps"),
        ("validation loss", f"{report.validation[-1][1]:.3f}", f"at the start {report.validation[0][1]:.3f}"),
        ("tokens/s", f"{report.tokens_per_second:,.0f}", "all ranks, a median step of the last ones"),
        ("bytes sent per rank and step", f"{traffic.timeline:,.0f}", "counted in the program that ran"),
        ("by the formula", f"{traffic.formula:,.0f}", traffic.words),
        *([("kept unsharded", mb(memory.gathered_between), report.kept_unsharded)] if memory.gathered else []),
        ("memory at rest per rank", mb(rest), parts),
        (
            "memory at peak per rank",
            mb(memory.peak),
            f"in one step; of it gathered parameters {mb(memory.gathered)}, gradients {mb(memory.gradients)}",
        ),
    )
    figures(console, report.title, rows)


def save_curve(report: Report, path: Path) -> None:
    """Draw training and validation loss over the steps into a PNG."""
    with picture(path) as (axes,):
        draw_curve(report, axes)


def draw_curve(report: Report, axes: Axes) -> None:
    """Draw training loss, raw and smoothed, and validation loss, each with its last value."""
    steps = range(len(report.losses))  # steps done before each loss, as for validation
    smooth = _smoothed(report.losses)
    axes.plot(steps, report.losses, color=TRAIN, alpha=0.3, linewidth=0.8)
    axes.plot(steps, smooth, color=TRAIN, linewidth=1.8)
    at, validation = zip(*report.validation, strict=True)
    axes.plot(at, validation, "o", color=VALIDATION, markersize=7, markeredgecolor="white", zorder=3, clip_on=False)
    low, high = sorted([(report.loss_at_end, "training", TRAIN), (validation[-1], "validation", VALIDATION)])
    gap = 0.06 * (max(report.losses) - min(report.losses))  # between the two labels, at least
    shift = max(gap - (high[0] - low[0]), 0) / 2
    for (value, name, color), place in ((low, low[0] - shift), (high, high[0] + shift)):
        label = f"{name} {value:.2f}"
        axes.text(1.03, place, label, color=color, va="center", fontsize=11, transform=axes.get_yaxis_transform())
    title(axes, report.title)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss, nats per byte", color=INK)
    axes.set_xlim(0, len(report.losses))
    axes.grid(axis="y", color=FAINT, alpha=0.3, linewidth=0.6)


def _smoothed(losses: list[float]) -> list[float]:
    """Return a moving average over the steps before and after; over fewer at the steep start and at the end."""
    sides = [min(step, SMOOTHING) for step in range(len(losses))]
    return [mean(losses[step - side : step + side + 1]) for step, side in enumerate(sides)]
