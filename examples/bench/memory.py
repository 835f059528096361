"""Forecasts the memory of training steps, measures it, and writes both into docs/memory.md.

    python -m examples.bench.memory                 # everything on the page: 30 to 60 minutes on two cores
    python -m examples.bench.memory ResNet "GPT, stage 3"       # the rows of these models and cases; the others stay
    python -m examples.bench.memory --no-rows       # all but the rows: workspaces, curves and the printed example
    python -m examples.bench.memory --forecasts     # forecasts of rows (all or named) again; measurements stay
    python -m examples.bench.memory --page          # the page again from docs/memory.json, nothing measured

``step_memory.py`` forecasts and measures, ``memory_table.py`` has the data file and the tables.
"""

from __future__ import annotations

import argparse
import io
import platform
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.metadata import version
from time import perf_counter

import torch
from rich.console import Console

import thunder_zero as tz  # before thunder
from examples.bench.cases import CASES, TASKS, Case
from examples.bench.memory_table import PAGE, Data, Row, merged, mib, percent, read_data, write
from examples.bench.step_memory import forecast, measure, peak_of_peer
from examples.bench.workspaces import measured_workspaces

console = Console(highlight=False)


def row_of(case: Case) -> Row:
    """Forecast a case and measure it, and its peer."""
    memory = forecast(case)
    found = measure(case).peaks
    return Row(
        case.words,
        versions(),
        at_rest=(found.at_rest, memory.at_rest),
        peak=(found.peak, memory.peak),
        optimizer_step=(found.optimizer_step, memory.optimizer_step or 0),
        peer=peak_of_peer(case) if case.peer else None,
    )


def forecast_rows(cases: Sequence[Case], data: Data) -> Data:
    """Forecast again the rows of these cases that the data has; what was measured stays, with its versions.

    Both belong together only if the traces are those that were measured.
    """
    rows = {row.case: row for row in data.rows}
    for case in cases:
        if (row := rows.get(case.words)) is not None:
            rows[case.words] = new = with_forecast(row, forecast(case))
            console.print(f"{case.words:36} forecast {percent(new.off)}, before {percent(row.off)}", style="dim")
    return replace(data, rows=tuple(rows.values()))


def with_forecast(row: Row, memory: tz.tools.Memory) -> Row:
    """The row with the figures of a forecast in place of its own."""
    return replace(
        row,
        at_rest=(row.at_rest[0], memory.at_rest),
        peak=(row.peak[0], memory.peak),
        optimizer_step=(row.optimizer_step[0], memory.optimizer_step or 0),
    )


def measure_rows(cases: Sequence[Case], data: Data) -> Data:
    """Measure these cases; the file and the page have each row as soon as it is there."""
    order = [case.words for case in CASES]
    for number, case in enumerate(cases, 1):
        console.print(f"{number:2} of {len(cases)}  {case.words:36}", style="dim", end=" ")
        begin = perf_counter()
        row = row_of(case)
        peer = "" if row.peer is None else f", {case.peer} {mib(row.peer)}"
        seconds = perf_counter() - begin
        console.print(f"{mib(row.peak[0])} MiB, forecast {percent(row.off)}{peer}  ({seconds:.0f} s)", style="dim")
        data = replace(data, rows=merged(data.rows, [row], order))
        write(data)
    return data


def printed_by_the_page() -> str:
    """What the page's program prints."""
    (program,) = re.findall(r"<!-- program -->\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(program, str(PAGE), "exec"), {"__name__": "page"})
    return out.getvalue().rstrip("\n")


def versions() -> str:
    """Those that figures depend on."""
    about = {"torch": torch.__version__, "Thunder": version("lightning-thunder"), "Python": platform.python_version()}
    return ", ".join(f"{name} {number}" for name, number in about.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"a model ({', '.join(TASKS)}) or a row's name (all)")
    parser.add_argument("--no-rows", action="store_true", help="leaves the rows of the models as they are")
    parser.add_argument("--forecasts", action="store_true", help="forecasts the rows again, and measures nothing")
    parser.add_argument("--page", action="store_true", help="measures nothing")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.names or {case.task, case.words} & set(options.names)]
    if unknown := set(options.names) - {name for case in cases for name in (case.task, case.words)}:
        parser.error(
            f"there is no {min(unknown)!r}; choose from {'; '.join((*TASKS, *(case.words for case in CASES)))}"
        )
    data = read_data()
    if options.forecasts:
        data = forecast_rows(cases, data)
    elif not (options.no_rows or options.page):
        data = measure_rows(cases, data)
    if not (options.names or options.page or options.forecasts):
        data = replace(data, workspaces=measured_workspaces(), workspace_versions=versions())
        data = replace(data, example=printed_by_the_page())
        from examples.bench.memory_curves import draw_curves  # not in the ranks, which import this module, too

        draw_curves()
    write(data)


if __name__ == "__main__":
    main()
