"""The plot of the bench: step time over bandwidth, and the bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib

from examples.bench.report import ALONE, Result, best_by_group, rate_of

matplotlib.use("Agg")  # draws into a file, without a screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

INK, FAINT = "#1f2933", "#9aa5b1"
OURS = {  # group -> colour
    "thunder_zero 0": "#7fb3e0",
    "thunder_zero 1": "#5b9bd5",
    "thunder_zero 2": "#2f6fb3",
    "thunder_zero 3": "#0b3c6f",
    "thunder_zero 3, all gathered again": "#4a4e9e",
}
PEERS = {
    "torch DDP": "#f2b880",
    "FSDP2 keep": "#e07b39",
    "FSDP2 reshard": "#a63d1c",
    "FSDP2 keep+rs": "#f0a0a0",
    "FSDP2 reshard+rs": "#c75c5c",
    "thunder.distributed ddp": "#c9a0dc",
    "thunder.distributed fsdp": "#7b4b94",
    "DeepSpeed 2": "#8fbf9f",
    "DeepSpeed 3": "#3f7d58",
}


def save_plot(results: Sequence[Result], path: Path) -> None:
    """A PNG with one panel per world size; it shows the best contestant of each group there."""
    worlds = sorted({result.world_size for result in results})
    figure, panels = plt.subplots(1, len(worlds), figsize=(6.2 * len(worlds), 5), squeeze=False, sharey=True)
    for panel, world_size in zip(panels[0], worlds, strict=True):
        own = [result for result in results if result.world_size == world_size]
        draw(panel, sorted(own, key=lambda result: rate_of(result.network)))
        panel.set_title(f"{world_size} ranks", color=INK)
    panels[0][0].set_ylabel("seconds per step (best setting of each)", color=INK)
    labels = {
        label: line for panel in panels[0] for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labels.values(), labels.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def draw(panel: Axes, results: Sequence[Result]) -> None:
    """Draw lines over networks, slowest first; the bounds are dashed."""
    places = range(len(results))
    groups = dict.fromkeys(group for result in results for group in best_by_group(result.rows) if group != ALONE)
    for group in groups:
        found = [(place, best_by_group(result.rows).get(group)) for place, result in enumerate(results)]
        points = [(place, row) for place, row in found if row is not None]
        mids = [median(row.seconds) for _, row in points]
        spread = [
            [mid - min(row.seconds) for mid, (_, row) in zip(mids, points, strict=True)],
            [max(row.seconds) - mid for mid, (_, row) in zip(mids, points, strict=True)],
        ]
        style = {"marker": "o", "linewidth": 2.2} if group in OURS else {"marker": "s", "linewidth": 1.3}
        colour = (OURS | PEERS).get(group, FAINT)
        at = [place for place, _ in points]
        panel.errorbar(at, mids, yerr=spread, label=group, color=colour, markersize=5, capsize=2, **style)
    for stage, words, dashes in (
        (2, "bound of stages 0 to 2", (4, 2)),
        (3, "bound of stage 3, all gathered again", (1, 1.5)),
    ):
        heights = [result.bound(stage) for result in results]
        panel.plot(places, heights, color=INK, linewidth=1.5, linestyle=(0, dashes), label=words, zorder=5)
    panel.set_yscale("log")
    panel.set_xticks(list(places), [result.network for result in results])
    panel.set_xlabel("network", color=INK)
    panel.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    panel.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    panel.tick_params(colors=INK, which="both", labelsize=8)
    panel.grid(True, which="both", axis="y", color=FAINT, alpha=0.25)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
