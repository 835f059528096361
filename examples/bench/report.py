"""The results of the bench as frozen data, their bounds, and the tables.

python examples/bench/report.py docs/bench.json          the tables of a data file, in Markdown
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rich.table import Table

from examples.bench.model import floor_bytes
from examples.bench.network import LOOPBACK
from thunder_zero.plan.amounts import bits_of

MiB = 1 << 20
ALONE = "compute alone"


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant in one setting.

    Attributes:
        name: the contestant.
        group: the contestants it competes in; ``ALONE`` for those without communication.
        stage: the ZeRO stage whose least bytes bound it, None for ``ALONE``.
        seconds: of a step on the slowest rank, one a round.
        sent: bytes that a rank sent in a step, mean over ranks, counted on the interface, one a round.
        kept_unsharded: bytes of the model that stage 3 gathers once for forward and backward.
    """

    name: str
    group: str
    stage: int | None
    seconds: tuple[float, ...]
    sent: tuple[float, ...]
    kept_unsharded: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """One network and world size, measured in one go.

    Attributes:
        network: ``"loopback"``, or a rate in the words of ``tc``.
        world_size: ranks.
        full: bytes of the model. spared: bytes of the parameters that backward does not read.
        wire_bytes: sent by each rank in the bare exchange. wire_seconds: its time, one a round.
        rows: the contestants.
    """

    network: str
    world_size: int
    full: int
    spared: int
    wire_bytes: float
    wire_seconds: tuple[float, ...]
    rows: tuple[Row, ...]

    @property
    def compute_seconds(self) -> float:
        """Compute alone, on all ranks at once: the best of eager and of Thunder with each set of executors."""
        return min(median(row.seconds) for row in self.rows if row.group == ALONE)

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of the bare exchange in each direction."""
        return self.wire_bytes / median(self.wire_seconds)

    def bound(self, stage: int | None, kept_unsharded: int = 0) -> float:
        """No step of the stage can be faster: max(compute, least bytes / bandwidth), in seconds."""
        if stage is None:
            return self.compute_seconds
        least = floor_bytes(stage, self.world_size, self.full, self.spared + kept_unsharded)
        return max(self.compute_seconds, least / self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of tensors alive on rank 0: between steps without gradients (None: not recorded), and at most in a step."""

    rest: int | None
    peak: int


@dataclass(frozen=True, slots=True)
class Report:
    """A data file of the bench, as far as the tables need it.

    Attributes:
        about: date, command, machine and versions.
        results: one per network and world size.
        memory: by world size and contestant.
        overhead: sentences about the transform's cost on one rank.
    """

    about: dict[str, Any]
    results: tuple[Result, ...]
    memory: dict[int, dict[str, Memory]]
    overhead: tuple[str, ...]


def read_report(path: Path) -> Report:
    """Read a file that ``run.py`` wrote."""
    data = json.loads(path.read_text())
    memory = {int(world): {name: Memory(**own) for name, own in of.items()} for world, of in data["memory"].items()}
    results = tuple(_result(result) for result in data["results"])
    return Report(data["about"], results, memory, tuple(data["overhead_in_words"]))


def _result(data: dict[str, Any]) -> Result:
    rows = tuple(Row(**_tuples(row)) for row in data["rows"])
    return Result(**_tuples(data) | {"rows": rows})


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def to_json(value: Any, indent: str = "") -> str:
    """JSON with one line for each list or dict that holds no dict, so that a row is a line.

    >>> print(to_json({"rows": [{"name": "a", "seconds": [1, 2]}]}))
    {
     "rows": [
      {"name": "a", "seconds": [1, 2]}
     ]
    }
    """
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    if not any(map(_holds_dict, parts)):
        return json.dumps(value)
    deeper = indent + " "
    if isinstance(value, dict):
        lines = [f"{deeper}{json.dumps(str(key))}: {to_json(inner, deeper)}" for key, inner in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + to_json(inner, deeper) for inner in value) + f"\n{indent}]"


def _holds_dict(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list | tuple) and any(map(_holds_dict, value)))


def rate_of(network: str) -> float:
    """Bits a second of a network by its name; infinite for loopback.

    >>> rate_of("250mbit"), rate_of("1gbit")
    (250000000.0, 1000000000.0)

    Raises:
        ValueError: not a number followed by kbit, mbit or gbit.
    """
    if network == LOOPBACK:
        return float("inf")
    return bits_of(f"network, if not {LOOPBACK!r},", network)


def different_losses(losses: dict[str, Sequence[float]], tolerance: float = 1e-3) -> list[str]:
    """The contestants whose losses differ from the first one's, so that they train something else.

    >>> different_losses({"a": [2.0, 1.0], "b": [2.0, 1.0001], "c": [2.0, 1.5]})
    ['c']
    """
    first = next(iter(losses.values()), ())
    return [
        name
        for name, found in losses.items()
        if len(found) != len(first) or any(abs(a - b) > tolerance for a, b in zip(found, first, strict=False))
    ]


def best_by_group(rows: Iterable[Row]) -> dict[str, Row]:
    """The contestant of each group with the lowest median, groups in the order of the rows."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.group not in best or median(row.seconds) < median(best[row.group].seconds):
            best[row.group] = row
    return best


HEADERS = ("contestant", "s a step", "min - max", "bound", "times the bound", "MB sent", "sent / model", "peak MiB")


def cells(result: Result, row: Row, memory: Memory | None) -> tuple[str, ...]:
    """One line of the table, under HEADERS."""
    seconds, bound, sent = median(row.seconds), result.bound(row.stage, row.kept_unsharded), median(row.sent)
    alone = row.stage is None
    return (
        row.name,
        f"{seconds:.3f}",
        f"{min(row.seconds):.3f} - {max(row.seconds):.3f}",
        "" if alone else f"{bound:.3f}",
        "" if alone else f"{seconds / bound:.2f}",
        "" if alone else f"{sent / 1e6:.1f}",
        "" if alone else f"{sent / result.full:.3f}",
        f"{memory.peak / MiB:.0f}" if memory else "",
    )


def title(result: Result) -> str:
    where = result.network if result.network == LOOPBACK else f"{result.network}/s"
    return (
        f"W = {result.world_size}, {where}: bare exchange {result.bytes_per_second * 8 / 1e9:.3f} Gbit/s, "
        f"compute alone {result.compute_seconds:.3f} s"
    )


def table(result: Result, memory: dict[str, Memory]) -> Table:
    """For the screen."""
    grid = Table(*HEADERS, title=title(result), title_justify="left")
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in result.rows:
        grid.add_row(*cells(result, row, memory.get(row.name)))
    return grid


def markdown(result: Result, memory: dict[str, Memory]) -> str:
    """For a file."""
    lines = [HEADERS, ("---",) + ("---:",) * (len(HEADERS) - 1)]
    lines += [cells(result, row, memory.get(row.name)) for row in result.rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{title(result)}**\n\n{body}\n"


def render(report: Report) -> str:
    """The whole report in Markdown."""
    parts = [", ".join(f"{name} {value}" for name, value in report.about.items())]
    parts += [markdown(result, report.memory[result.world_size]) for result in report.results]
    return "\n\n".join((*parts, *report.overhead))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a file that run.py wrote, such as docs/bench.json")
    print(render(read_report(parser.parse_args().data)))


if __name__ == "__main__":
    main()
