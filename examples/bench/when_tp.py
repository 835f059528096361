"""Plans models with and without tensor parallelism at one global batch; the tables of docs/when-tp-pays.md.

    python -m examples.bench.when_tp                      # prints the tables: about 8 minutes, on one core
    python -m examples.bench.when_tp --write              # and puts them into the page
    python -m examples.bench.when_tp --only 8b-64         # one case

Nothing runs: these are the planner's figures, of H100s, stage 3. Of each ``tp`` the page has the best mesh.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import thunder_zero as tz
from examples.bench.page import with_section
from thunder_zero.plan.amounts import duration, size
from thunder_zero.tools.planner.plan_training import best_of
from thunder_zero.tools.planner.training_plan import PlanRow

PAGE = Path(__file__).parents[2] / "docs" / "when-tp-pays.md"
SECTION = ("plans", "examples.bench.when_tp --write")
HEADERS = ("tp", "data ranks", "sequences", "recompute", "needs", "waits for tp", "for ZeRO", "step", "tokens/s/GPU")


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
        """One line above the table."""
        tokens = self.sequences * self.length
        return f"{self.model}, {self.ranks:,} ranks, {self.sequences:,} x {self.length:,} tokens a step ({tokens:,})"


CASES: Mapping[str, Case] = {
    "8b-8": Case("llama3-8b", 8, 8),
    "8b-64": Case("llama3-8b", 64, 64),
    "8b-1024": Case("llama3-8b", 1024, 1024),
    "8b-256": Case("llama3-8b", 256, 256, tp=(1,)),
    "8b-1024-small": Case("llama3-8b", 1024, 256, tp=(4, 8)),
    "8b-long": Case("llama3-8b", 64, 64, 65_536, tp=(1, 2)),
    "8b-longer": Case("llama3-8b", 64, 16, 65_536, tp=(4, 8)),
    "70b-64": Case("llama3-70b", 64, 64),
    "70b-1024": Case("llama3-70b", 1024, 1024),
}


def rows(case: Case) -> Iterator[PlanRow]:
    """Plan each ``tp``, and yield its fastest mesh that fits; if none does, the one that needs least."""
    found = tz.tools.plan_training(
        case.model,
        world_size=case.ranks,
        sequence_length=case.length,
        global_batch=case.sequences,
        stages=(3,),
        tp=case.tp,
    )
    for slices in case.tp:
        of_size = [row for row in found.rows if row.mesh.slices == slices]
        yield best_of(of_size) or min(of_size, key=lambda row: row.needed_bytes)


def table(case: Case) -> str:
    """Return the table of a case in Markdown, under its title."""
    lines = [HEADERS, ("---:",) * len(HEADERS)]
    found = list(rows(case))
    best = best_of(found)
    for row in found:
        data = row.mesh.replicas * row.mesh.shards
        fits = "" if row.fits else ", does not fit"
        speed = f"{row.tokens_per_second:,.0f}"
        cells = (
            *(str(row.mesh.slices), row.mesh.data, str(case.sequences // data), row.recompute),
            *(f"{size(row.needed_bytes)}{fits}", duration(row.tensor_exposed_seconds)),
            *(duration(row.exposed_seconds - row.tensor_exposed_seconds), duration(row.seconds)),
            f"**{speed}**" if row == best else speed,
        )
        lines.append(cells)
    return f"\n{case.title}:\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/when-tp-pays.md")
    options = parser.parse_args()
    if options.write and options.only != [*CASES]:
        parser.error("--write takes all cases")
    tables = []
    for name in options.only:
        tables.append(table(CASES[name]))
        print(tables[-1], flush=True)
    if options.write:
        PAGE.write_text(with_section(PAGE.read_text(), *SECTION, "".join(tables) + "\n"))


if __name__ == "__main__":
    main()
