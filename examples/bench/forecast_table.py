"""The data file of forecasts held against steps (docs/forecast.json), and the table of docs/cost-model.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from statistics import median

from examples.bench.page import json_of, with_section
from examples.bench.report import rate_of

DOCS = Path(__file__).parents[2] / "docs"
DATA, PAGE = DOCS / "forecast.json", DOCS / "cost-model.md"
SECTION = ("forecasts", "examples.bench.forecast")
TIE = 0.03  # stages whose measured medians differ by less are as fast
HEADERS = ("ranks, network", "stage", "measured, s", "min to max", "forecast, s", "off by", "compute", "exposed")


@dataclass(frozen=True, slots=True)
class Row:
    """A stage on a network.

    Attributes:
        network: "loopback", or a rate.
        world_size: number of ranks.
        stage: 0 to 3.
        measured: seconds of a step, one for each round: of the slowest rank.
        seconds, compute, exposed, wire: of the forecast.
        versions: machine, Python, torch, Thunder.
    """

    network: str
    world_size: int
    stage: int
    measured: tuple[float, ...]
    seconds: float
    compute: float
    exposed: float
    wire: float
    versions: str

    @property
    def where(self) -> tuple[int, str]:
        """World size and network."""
        return self.world_size, self.network

    @property
    def step(self) -> float:
        """The median of the measured times."""
        return median(self.measured)

    @property
    def off(self) -> float:
        """The share of the measured time by which the forecast is above it."""
        return self.seconds / self.step - 1


def misranked(rows: Iterable[Row]) -> list[tuple[int, int]]:
    """Pairs of stages of one network and world that the forecast ranks otherwise than the measurement does, the faster
    one first. Of stages that are tied any order is right."""
    pairs = (sorted(pair, key=lambda row: row.step) for pair in combinations(rows, 2))
    return [(fast.stage, slow.stage) for fast, slow in pairs if not tied(fast, slow) and slow.seconds <= fast.seconds]


def tied(fast: Row, slow: Row) -> bool:
    """Whether measurements do not tell two stages apart: medians less than 3 % apart, or times that overlap."""
    return slow.step <= fast.step * (1 + TIE) or min(slow.measured) <= max(fast.measured)


def read_rows(path: Path = DATA) -> tuple[Row, ...]:
    """Read the file; empty if there is none."""
    if not path.exists():
        return ()
    return tuple(Row(**row | {"measured": tuple(row["measured"])}) for row in json.loads(path.read_text())["rows"])


def merged(old: Iterable[Row], new: Iterable[Row]) -> tuple[Row, ...]:
    """New rows in place of old ones of the same network and world, by ranks, then from slow networks to fast ones."""
    new = tuple(new)
    gone = {row.where for row in new}
    rows = (*(row for row in old if row.where not in gone), *new)
    return tuple(sorted(rows, key=lambda row: (row.world_size, rate_of(row.network), row.stage)))


def write(rows: Sequence[Row], path: Path = DATA, page: Path = PAGE) -> None:
    """Write the file, and put its tables into the page."""
    path.write_text(json_of(map(_rounded, rows)))
    page.write_text(with_tables(page.read_text(), rows))


def _rounded(row: Row) -> dict[str, object]:
    values = asdict(row)
    for name in ("seconds", "compute", "exposed", "wire"):
        values[name] = float(f"{values[name]:.4g}")
    return values | {"measured": [float(f"{seconds:.4g}") for seconds in row.measured]}


def with_tables(text: str, rows: Sequence[Row]) -> str:
    """The page's text with the tables of these rows."""
    return with_section(text, *SECTION, tables(rows))


def tables(rows: Sequence[Row]) -> str:
    """The table, a line for each network, and the versions, in Markdown."""
    stages = sorted({row.stage for row in rows})
    headers = ["ranks, network", *(f"stage {stage}" for stage in stages), "ranked otherwise"]
    networks = dict.fromkeys(row.where for row in rows)
    lines = [headers, ["---"] * len(headers), *(line(rows, where, stages) for where in networks)]
    if not any(row[-1] for row in lines[2:]):
        lines = [row[:-1] for row in lines]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return table + "\n" + "; ".join(dict.fromkeys(row.versions for row in rows)) + ".\n"


def line(rows: Iterable[Row], where: tuple[int, str], stages: Iterable[int]) -> list[str]:
    """Return the cells of one network: the measured time and forecast error of each stage, and misranked stages."""
    here = {row.stage: row for row in rows if row.where == where}
    pairs = ", ".join(f"stage {slow} before stage {fast}" for fast, slow in misranked(here.values()))
    times = (f"{row.step:.3f} ({row.off:+.1%})" if (row := here.get(n)) else "" for n in stages)
    return [place(next(iter(here.values()))), *times, pairs]


def place(row: Row) -> str:
    return f"W = {row.world_size}, {row.network}"


def cells(row: Row) -> tuple[str, ...]:
    """What the screen shows of a row, under HEADERS."""
    return (
        place(row),
        str(row.stage),
        f"{row.step:.3f}",
        f"{min(row.measured):.3f} to {max(row.measured):.3f}",
        f"{row.seconds:.3f}",
        f"{row.off:+.1%}",
        f"{row.compute:.3f}",
        f"{row.exposed:.3f}",
    )


def text_of(row: Row) -> str:
    """For the screen."""
    return "  ".join(f"{name} {cell}" for name, cell in zip(HEADERS, cells(row), strict=True))


def versions() -> str:
    """Machine, Python, torch and Thunder."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    names = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning-thunder"))
    return f"{cpu or platform.processor()}, one core a rank, Python {platform.python_version()}, {names}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
