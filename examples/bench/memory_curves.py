"""Draws the memory of a step line by line, by kind, for each stage: a forecast, with measured points on it.

python -m examples.bench.memory_curves          # docs/images/memory.png; two minutes on two cores
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

import thunder_zero as tz  # before thunder
from examples.bench.cases import Case
from examples.bench.memory_table import DOCS, MiB
from examples.bench.step_memory import BACKWARD, FORWARD, LOSS, OPTIMIZER, PASSES, Measured, forecast, measure
from thunder_zero.tools import Holds

matplotlib.use("Agg")  # draws into a file, without a screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

PICTURE = DOCS / "images/memory.png"
INK, FAINT = "#1f2933", "#9aa5b1"
WITHIN = "allocated and freed in one line"
COLORS = {  # from the bottom of the picture up
    Holds.OPTIMIZER: "#5c677d",
    Holds.PARAMETER: "#2f6fb3",
    Holds.BUFFER: "#9c6644",
    Holds.INPUT: "#c9a0dc",
    Holds.GATHERED: "#8fc1ea",
    Holds.SAVED: "#e9a23b",
    Holds.LOSS: "#7b5ea7",
    Holds.DEFERRED: "#8c1c13",
    Holds.REDUCED_GRADIENT: "#1b7f5c",
    Holds.FULL_GRADIENT: "#7cc8a4",
    Holds.IN_FLIGHT: "#d1495b",
    Holds.TEMPORARY: "#f3d9a4",
}
WIDE = {LOSS: 0.04, OPTIMIZER: 0.12}  # these phases are one line: their share of the step's width
PEAK = 2  # of the measured points
SHOWN = 0.002  # of the peak; kinds with less are not named


@dataclass(frozen=True, slots=True)
class Step:
    """A forecast along the x axis, in MiB.

    Attributes:
        edges: where each line begins, and the end; lines of a trace are 1 wide.
        alive: bytes by kind in each line.
        highest: the most in each line.
        borders: where each phase begins.
    """

    edges: Sequence[float]
    alive: Mapping[Holds, Sequence[float]]
    highest: Sequence[float]
    borders: Mapping[str, float]

    def end_of(self, phase: str) -> float:
        """Where a phase ends."""
        later = [at for at in self.borders.values() if at > self.borders[phase]]
        return min(later, default=self.edges[-1])


def step_of(memory: tz.tools.Memory) -> Step:
    """The lines of a forecast side by side."""
    lines, after = memory.lines, memory.alive
    edges = [0.0]
    borders: dict[str, float] = {}
    alive: dict[Holds, list[float]] = {kind: [] for kind in COLORS}
    for number, line in enumerate(lines):
        borders.setdefault(line.phase, edges[-1])
        # what the optimizer reads is alive until its line ends
        shown = after[number - 1 if line.phase == OPTIMIZER else number]
        for kind, values in alive.items():
            values.append(shown.get(kind, 0) / MiB)
        edges.append(edges[-1] + (len(lines) * WIDE[line.phase] if line.phase in WIDE else 1))
    return Step(edges, alive, [(line.highest or 0) / MiB for line in lines], borders)


def points_of(step: Step, measured: Measured) -> list[tuple[float, float]]:
    """What was measured, in MiB, at the line of the forecast that it belongs to: ends of parts, and highest bytes."""
    before = measured.at_rest + measured.inputs
    parts = measured.parts
    top = max(PASSES, key=lambda part: parts[part].highest)
    peak = max(range(len(step.highest)), key=lambda line: step.highest[line] if _in_passes(step, line) else 0)
    return [
        (0.0, before / MiB),
        (step.end_of(FORWARD), (before + parts[FORWARD].at_end) / MiB),
        (_middle(step, peak), (before + parts[top].highest) / MiB),
        (step.end_of(BACKWARD), (before + parts[BACKWARD].at_end) / MiB),
        (_middle(step, len(step.highest) - 1), (measured.at_rest + parts[OPTIMIZER].highest) / MiB),
    ]


def _in_passes(step: Step, line: int) -> bool:
    return step.edges[line] < step.borders[OPTIMIZER]


def _middle(step: Step, line: int) -> float:
    return (step.edges[line] + step.edges[line + 1]) / 2


def draw_curves(path: Path = PICTURE) -> None:
    """Forecast and measure the small GPT in stages 0 to 3 on two ranks, and draw them."""
    cases = {stage: Case("small GPT", tz.Policy(stage)) for stage in range(4)}
    forecasts = {stage: forecast(case) for stage, case in cases.items()}
    save({stage: (memory, measure(cases[stage])) for stage, memory in forecasts.items()}, path)


def save(stages: Mapping[int, tuple[tz.tools.Memory, Measured]], path: Path = PICTURE) -> None:
    """A PNG with a panel for each stage."""
    figure, panels = plt.subplots(2, 2, figsize=(13, 8.5), sharey=True, layout="constrained")
    for panel, (stage, (memory, measured)) in zip(panels.flat, stages.items(), strict=True):
        step = step_of(memory)
        draw(panel, step, points_of(step, measured))
        panel.set_title(
            "DDP" if stage == 0 else f"ZeRO-{stage}", loc="left", color=INK, fontsize=13, weight="bold", pad=9
        )
        name_peaks(panel, memory, measured)
    for panel in panels[:, 0]:
        panel.set_ylabel("MiB of rank 0", color=INK)
    for panel in panels[1]:
        panel.set_xlabel("the lines of the step, in the order in which they run", color=INK)
    highest = max(line.highest or 0 for memory, _ in stages.values() for line in memory.lines)
    panels[0][0].set_ylim(0, 1.25 * highest / MiB)
    figure.legend(
        handles=legend_of([memory for memory, _ in stages.values()]), loc="outside right center", frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw(panel: Axes, step: Step, points: Sequence[tuple[float, float]]) -> None:
    """The kinds on each other, the most in each line above them, and the measured points."""
    below = [0.0] * len(step.highest)
    for kind, values in step.alive.items():
        above = [a + b for a, b in zip(below, values, strict=True)]
        panel.stairs(above, step.edges, baseline=below, fill=True, color=COLORS[kind], linewidth=0)
        below = above
    panel.stairs(step.highest, step.edges, baseline=below, fill=True, color=FAINT, alpha=0.6, linewidth=0)
    panel.stairs(step.highest, step.edges, baseline=None, color=INK, linewidth=0.5)
    panel.plot(
        *zip(*points, strict=True), "o", markersize=6, color="white", markeredgecolor=INK, clip_on=False, zorder=5
    )
    white: dict[str, Any] = {"facecolor": "white", "linewidth": 0, "pad": 0.5}
    place: dict[str, Any] = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center"}
    panel.annotate("peak", points[PEAK], color=INK, fontsize=9, bbox=white, **place)
    for phase, at in step.borders.items():
        if at:
            panel.axvline(at, ymax=0.9, color=INK, linewidth=0.7, linestyle=(0, (4, 3)), alpha=0.6)
        middle = (at + step.end_of(phase)) / 2
        name = {OPTIMIZER: "optimizer\nstep"}.get(phase, phase)
        count = sum(at <= edge < step.end_of(phase) for edge in step.edges[:-1])
        words = f"{name}\n{count:,} lines" if count > 1 else name
        place = {"transform": panel.get_xaxis_transform(), "ha": "center", "va": "top"}
        panel.text(middle, 1.0, words, color=INK, fontsize=9, linespacing=1.25, **place)
    panel.set_xlim(0, step.edges[-1])
    panel.set_xticks([])
    panel.tick_params(colors=INK)
    panel.set_axisbelow(True)
    panel.grid(axis="y", color=FAINT, alpha=0.3, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def name_peaks(panel: Axes, memory: tz.tools.Memory, measured: Measured) -> None:
    """Forecast and measured peak, above the panel."""
    words = f"peak: forecast {memory.peak / MiB:.2f}, measured {measured.peaks.peak / MiB:.2f} MiB"
    panel.set_title(words, loc="right", color=INK, fontsize=10, pad=9)


def legend_of(memories: Sequence[tz.tools.Memory]) -> list[Patch | Line2D]:
    """The kinds that can be seen, from the top of the picture down."""
    top = max(memory.peak for memory in memories)
    most = {kind: max(alive.get(kind, 0) for memory in memories for alive in memory.alive) for kind in COLORS}
    seen = [kind for kind in COLORS if most[kind] > SHOWN * top]
    return [
        Line2D([], [], marker="o", linestyle="", markersize=6, color="white", markeredgecolor=INK, label="measured"),
        Patch(color=FAINT, alpha=0.6, label=WITHIN),
        *(Patch(color=COLORS[kind], label=str(kind)) for kind in reversed(seen)),
    ]


if __name__ == "__main__":
    draw_curves()
