"""Fits the small GPT with AdamW into three budgets of memory and measures each: a table in docs/memory.md.

    OMP_NUM_THREADS=1 python -m examples.bench.budgets      # three to six minutes on two cores

The budgets lie between the least that ``tz.tools.fit`` finds and what its choice takes where memory is no matter.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import torch
from rich.console import Console

import thunder_zero as tz  # before thunder
from examples.bench.cases import TASKS, Case
from examples.bench.memory import versions
from examples.bench.memory_table import PAGE, mib
from examples.bench.page import with_section
from examples.bench.step_memory import forecast, forecast_of, measure, traces_of
from thunder_zero.tools.forecast.memory import recorder_of
from thunder_zero.tools.plan.search import Candidate

TASK, WORLD_SIZE = "small GPT", 2
SHARES = (0.1, 0.5, 0.9)  # of the way from the least to the most
PLENTY = 1 << 40
HEADERS = (
    "budget, MiB",
    "forecast",
    "measured peak",
    "MiB sent",
    "GFLOP recomputed",
    "units kept",
    "recomputed",
)
SECTION = ("budgets", "examples.bench.budgets")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A budget, what was chosen for it, and what that takes; bytes."""

    budget: int
    policy: tz.Policy
    forecast: int
    measured: int
    sent: int
    flops: float
    cost: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Those of its line in the table."""
        chosen = len(self.policy.keep_unsharded), len(self.policy.recompute_units)
        bytes_ = tuple(map(mib, (self.budget, self.forecast, self.measured, self.sent)))
        return (*bytes_, f"{self.flops / 1e9:.2f}", *map(str, chosen))


def choice(memory_bytes: int) -> tz.Policy:
    """The policy for a budget; prints nothing."""
    with torch.device("meta"):
        model = TASKS[TASK].model()
    return tz.tools.fit(
        model,
        memory_bytes=memory_bytes,
        world_size=WORLD_SIZE,
        file=io.StringIO(),
        loss=TASKS[TASK].loss,
        optimizer=torch.optim.AdamW,
        **TASKS[TASK].inputs(),
    )


def least_bytes() -> int:
    """The least that is found."""
    try:
        choice(1)
    except tz.tools.DoesNotFit as error:
        return error.least_bytes
    raise AssertionError("a byte is too little")


def fitted(budget: int) -> Fitted:
    """Fit, forecast and measure."""
    case = Case(TASK, choice(budget), WORLD_SIZE)
    traces = traces_of(case)
    candidate = Candidate(recorder_of(traces, TASKS[TASK].loss, torch.optim.AdamW), traces.timeline)
    expected, found = forecast_of(case, traces).peak, measure(case).peaks.peak
    assert max(expected, found) <= budget, f"{found} bytes were measured, {expected} forecast, of {budget}"
    return Fitted(budget, case.policy, expected, found, candidate.sent, candidate.flops, candidate.cost)


def table(rows: list[Fitted]) -> str:
    """The lines of the page."""
    lines = [HEADERS, ["---:"] * len(HEADERS), *(row.cells for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{versions()}.\n"


def main() -> None:
    console = Console(highlight=False)
    least, most = least_bytes(), forecast(Case(TASK, choice(PLENTY), WORLD_SIZE)).peak
    rows: list[Fitted] = []
    for share in SHARES:
        rows.append(fitted(round(least + share * (most - least))))
        console.print(" | ".join(rows[-1].cells), style="dim")
    costs = [row.cost for row in rows]
    assert costs == sorted(costs, reverse=True), f"the cost rises with the budget: {costs}"
    PAGE.write_text(with_section(PAGE.read_text(), *SECTION, table(rows)))


if __name__ == "__main__":
    main()
