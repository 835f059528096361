"""Small pictures as HTML, for ``_repr_html_``: a title, a few figures, and a curve or lanes as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LANE = 600, 80, 18  # of pictures, and of a lane
COLOURS = ("#7aa9de", "#46aaa3", "#9783d0")
WAITS = "#c4601c"


def small(title: str, facts: Mapping[str, str], picture: str) -> str:
    """A small form: a title, figures by their names, and a picture."""
    cells = "".join(
        f"<td><small>{escape(name)}</small><br><b>{escape(value)}</b></td>" for name, value in facts.items()
    )
    return f"<div><b>{escape(title)}</b><table><tr>{cells}</tr></table>{picture}</div>"


def curve(values: Sequence[float], words: str) -> str:
    """An SVG of steps, one for each value, from 0 to the highest, which is marked; ``words`` say what it shows."""
    most = max(values, default=0) or 1
    across = WIDTH / max(len(values), 1)
    points = [f"L{at * across:.1f} {HEIGHT * (1 - value / most):.1f}h{across:.2f}" for at, value in enumerate(values)]
    peak = max(range(len(values)), key=values.__getitem__, default=0)
    area = f'<path d="M0 {HEIGHT}{"".join(points)}V{HEIGHT}z" fill="{COLOURS[0]}"/>'
    mark = f'<circle cx="{(peak + 0.5) * across:.1f}" cy="3" r="3" fill="{WAITS}"><title>the most</title></circle>'
    return _svg(area + mark, HEIGHT, words)


def lanes(bars: Mapping[str, Iterable[tuple[float, float, bool]]], words: str) -> str:
    """An SVG of lanes, each with its name and bars (start, end, whether it is a wait). Bars that touch are one."""
    found = {name: _joined(list(of)) for name, of in bars.items()}
    scale = WIDTH / (max((end for of in found.values() for _, end, _ in of), default=0) or 1)
    parts = []
    for at, (name, of) in enumerate(found.items()):
        for start, end, waits in of:
            left, wide = start * scale, max((end - start) * scale, 0.3)
            fill, title = (WAITS, "waits") if waits else (COLOURS[at % len(COLOURS)], name)
            box = f'x="{left:.1f}" y="{at * LANE}" width="{wide:.2f}" height="{LANE - 3}" fill="{fill}"'
            parts.append(f"<rect {box}><title>{escape(title)}</title></rect>")
        parts.append(f'<text x="{WIDTH + 6}" y="{at * LANE + 12}" fill="currentColor">{escape(name)}</text>')
    return _svg("".join(parts), len(found) * LANE, words)


def _joined(bars: Sequence[tuple[float, float, bool]]) -> list[tuple[float, float, bool]]:
    """Bars with less than a third of a pixel between them as one."""
    gap = max((end for _, end, _ in bars), default=0) / WIDTH / 3
    found: list[tuple[float, float, bool]] = []
    for start, end, waits in bars:
        if found and found[-1][2] is waits and start - found[-1][1] <= gap:
            found[-1] = found[-1][0], end, waits
        elif end > start:
            found.append((start, end, waits))
    return found


def _svg(inside: str, height: int, words: str) -> str:
    style = "max-width:100%;font:12px sans-serif;display:block"
    size = f'viewBox="0 0 {WIDTH + 80} {height}" width="{WIDTH + 80}" style="{style}"'
    return f'<svg {size} role="img" aria-label="{escape(words)}">{inside}</svg>'
