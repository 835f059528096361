"""``tz.print_trace``: prints traces with the meaning of each line, as text or as JSON."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import IO, Any

import torch.distributed as dist
from rich.console import Console

from thunder_zero.capture.zero_module import traces_of
from thunder_zero.plan.amounts import size
from thunder_zero.schedule.ops import Free, Gather, ends
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.forecast.figures import Memory, outside_of_the_peak
from thunder_zero.tools.forecast.memory import require_forecast_of
from thunder_zero.tools.table.rows import PHASES, Row
from thunder_zero.tools.table.table import Table, step_table, table_of
from thunder_zero.tools.views.print_rows import QUIET, format_timeline, print_rows, print_total, select, write
from thunder_zero.tools.views.shown_code import shown
from thunder_zero.traces.compiled import Traces

from thunder.core.module import ThunderModule
from thunder.core.trace import tracectx

HOW_TO_READ = """\
# Lines run from top to bottom. gather: start an all-gather; wait: end it; compute: read parameters;
# free: drop full parameters; reduce: start to average gradients; encode, decode: what is sent.
# sent: bytes of this rank; gathered, alive: of full parameters, all tensors. gpt.py:12: your line.
"""
HOW_TO_READ_SLICES = "# tensor: a collective of torch's tensor parallelism, or the wait for one.\n"


def print_trace(
    model_or_traces: ThunderModule | Traces | Timeline,
    phase: str = "both",
    file: IO[str] | None = None,
    *,
    unit: str | None = None,
    only: str | None = None,
    every_line: bool = False,
    memory: Memory | None = None,
    rank: int = 0,
) -> None:
    """Print the trace that runs, with the meaning of each line. If several ranks call this, only ``rank`` prints.

    The first three lines are a legend. A line of the trace gathers, waits, computes, frees or reduces. The columns on
    the right are the parameters, the bytes that this rank sends, and the bytes alive after the line: of gathered
    parameters, and of all tensors, as :func:`thunder_zero.tools.memory` forecasts them. This forecast includes a loss
    and an optimizer only if ``memory`` does. A file gets plain text, 100 columns wide.

    >>> tz.print_trace(model, "forward", unit="blocks.0")
    >>> tz.print_trace(traces, memory=tz.tools.memory(traces, loss=loss, optimizer=torch.optim.AdamW))
    >>> tz.print_trace(tz.traces_of(model, synced=False))  # the program under no_sync
    >>> tz.print_trace(timeline)  # inside a pass

    Args:
        model_or_traces: a model with ZeroTransform that was called, or the result of :func:`thunder_zero.trace`. A
            timeline is printed whole, with a line for each operation. A line begins with the operation's number, as in
            errors: "op 22". It shows the operation's kind, writes, reads and parameters.
        phase: "forward", "backward" or "both".
        file: the file to print to (default: the standard output).
        unit: print only the compute and the collectives of this unit (default: all units).
        only: "parameters" for the lines that handle or read a parameter, "communication" for the lines that launch or
            end a collective of the schedule (default: all lines). The number of omitted lines is printed.
        every_line: True to print each line as it runs. By default a view is printed inside the line that reads it, as
            in ``aten.mm(x, w.t())``. Unpacking and the ``del`` of activations are left out by default.
        memory: a forecast of memory for these traces. Its figures at rest and in the optimizer's step are also printed.
        rank: the rank of the default process group that prints. A process without a group is rank 0.
    """
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}; choose 'forward', 'backward' or 'both'")
    this_rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank not in range(world_size):
        raise ValueError(f"rank is {rank!r}; give the rank that prints, 0 to {world_size - 1}")
    if isinstance(model_or_traces, Timeline):
        if phase != "both" or unit is not None or only is not None or every_line or memory is not None:
            raise ValueError("a timeline is printed whole; leave out phase, unit, only, every_line and memory")
        if this_rank == rank:
            print(format_timeline(model_or_traces, numbered=True), file=file)
        return
    traces = model_or_traces if isinstance(model_or_traces, Traces) else traces_of(model_or_traces)
    if this_rank != rank:
        return
    console = Console(file=file)
    if memory is not None:
        require_forecast_of(traces, memory)
    table, printed = table_of(traces, memory) if memory else step_table(traces), list[Row | int]()
    if table.no_memory:
        write(console, f"# {table.no_memory}\n")
    write(console, HOW_TO_READ + HOW_TO_READ_SLICES * traces.plan.mesh.is_sliced, QUIET)
    for name in PHASES[phase]:
        all_rows = (rows_of if every_line else shown_rows)(table, name)
        if not all_rows:
            write(console, "# no backward: nothing here needs a gradient\n")
            continue
        chosen = select(all_rows, traces.plan, unit, only)
        print_rows(chosen, traces.plan, name if traces.facts.synced else f"{name} under no_sync", console)
        if table.memory is not None and (name, table.memory.peak_line.phase) == ("forward", "loss"):
            write(console, f"# the peak of the step: {size(table.memory.peak)} alive in the loss\n")
        printed += chosen
    for line in outside_of_the_peak(memory) if memory else ():
        write(console, f"# {line}")
    print_total(printed, console)


def shown_rows(table: Table, phase: str) -> tuple[Row, ...]:
    """Return the rows of a phase without hidden lines. A row has the bytes alive after the hidden lines behind it."""
    traces, all_rows = table.traces, rows_of(table, phase)
    trace = traces.forward if phase == "forward" else traces.backward
    if trace is None:
        return ()
    freed: dict[int, list[str]] = {}
    full: dict[str, str] = {}  # path: the value that was gathered last
    for op, positions in zip(traces.timeline.ops, traces.lines, strict=True):
        if ends(op, Gather):
            full.update(zip(op.params, op.writes, strict=True))
        elif isinstance(op, Free) and op.params and op.backward is (phase == "backward"):
            freed[positions[0]] = [full[path] for path in op.params]
    with tracectx(trace):
        lines = {position: (code, view) for position, code, view in shown(trace, freed)}
    row_of = {row.position: row for row in all_rows}
    result: list[Row] = []
    for row in all_rows:
        if row.position in lines:
            code, view = lines[row.position]
            meaning = row if row.params or view is None else row_of.get(view, row)
            result.append(replace(row, code=code, params=meaning.params, gradients=meaning.gradients))
        elif result:
            last = replace(result[-1], alive=row.alive)
            result[-1] = replace(last, highest=row.highest, is_peak=True) if row.is_peak else last
    return tuple(result)


def rows_of(table: Table, phase: str) -> tuple[Row, ...]:
    """Return the rows of a phase."""
    return table.rows(where=lambda row: row.phase == phase)


def json_of(traces: Traces, phase: str = "both", *, unit: str | None = None, only: str | None = None) -> dict[str, Any]:
    """Return the output of :func:`thunder_zero.print_trace` as data: lines are as in ``Table.as_dicts``."""
    plan, table = traces.plan, step_table(traces)
    chosen = {name: select(rows_of(table, name), plan, unit, only) for name in PHASES[phase]}
    return {
        "stage": plan.policy.stage,
        "rank": plan.mesh.shard.place,
        "world_size": plan.mesh.shard.size,
        "replicas": plan.mesh.replicate.size,
        "slices": plan.mesh.tensor.size,
        "units": list(plan.units),
        "lines": [
            {"phase": name, "lines_left_out": row} if isinstance(row, int) else asdict(row)
            for name, rows in chosen.items()
            for row in rows
        ],
    }
