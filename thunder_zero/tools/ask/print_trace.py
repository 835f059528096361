"""``tz.print_trace``: prints traces with the meaning of each line, as text or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from rich.console import Console

from thunder_zero.capture.zero_module import traces_of
from thunder_zero.plan.amounts import size
from thunder_zero.schedule.ops import Free, Gather, ends
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.ask.shown_code import shown
from thunder_zero.tools.forecast.figures import Memory, outside_of_the_peak
from thunder_zero.tools.forecast.memory import memory as forecast_of
from thunder_zero.tools.forecast.memory import require_forecast_of
from thunder_zero.tools.forecast.watch import NoForecast
from thunder_zero.tools.printing.line_meanings import PHASES, Gap, Row, SourceLine, format_timeline, rows, select
from thunder_zero.tools.printing.text import short
from thunder_zero.tools.printing.trace_printer import QUIET, print_rows, print_total
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.operators import operator_of

import thunder
from thunder.core.codeutils import get_source_line
from thunder.core.module import ThunderModule
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

THUNDER = Path(thunder.__file__).parent
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
    the right are the parameters, the bytes that this rank sends, and the bytes alive after the line. There are two
    columns of bytes alive: gathered parameters, and all tensors. The bytes of all tensors are a forecast of
    :func:`thunder_zero.tools.memory`. This forecast includes a loss and an optimizer only if ``memory`` does. The peak
    is marked. The last line is a summary. A terminal gets highlighted text. In a file, the text
    is plain and 100 columns wide.

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

    Raises:
        ValueError: ``phase``, ``unit``, ``rank`` or ``only`` is unknown, or ``memory`` is a forecast of other traces.
            Or a timeline comes with an argument that chooses lines.
        RuntimeError: the model was not called yet.
        TypeError: ``model_or_traces`` is not traces, a timeline or a model with ZeroTransform, or ``memory`` is not
            a forecast.
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
    forecast = memory or _forecast(traces, console)
    printed: list[Row | Gap] = []
    legend = HOW_TO_READ + HOW_TO_READ_SLICES * traces.plan.mesh.is_sliced
    console.print(legend, style=QUIET, highlight=False, soft_wrap=True)
    for name in PHASES[phase]:
        printed += _print_phase(name, traces, forecast, console, unit=unit, only=only, every_line=every_line)
    for line in outside_of_the_peak(memory) if memory else ():
        console.print(f"# {line}", highlight=False, markup=False, soft_wrap=True)
    print_total(printed, console)


def rows_of(traces: Traces, phase: str, forecast: Memory | None, *, every_line: bool = True) -> tuple[Row, ...]:
    """Return the rows of one phase, "forward" or "backward"; () if there is no backward.

    By default some lines are hidden. A row shows the bytes alive after the hidden lines that follow the row.
    """
    trace = traces.forward if phase == "forward" else traces.backward
    if trace is None:
        return ()
    all_rows = rows(_lines(trace, phase, forecast), traces.timeline, traces.lines, backward=phase == "backward")
    if every_line:
        return all_rows
    freed: dict[int, list[str]] = {}
    full: dict[str, str] = {}  # path: the value that was gathered last
    for op, positions in zip(traces.timeline.ops, traces.lines, strict=True):
        if ends(op, Gather):
            full.update(zip(op.params, op.writes, strict=True))
        elif isinstance(op, Free) and op.params and op.backward is (phase == "backward"):
            freed[positions[0]] = [full[path] for path in op.params]
    with tracectx(trace):
        lines = {line.position: line for line in shown(trace, freed)}
    row_of = {row.line.position: row for row in all_rows}
    shown_rows: list[Row] = []
    for row in all_rows:
        if line := lines.get(row.line.position):
            view = row_of.get(row.line.position if line.view is None else line.view, row)
            meaning = row if row.params else view
            new = replace(row.line, code=line.code)
            shown_rows.append(replace(row, line=new, params=meaning.params, gradients=meaning.gradients))
        elif shown_rows:
            last = shown_rows[-1].line
            last = replace(last, alive=row.line.alive, peak=last.peak or row.line.peak)
            shown_rows[-1] = replace(shown_rows[-1], line=last)
    return tuple(shown_rows)


def _print_phase(
    phase: str,
    traces: Traces,
    forecast: Memory | None,
    console: Console,
    *,
    unit: str | None,
    only: str | None,
    every_line: bool,
) -> Sequence[Row | Gap]:
    """Print a phase and return the printed rows."""
    all_rows = rows_of(traces, phase, forecast, every_line=every_line)
    if not all_rows:
        console.print("# no backward: nothing here needs a gradient\n", highlight=False)
        return ()
    chosen = select(all_rows, traces.plan, unit, only)
    print_rows(chosen, traces.plan, phase if traces.facts.synced else f"{phase} under no_sync", console)
    if forecast is not None and (phase, forecast.peak_line.phase) == ("forward", "loss"):
        console.print(f"# the peak of the step: {size(forecast.peak)} alive in the loss\n", highlight=False)
    return chosen


def _forecast(traces: Traces, console: Console) -> Memory | None:
    try:
        return forecast_of(traces)
    except NoForecast as error:
        console.print(f"# {error}\n", highlight=False, markup=False, soft_wrap=True)
        return None


def _lines(trace: TraceCtx, phase: str, forecast: Memory | None) -> Iterator[SourceLine]:
    """Yield the lines of a trace, except lines that are only comments, which name the inputs."""
    forecast_lines = {line.position: line for line in forecast.lines if line.phase == phase} if forecast else {}
    last = max(forecast_lines, default=0)
    with tracectx(trace):
        for position, bsym in enumerate(trace.bound_symbols):
            code = "\n".join(bsym.python(indent=0, print_depth=1))
            if any(not line.startswith("#") for line in code.splitlines()):
                origin = _origin(bsym, phase)
                line = forecast_lines.get(min(position, last))  # the return allocates nothing
                is_peak = forecast is not None and line is forecast.peak_line and position <= last
                peak = line.highest if line and is_peak else None
                yield SourceLine(code, position, origin, line.total if line else None, peak)


def _origin(bsym: BoundSymbol, phase: str) -> str:
    """Return the user's line, such as ``gpt.py:98  x = self.embedding(tokens)``; "" if there is none."""
    name, positions = bsym.source_filename, bsym.source_positions
    if name is None or positions is None or positions.lineno is None or Path(name).is_relative_to(THUNDER):
        return ""
    if phase == "backward" and operator_of(bsym) is None:  # a recorded position would be of a line of forward
        return ""
    prefix = "gradient of " if phase == "backward" else ""
    return f"{prefix}{Path(name).name}:{positions.lineno}  {get_source_line(name, positions.lineno).strip()}"


def json_of(traces: Traces, phase: str = "both", *, unit: str | None = None, only: str | None = None) -> dict[str, Any]:
    """Return the output of :func:`thunder_zero.print_trace` as numbers and strings. Sizes are in bytes."""
    plan = traces.plan
    forecast = _forecast(traces, Console(quiet=True))
    chosen = {name: select(rows_of(traces, name, forecast), plan, unit, only) for name in PHASES[phase]}
    return {
        "stage": plan.policy.stage,
        "rank": plan.mesh.shard.place,
        "world_size": plan.mesh.shard.size,
        "replicas": plan.mesh.replicate.size,
        "slices": plan.mesh.tensor.size,
        "units": list(plan.units),
        "lines": [_json_of_row(name, row) for name, rows in chosen.items() for row in rows],
    }


def _json_of_row(phase: str, row: Row | Gap) -> dict[str, Any]:
    if isinstance(row, Gap):
        return {"phase": phase, "lines_left_out": row.lines}
    return {
        "phase": phase,
        "position": row.line.position,
        "code": row.line.code,
        "origin": row.line.origin,
        "kind": row.does or None,
        "parameters": list(row.params),
        "of_gradients": row.gradients,
        "sent": row.sent,
        "deferred": row.deferred,
        "gathered": row.gathered,
        "format": row.form,
        "alive": row.line.alive,
        "peak": row.line.peak,
    }


def code_of(index: int, traces: Traces) -> str:
    """Return the statement of the operation at an index on one line, without its trailing comment."""
    trace = traces.backward if traces.timeline.ops[index].backward else traces.forward
    assert trace is not None, "it has this operation"
    with tracectx(trace):
        lines = trace.bound_symbols[traces.lines[index][0]].python(indent=0, print_depth=1)
    return short(" ".join(line.partition("  #")[0].strip() for line in lines if not line.lstrip().startswith("#")))
