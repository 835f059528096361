"""Fits the small GPT into five budgets of memory and measures each: a table in docs/memory.md.

    OMP_NUM_THREADS=1 python -m examples.bench.budgets      # about ten minutes on two cores

The budgets lie between the least and the most that ``tz.fit`` would choose.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace

import torch
from rich.console import Console

import thunder_zero as tz  # before thunder
from examples.bench.cases import TASKS, Case
from examples.bench.memory_table import PAGE, mib
from examples.bench.step_memory import forecast, measure

TASK, WORLD_SIZE = "small GPT", 2
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way from the least to the most
HEADERS = ("budget", "forecast", "measured peak", "sent", "units kept", "computed again", "MiB in flight")
BEGIN, END = "<!-- budgets: python -m examples.bench.budgets -->\n", "<!-- end of budgets -->"


def fitted(memory_bytes: int) -> tz.Policy:
    """The policy for a budget; prints nothing."""
    with torch.device("meta"):
        model = TASKS[TASK].model()
    inputs, loss = TASKS[TASK].inputs(), TASKS[TASK].loss
    options = {"loss": loss, "optimizer": torch.optim.AdamW, "file": io.StringIO()}
    return tz.fit(model, inputs, memory_bytes=memory_bytes, world_size=WORLD_SIZE, **options)


def least() -> int:
    """The fewest bytes into which the step fits, to a hundredth of a MiB."""
    low, high = 0, forecast(Case(TASK, tz.ZERO3)).peak
    while high - low > 1 << 14:
        middle = (low + high) // 2
        try:
            fitted(middle)
            high = middle
        except tz.DoesNotFit:
            low = middle
    return high


def row(budget: int) -> tuple[str, ...]:
    """Fit, forecast and measure; the cells of a line of the table."""
    policy = fitted(budget)
    case = Case(TASK, policy)
    expected, found = forecast(case).peak, measure(case).peaks.peak
    assert max(expected, found) <= budget, f"{found} bytes were measured, {expected} forecast, of {budget}"
    with torch.device("meta"):
        model = TASKS[TASK].model()
    timeline = tz.trace(model, **TASKS[TASK].inputs(), policy=policy, world_size=WORLD_SIZE).timeline
    sent = sum(map(timeline.bytes_sent, timeline.ops))
    chosen = len(policy.keep_units), len(policy.recompute_units), policy.in_flight_bytes >> 20
    return (*map(mib, (budget, expected, found, sent)), *map(str, chosen))


def main() -> None:
    console = Console(highlight=False)
    most = forecast(Case(TASK, replace(fitted(1 << 40)))).peak
    fewest = least()
    lines = [" | ".join(HEADERS), " | ".join("---:" for _ in HEADERS)]
    for share in SHARES:
        lines.append(" | ".join(row(int(fewest + share * (most - fewest)))))
        console.print(lines[-1])
    table = "".join(f"| {line} |\n" for line in lines)
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + table + END, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
