"""Plans models with and without tensor parallelism at one global batch; the table of docs/when-tp-pays.md.

    python -m examples.bench.when_tp                      # prints the table: about 8 minutes, on one core
    python -m examples.bench.when_tp --write              # and puts it into the page
    python -m examples.bench.when_tp --only 8b-64         # one case

Nothing runs: these are the planner's figures, of H100s, stage 3. Of each ``tp`` the page has the best mesh.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import thunder_zero as tz
from examples.bench.page import with_section
from thunder_zero.tools.plan.plan_training import best_of
from thunder_zero.tools.plan.training_plan import PlanRow

PAGE = Path(__file__).parents[2] / "docs" / "when-tp-pays.md"
SECTION = ("plans", "examples.bench.when_tp --write")
HEADERS = ("model, ranks, tokens a step", "tp", "sequences", "recompute", "GiB", "tp ms", "ZeRO ms", "tokens/s/GPU")
Cells = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A model on a world of H100s, with one batch: ``sequences`` of all ranks, of ``length`` tokens."""

    model: str
    ranks: int
    sequences: int
    length: int = 8192
    tp: tuple[int, ...] = (1, 2, 4, 8)

    @property
    def title(self) -> str:
        """Return the first cell of the case's rows."""
        return f"{self.model}, {self.ranks:,}, {self.sequences:,} x {self.length:,}"


CASES: Mapping[str, Case] = {
    "8b-64": Case("llama3-8b", 64, 64),
    "8b-1024": Case("llama3-8b", 1024, 1024),
    "8b-256": Case("llama3-8b", 256, 256, tp=(1,)),
    "8b-1024-small": Case("llama3-8b", 1024, 256, tp=(4, 8)),
    "8b-long": Case("llama3-8b", 64, 64, 65_536, tp=(1, 2)),
    "8b-longer": Case("llama3-8b", 64, 16, 65_536, tp=(4, 8)),
    "70b-1024": Case("llama3-70b", 1024, 1024),
}


def rows(case: Case) -> Iterator[PlanRow]:
    """Plan each ``tp``, and yield its fastest mesh that fits; if none does, the one that needs least."""
    planned = tz.tools.plan_training(
        case.model,
        world_size=case.ranks,
        sequence_length=case.length,
        global_batch=case.sequences,
        stages=(3,),
        tp=case.tp,
    )
    for slices in case.tp:
        candidates = [row for row in planned.rows if row.mesh.slices == slices]
        yield best_of(candidates) or min(candidates, key=lambda row: row.needed_bytes)


def cells(case: Case) -> Iterator[Cells]:
    """Yield the cells of each row of a case; the fastest row that fits is bold."""
    planned = list(rows(case))
    best = best_of(planned)
    for row in planned:
        data = row.mesh.replicas * row.mesh.shards
        needed = number(row.needed_bytes / 2**30)
        speed = f"{row.tokens_per_second:,.0f}"
        yield (
            *(case.title, str(row.mesh.slices), str(case.sequences // data), row.recompute),
            *(needed if row.fits else f"{needed}, too much", number(row.tensor_exposed_seconds * 1e3)),
            *(number((row.exposed_seconds - row.tensor_exposed_seconds) * 1e3),),
            f"**{speed}**" if row == best else speed,
        )


def number(value: float) -> str:
    """Return a number with three digits, and commas: ``1,370``."""
    return f"{float(f'{value:.3g}'):,g}"


def table(lines: Iterable[Cells]) -> str:
    """Return the table in Markdown; a case's first row alone names it."""
    shown, title = [HEADERS, ("---", *("---:",) * (len(HEADERS) - 1))], ""
    for line in lines:
        shown.append(line if line[0] != title else ("", *line[1:]))
        title = line[0]
    return "".join(f"| {' | '.join(line)} |\n" for line in shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--write", action="store_true", help="put the table into docs/when-tp-pays.md")
    options = parser.parse_args()
    if options.write and options.only != [*CASES]:
        parser.error("--write takes all cases")
    lines: list[Cells] = []
    for name in options.only:
        lines += cells(CASES[name])
        print(table(lines), flush=True)
    if options.write:
        PAGE.write_text(with_section(PAGE.read_text(), *SECTION, table(lines)))


if __name__ == "__main__":
    main()
