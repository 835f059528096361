"""The data file of the zoo (docs/zoo.json), and the table of docs/zoo.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from examples.bench.families import BY_NAME
from examples.bench.page import json_of, with_section

DOCS = Path(__file__).parents[2] / "docs"
DATA, PAGE = DOCS / "zoo.json", DOCS / "zoo.md"
HEADERS = ("family", "class", "difference", "graphs", "CPU s")
ALIGNED = ("---", "---", *["---:"] * 3)
SECTION = ("zoo", "examples.bench.zoo")
STAGES = (2, 3)
MOST_ERROR = 2e-5
MOST_WORDS = 160  # letters of an error


@dataclass(frozen=True, slots=True)
class Found:
    """How a family trained in one stage.

    Attributes:
        error: the largest difference of a loss, a gradient or a buffer from eager, in two steps; relative to the
            tensor's largest value, or to 1e-3.
        graphs: in the last forward.
        scheduled: gathers in the proven schedules of these graphs, on one rank.
        launched: gathers launched in the last forward and backward, on one rank.
        seconds: CPU time of the first step, which compiles both phases.
    """

    error: float
    graphs: int
    scheduled: int
    launched: int
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.error <= MOST_ERROR


@dataclass(frozen=True, slots=True)
class Failed:
    """How a family failed in one stage: the error of each rank."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A family.

    Attributes:
        family: its name.
        model: the name of its class.
        cells: what was found, by stage.
        versions: Python, torch, Thunder, transformers, LitGPT.
    """

    family: str
    model: str
    cells: Mapping[int, Found | Failed]
    versions: str


def read_rows(path: Path = DATA) -> tuple[Row, ...]:
    """Read the file; empty if there is none."""
    if not path.exists():
        return ()
    return tuple(_row(row) for row in json.loads(path.read_text())["rows"])


def _row(data: dict[str, Any]) -> Row:
    cells: dict[int, Found | Failed] = {}
    for stage, cell in data["cells"].items():
        cells[int(stage)] = Failed(tuple(cell["words"])) if "words" in cell else Found(**cell)
    return Row(**data | {"cells": cells})


def merged(old: Iterable[Row], new: Iterable[Row]) -> tuple[Row, ...]:
    """New rows in place of old ones of the same family, in the order of the families."""
    by_name = {row.family: row for row in (*old, *new)}
    return tuple(by_name[name] for name in BY_NAME if name in by_name)


def write(rows: Sequence[Row], path: Path = DATA, page: Path = PAGE) -> None:
    """Write the file, and put its table into the page."""
    path.write_text(json_of(map(_rounded, rows)))
    page.write_text(with_tables(page.read_text(), rows))


def _rounded(row: Row) -> dict[str, Any]:
    values = asdict(row)
    for cell in values["cells"].values():
        if "seconds" in cell:
            cell["error"], cell["seconds"] = float(f"{cell['error']:.0e}"), round(cell["seconds"], 1)
    return values


def with_tables(text: str, rows: Sequence[Row]) -> str:
    """The page's text with the table of these rows."""
    return with_section(text, *SECTION, tables(rows))


def tables(rows: Sequence[Row]) -> str:
    """The table, the errors and the versions, in Markdown."""
    table = "".join(f"| {' | '.join(line)} |\n" for line in (HEADERS, ALIGNED, *map(cells, rows)))
    failures = [f"- {row.family}, {stage}\n" for row in rows for stage in errors(row)]
    return "\n".join((table, "".join(failures), "; ".join(dict.fromkeys(row.versions for row in rows)) + ".\n"))


def errors(row: Row) -> list[str]:
    """The errors of a row, shortened."""
    return [
        f"stage {stage}: " + "; ".join(f"rank {rank}: {shortened(words)}" for rank, words in enumerate(cell.words))
        for stage, cell in row.cells.items()
        if isinstance(cell, Failed)
    ]


def shortened(words: str) -> str:
    return f"`{words if len(words) <= MOST_WORDS else words[:MOST_WORDS] + ' ...'}`"


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table, under HEADERS; the last two are of stage 3."""
    last = row.cells[STAGES[-1]]
    of_last = (str(last.graphs), f"{last.seconds:.1f}") if isinstance(last, Found) else ("", "")
    verdicts = dict.fromkeys(verdict(row.cells[stage]) for stage in STAGES)  # one, if all stages have the same
    return (row.family, f"`{row.model}`", "; ".join(verdicts), *of_last)


def verdict(cell: Found | Failed) -> str:
    """Whether it trains, and is right."""
    if isinstance(cell, Failed):
        return "no"
    error = f"{cell.error:.0e}" if cell.error else "0"
    return error if cell.is_right else f"**wrong: {error}**"


def text_of(row: Row) -> str:
    """For the screen."""
    line = "  ".join(f"{name} {cell}" for name, cell in zip(HEADERS, cells(row), strict=True))
    return "\n".join((line, *(f"  {words}" for words in errors(row))))


def versions() -> str:
    """Python, torch, Thunder, transformers and LitGPT."""
    names = ("torch", "lightning-thunder", "transformers", "litgpt")
    return ", ".join((f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)))
