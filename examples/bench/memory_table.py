"""The data file of the memory bench (docs/memory.json), and the tables that docs/memory.md has of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.bench.page import with_section

MiB, KiB = 1 << 20, 1 << 10
DOCS = Path(__file__).parents[2] / "docs"
DATA, PAGE = DOCS / "memory.json", DOCS / "memory.md"
HEADERS = ("model and setting", "measured", "forecast off by", "FSDP2's")
HIDING = ("operator", "inputs → results", "forecast, MiB", "workspace beyond it, MiB")


@dataclass(frozen=True, slots=True)
class Row:
    """A case, in bytes of rank 0; each pair is what was measured and the forecast.

    Attributes:
        case: its words.
        versions: of Python, torch and Thunder.
        at_rest: parameters, buffers and optimizer state.
        peak: in forward, the loss and backward.
        optimizer_step: its peak; zeros if it is not measured.
        peer: FSDP2's measured peak; None if it was not asked for.
    """

    case: str
    versions: str
    at_rest: tuple[int, int]
    peak: tuple[int, int]
    optimizer_step: tuple[int, int]
    peer: int | None = None

    @property
    def model(self) -> str:
        """The words before the stage."""
        return self.case.partition(", stage")[0]

    @property
    def off(self) -> float:
        """The share of the measured peak by which the forecast is above it."""
        return self.peak[1] / self.peak[0] - 1


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that the forecast has for an operator, and those that it allocates besides and shows nobody."""

    operator: str
    inputs: str
    shown: int
    hidden: int


@dataclass(frozen=True, slots=True)
class Data:
    """All that the page is made of; ``example`` is what its program prints."""

    rows: tuple[Row, ...] = ()
    workspaces: tuple[Workspace, ...] = ()
    workspace_versions: str = ""
    example: str = ""


def read_data(path: Path = DATA) -> Data:
    """Read the file; empty if there is none."""
    if not path.exists():
        return Data()
    found: dict[str, Any] = json.loads(path.read_text())
    rows = tuple(
        Row(**row | {key: tuple(row[key]) for key in ("at_rest", "peak", "optimizer_step")}) for row in found["rows"]
    )
    workspaces = tuple(Workspace(**each) for each in found["workspaces"])
    return Data(rows, workspaces, found["workspace_versions"], found["example"])


def write(data: Data, path: Path = DATA, page: Path = PAGE) -> None:
    """Write the file, and put its tables into the page."""
    values = asdict(data)
    lists = {
        key: "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
        for key, value in values.items()
        if isinstance(value, tuple)
    }
    parts = [f" {json.dumps(key)}: {lists.get(key) or json.dumps(value)}" for key, value in values.items()]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    page.write_text(with_tables(page.read_text(), data))


def merged(old: Iterable[Row], new: Iterable[Row], order: Sequence[str]) -> tuple[Row, ...]:
    """The rows of the cases in ``order``, new ones in place of old ones; rows of no case are dropped."""
    rows = {row.case: row for row in (*old, *new)}
    return tuple(rows[case] for case in order if case in rows)


def with_tables(text: str, data: Data) -> str:
    """The page's text with what its marked places shall hold.

    Raises:
        ValueError: a place is missing.
    """
    for name, body in places(data).items():
        text = with_section(text, name, "examples.bench.memory", body)
    return text


def places(data: Data) -> Mapping[str, str]:
    """Return what each marked place of the page holds: no rows of the small GPT, and the largest workspaces."""
    by_operator = {one.operator: one for one in sorted(data.workspaces, key=lambda one: one.hidden)}
    largest = sorted(by_operator.values(), key=lambda one: -one.hidden)[:4]
    return {
        "measurements": markdown(HEADERS, lines(row for row in data.rows if row.model != "small GPT"))
        + f"\n{besides(data.rows)} {versions_of(data.rows)}\n",
        "workspaces": markdown(HIDING, map(workspace_cells, largest)) + f"\n{data.workspace_versions}.\n",
        "output": f"```\n{data.example}\n```\n",
    }


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; columns of numbers stand right."""
    body = list(rows)
    marks = ["---" if any(_is_text(row[place]) for row in body) else "---:" for place in range(len(headers))]
    return "".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in row) + "\n" for row in (headers, marks, *body)
    )


def _is_text(cell: str) -> bool:
    return any(map(str.isalpha, cell)) or cell.startswith("[")


def lines(rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the table, under HEADERS. A model's plain stages share a line, unless FSDP2 trained it."""
    shown = list(rows)
    peers = {row.model for row in shown if row.peer is not None}
    by_line: dict[str, list[Row]] = {}
    for row in shown:
        shared = re.fullmatch(r"(.*), stage \d", row.case)
        by_line.setdefault(row.model if shared and row.model not in peers else row.case, []).append(row)
    for name, members in by_line.items():
        stages = ", ".join(row.case[-1] for row in members)
        worst = max((row.off for row in members), key=abs)
        peer = members[0].peer
        yield (
            members[0].case if len(members) == 1 else f"{name}, stages {stages}",
            ", ".join(mib(row.peak[0]) for row in members),
            percent(worst),
            "" if peer is None else mib(peer),
        )


def workspace_cells(one: Workspace) -> tuple[str, ...]:
    """One line of the table, under HIDING."""
    shapes = re.sub(r"(?<=\d), (?=\d)", "x", one.inputs)
    return (one.operator, shapes, f"{one.shown / MiB:.2f}", f"{one.hidden / MiB:.2f}")


def besides(rows: Iterable[Row]) -> str:
    """How far off the forecasts are whose figures the table leaves out."""
    pairs = [pair for row in rows for pair in (row.at_rest, row.optimizer_step) if pair[0]]
    worst = max((abs(forecast / measured - 1) for measured, forecast in pairs), default=0.0)
    return f"At rest, and in the optimizer's step, forecasts are at most {worst:.3%} off."


def versions_of(rows: Iterable[Row]) -> str:
    """The versions that measured the rows, each once."""
    return "; ".join(dict.fromkeys(row.versions for row in rows)) + "."


def mib(nbytes: int) -> str:
    """Such as "35.9"."""
    return f"{nbytes / MiB:.1f}"


def percent(share: float) -> str:
    """Such as "-1.7%"; no sign for nothing."""
    text = f"{share:+.2%}"
    return "0.00%" if text[1:] == "0.00%" else text
