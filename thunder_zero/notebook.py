"""Small pictures as HTML, for ``_repr_html_``: a title, a few figures, and a curve or lanes as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LANE = 600, 80, 18  # pixels: width of a picture, height of a curve, height of a lane
COLOURS = ("#7aa9de", "#46aaa3", "#9783d0")
WAITS = "#c4601c"

LaneBar = tuple[float, float, bool]  # start, end, whether the bar is a wait


def small(title: str, facts: Mapping[str, str], picture: str) -> str:
    """Return HTML with a title, a list of named figures, and a picture."""
    cells = "".join(
        f"<td><small>{escape(name)}</small><br><b>{escape(value)}</b></td>" for name, value in facts.items()
    )
    return f"<div><b>{escape(title)}</b><table><tr>{cells}</tr></table>{picture}</div>"


def curve(values: Sequence[float], label: str) -> str:
    """Return an SVG step curve of ``values``, with a mark at the highest value. ``label`` describes the picture."""
    highest = max(values, default=0) or 1
    step = WIDTH / max(len(values), 1)
    tops = [HEIGHT * (1 - value / highest) for value in values]
    points = [f"L{index * step:.1f} {top:.1f}h{step:.2f}" for index, top in enumerate(tops)]
    peak = max(range(len(values)), key=values.__getitem__, default=0)
    area = f'<path d="M0 {HEIGHT}{"".join(points)}V{HEIGHT}z" fill="{COLOURS[0]}"/>'
    mark = f'<circle cx="{(peak + 0.5) * step:.1f}" cy="3" r="3" fill="{WAITS}"><title>the most</title></circle>'
    return _svg(area + mark, HEIGHT, label)


def lanes(bars_by_name: Mapping[str, Iterable[LaneBar]], label: str) -> str:
    """Return an SVG of named lanes with bars. Adjacent bars are merged. ``label`` describes the picture."""
    merged = {name: _merge(list(bars)) for name, bars in bars_by_name.items()}
    scale = WIDTH / (max((end for bars in merged.values() for _, end, _ in bars), default=0) or 1)
    parts = []
    for lane, (name, bars) in enumerate(merged.items()):
        for start, end, is_wait in bars:
            left, width = start * scale, max((end - start) * scale, 0.3)
            fill, title = (WAITS, "waits") if is_wait else (COLOURS[lane % len(COLOURS)], name)
            box = f'x="{left:.1f}" y="{lane * LANE}" width="{width:.2f}" height="{LANE - 3}" fill="{fill}"'
            parts.append(f"<rect {box}><title>{escape(title)}</title></rect>")
        parts.append(f'<text x="{WIDTH + 6}" y="{lane * LANE + 12}" fill="currentColor">{escape(name)}</text>')
    return _svg("".join(parts), len(merged) * LANE, label)


def _merge(bars: Sequence[LaneBar]) -> list[LaneBar]:
    """Merge bars with less than a third of a pixel between them."""
    gap = max((end for _, end, _ in bars), default=0) / WIDTH / 3
    merged: list[LaneBar] = []
    for start, end, is_wait in bars:
        if merged and merged[-1][2] is is_wait and start - merged[-1][1] <= gap:
            merged[-1] = merged[-1][0], end, is_wait
        elif end > start:
            merged.append((start, end, is_wait))
    return merged


def _svg(inside: str, height: int, label: str) -> str:
    style = "max-width:100%;font:12px sans-serif;display:block"
    size = f'viewBox="0 0 {WIDTH + 80} {height}" width="{WIDTH + 80}" style="{style}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{inside}</svg>'
