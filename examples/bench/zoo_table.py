"""The data file of the zoo (docs/zoo.json), and the tables of docs/zoo.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from examples.bench.families import BY_NAME
from examples.bench.page import json_of, with_section

DOCS = Path(__file__).parents[2] / "docs"
DATA, PAGE = DOCS / "zoo.json", DOCS / "zoo.md"
HEADERS = ("family", "Thunder alone", "thunder.jit", "tz.compile", "graphs", "gathers scheduled", "registered", "CPU s")
SECTION = ("zoo", "examples.bench.zoo")
FRONT_ENDS = ("thunder.jit", "tz.compile")
MOST_ERROR = 1e-5
MOST_WORDS = 160  # letters of an error


@dataclass(frozen=True, slots=True)
class Found:
    """What one front end did with a family, on two ranks, in stages 1 to 3.

    Attributes:
        error: the largest difference of a parameter from eager, after three steps of AdamW.
        graphs: in the last forward.
        scheduled: gathers in the proven schedules of these graphs; of all stages and ranks.
        launched: gathers launched in the last forward and backward.
        registered: operators that Thunder has from its automatic registration.
        seconds: CPU time of the first forward in stage 3, which compiles it.
    """

    error: float
    graphs: int
    scheduled: int
    launched: int
    registered: tuple[str, ...]
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.error <= MOST_ERROR


@dataclass(frozen=True, slots=True)
class Failed:
    """How one front end failed: in which stage first, and the error of each rank."""

    stage: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A family.

    Attributes:
        family: its name.
        alone: the error of ``thunder.jit`` without this package; None if it compiles.
        cells: what each front end did.
        versions: Python, torch, Thunder, transformers, LitGPT.
    """

    family: str
    alone: str | None
    cells: dict[str, Found | Failed]
    versions: str


def read_rows(path: Path = DATA) -> tuple[Row, ...]:
    """Read the file; empty if there is none."""
    if not path.exists():
        return ()
    return tuple(_row(row) for row in json.loads(path.read_text())["rows"])


def _row(data: dict[str, Any]) -> Row:
    cells: dict[str, Found | Failed] = {}
    for name, cell in data["cells"].items():
        if "words" in cell:
            cells[name] = Failed(cell["stage"], tuple(cell["words"]))
        else:
            cells[name] = Found(**cell | {"registered": tuple(cell["registered"])})
    return Row(**data | {"cells": cells})


def merged(old: Iterable[Row], new: Iterable[Row]) -> tuple[Row, ...]:
    """New rows in place of old ones of the same family, in the order of the families."""
    by_name = {row.family: row for row in (*old, *new)}
    return tuple(by_name[name] for name in BY_NAME if name in by_name)


def write(rows: Sequence[Row], path: Path = DATA, page: Path = PAGE) -> None:
    """Write the file, and put its tables into the page."""
    path.write_text(json_of(map(_rounded, rows)))
    page.write_text(with_tables(page.read_text(), rows))


def _rounded(row: Row) -> dict[str, Any]:
    values = asdict(row)
    for cell in values["cells"].values():
        if "seconds" in cell:
            cell["error"], cell["seconds"] = float(f"{cell['error']:.1e}"), round(cell["seconds"], 1)
    return values


def with_tables(text: str, rows: Sequence[Row]) -> str:
    """The page's text with the tables of these rows."""
    return with_section(text, *SECTION, tables(rows))


def tables(rows: Sequence[Row]) -> str:
    """The table, the errors and the versions, in Markdown."""
    lines = [HEADERS, ("---",) * 4 + ("---:",) * 2 + ("---", "---:"), *map(cells, rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    failures = [f"- {row.family}, {name}: {words}\n" for row in rows for name, words in errors(row).items()]
    return "\n".join((table, "".join(failures), "; ".join(dict.fromkeys(row.versions for row in rows)) + ".\n"))


def errors(row: Row) -> dict[str, str]:
    """The errors of a row, shortened; where Thunder alone fails, its own alone."""
    found = {} if row.alone is None else {"Thunder alone": shortened(row.alone)}
    for name, cell in row.cells.items():
        if isinstance(cell, Failed) and not (row.alone is not None and name == "thunder.jit"):
            found[f"{name}, stage {cell.stage}"] = "; ".join(
                f"rank {rank}: {shortened(words)}" for rank, words in enumerate(cell.words)
            )
    return found


def shortened(words: str) -> str:
    words = words.removesuffix(": ")  # of an assertion
    return f"`{words if len(words) <= MOST_WORDS else words[:MOST_WORDS] + ' ...'}`"


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table, under HEADERS; numbers of both front ends where both compile."""
    found = [cell for cell in map(row.cells.get, FRONT_ENDS) if isinstance(cell, Found)]
    names = sorted({name for cell in found for name in cell.registered})
    return (
        row.family,
        "yes" if row.alone is None else "no",
        *(verdict(row.cells[name]) for name in FRONT_ENDS),
        *(", ".join(map(str, each)) or "" for each in ([cell.graphs for cell in found], list(map(share, found)))),
        ", ".join(f"`{name}`" for name in names),
        ", ".join(f"{cell.seconds:.1f}" for cell in found),
    )


def verdict(cell: Found | Failed) -> str:
    """Whether it compiles, and is right."""
    if isinstance(cell, Failed):
        return "no"
    return f"{cell.error:.0e}" if cell.is_right else f"**wrong: {cell.error:.0e}**"


def share(cell: Found) -> str:
    return f"{min(cell.scheduled, cell.launched)} of {cell.launched}"


def text_of(row: Row) -> str:
    """For the screen."""
    lines = ["  ".join(f"{name} {cell}" for name, cell in zip(HEADERS, cells(row), strict=True))]
    return "\n".join((*lines, *(f"  {name}: {words}" for name, words in errors(row).items())))


def versions() -> str:
    """Python, torch, Thunder, transformers and LitGPT."""
    names = ("torch", "lightning-thunder", "transformers", "litgpt")
    return ", ".join((f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)))
