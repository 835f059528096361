"""What the bench found: frozen data, the bound beside it, and the tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from examples.bench.model import floor_bytes
from examples.bench.network import LOOPBACK

MiB = 1 << 20
ALONE = "compute alone"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant in one setting.

    Attributes:
        name: the contestant.
        group: what it is compared as; ``ALONE`` for those without communication.
        stage: whose floor of bytes it is held against, None for ``ALONE``.
        seconds: of a step, of the slowest rank, one a round.
        sent: bytes that a rank sent in a step, mean over ranks, counted on the interface, one a round.
        kept: bytes of the model that stage 3 keeps from forward for backward, which would read them again.
    """

    name: str
    group: str
    stage: int | None
    seconds: tuple[float, ...]
    sent: tuple[float, ...]
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """One network and world size, measured in one go.

    Attributes:
        network: ``"loopback"``, or a rate in the words of ``tc``.
        world_size: ranks.
        full: bytes of the model. spared: of what backward does not read of it.
        wire_bytes: sent by each rank in the bare exchange. wire_seconds: what it took, one a round.
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
        """Compute alone, all ranks at once: the best of eager and Thunder with either executors."""
        return min(median(row.seconds) for row in self.rows if row.group == ALONE)

    @property
    def bytes_per_second(self) -> float:
        """What the bare exchange carried in each direction."""
        return self.wire_bytes / median(self.wire_seconds)

    def bound(self, stage: int | None, kept: int = 0) -> float:
        """No step of the stage can be faster: max(compute, least bytes / bandwidth), in seconds."""
        if stage is None:
            return self.compute_seconds
        least = floor_bytes(stage, self.world_size, self.full, self.spared + kept)
        return max(self.compute_seconds, least / self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of tensors alive on rank 0: between steps without gradients, and at most in a step."""

    rest: int
    peak: int


def rate_of(network: str) -> float:
    """Bits a second of a network's name; infinite for loopback.

    >>> rate_of("250mbit"), rate_of("1gbit")
    (250000000.0, 1000000000.0)

    Raises:
        ValueError: not a number followed by kbit, mbit or gbit.
    """
    if network == LOOPBACK:
        return float("inf")
    number, unit = network[:-4], network[-4:]
    if unit not in UNITS or not number.replace(".", "", 1).isdigit() or float(number) == 0:
        raise ValueError(f"network is {network!r}; give {LOOPBACK!r} or a rate such as '250mbit' or '1gbit'")
    return float(number) * UNITS[unit]


def different_losses(losses: dict[str, Sequence[float]], tolerance: float = 1e-3) -> list[str]:
    """The contestants whose losses are not those of the first one: they train something else.

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
    seconds, bound, sent = median(row.seconds), result.bound(row.stage, row.kept), median(row.sent)
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
    """For the documentation."""
    lines = [HEADERS, ("---",) + ("---:",) * (len(HEADERS) - 1)]
    lines += [cells(result, row, memory.get(row.name)) for row in result.rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{title(result)}**\n\n{body}\n"
