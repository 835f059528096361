"""``tz.print_trace``: prints traces with the meaning of each line, as text or as JSON.

By default the code is shortened: views stand inside lines, and no activation has a ``del``::

    t = torch.ops.aten.t.default(w)
    del w
    view = torch.ops.aten.reshape.default(x, [16, 4])
    addmm = torch.ops.aten.addmm.default(b, view, t)     ->    y = aten.addmm(b, x.reshape([16, 4]), w.t())
    del b, t, view                                                     .reshape([4, 4, 4])
    y = torch.ops.aten.reshape.default(addmm, [4, 4, 4])       del b, w
    del addmm

Views that undo each other are left out, as in ``w.t().t()``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import IO, Any

import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from thunder_zero.capture.zero_module import as_traces
from thunder_zero.plan.amounts import size
from thunder_zero.schedule.ops import Free, Gather, ends
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.spmd.of_trace import names_of_axes
from thunder_zero.tools.forecast.figures import Memory, outside_of_the_peak
from thunder_zero.tools.forecast.memory import require_forecast_of
from thunder_zero.tools.printing.words import short
from thunder_zero.tools.table.rows import OUTER_STEP, PHASES, Row
from thunder_zero.tools.table.table import Table, step_table, table_of
from thunder_zero.tools.views.print_rows import QUIET, format_timeline, print_rows, print_total, select, write
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.operators import is_collective, operator_of
from thunder_zero.traces.symbols import ZeroExecutor
from thunder_zero.traces.work import makes_view

from thunder.core import prims
from thunder.core.codeutils import prettyprint
from thunder.core.module import ThunderModule
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.pythonex import clear_mutable_collection

HOW_TO_READ = """\
# Lines run from top to bottom. gather: start an all-gather; wait: end it; compute: read parameters;
# free: drop full parameters; reduce: start to average gradients; encode, decode: what is sent.
# sent: bytes of this rank; gathered, alive: of full parameters, all tensors. gpt.py:12: your line.
"""
HOW_TO_READ_SLICES = "# tensor: a collective of torch's tensor parallelism, or the wait for one.\n"
HOW_TO_READ_SITES = "# site: an exchange with other sites, not in every step: not in the last line's bytes.\n"
HOW_TO_READ_TYPES = """\
# dp:S tp:P: what the line above writes, on each axis. R: equal on all ranks, S: a slice,
# P: a share of a sum, N: a share of a norm, V: different on each rank, X: random on each rank.
"""
NAME = re.compile(r"(?<![.'\w])[A-Za-z_]\w*\b(?!=)")  # the name of a value, not of a keyword argument
METHODS = frozenset(dir(Tensor))
HIDDEN = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE, clear_mutable_collection.id, "zero_enter")
View = tuple[str, str, tuple[Any, ...]]  # the operator's name, its arguments after the first, the shape of the result
Chain = tuple[TensorProxy, tuple[View, ...]]  # a value, and views of it that are applied in order


def print_trace(
    model_or_traces: ThunderModule | Traces | Timeline,
    phase: str = "both",
    file: IO[str] | None = None,
    *,
    unit: str | None = None,
    only: str | None = None,
    every_line: bool = False,
    memory: Memory | None = None,
    types: bool = False,
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
    >>> tz.print_trace(traces, types=True)  # what each value is on each axis of the mesh
    >>> tz.print_trace(timeline)  # inside a pass

    Args:
        model_or_traces: a model that was called, or the result of :func:`thunder_zero.trace`. A timeline is printed
            whole, a line for each operation, with its number as in errors: "op 22".
        unit: print only the compute and the collectives of this unit.
        only: "parameters" for the lines that handle or read a parameter, "communication" for the lines that launch or
            end a collective of the schedule (default: all lines). The number of omitted lines is printed.
        every_line: True to print each line as it runs. By default a view is printed inside the line that reads it, as
            in ``aten.mm(x, w.t())``. Unpacking and the ``del`` of activations are left out by default.
        memory: a forecast of memory for these traces. Its figures at rest and in the optimizer's step are also printed.
        types: True to print, after each line, what it writes is on each axis of the mesh, as in ``dp:S tp:P``. What is
            wrong on the tensor-parallel axis is printed at the end. The lines run once on the CPU, with drawn values.
    """
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}; choose 'forward', 'backward' or 'both'")
    this_rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank not in range(world_size):
        raise ValueError(f"rank is {rank!r}; give the rank that prints, 0 to {world_size - 1}")
    if isinstance(model_or_traces, Timeline):
        if phase != "both" or unit is not None or only is not None or every_line or memory is not None or types:
            raise ValueError("a timeline is printed whole; leave out phase, unit, only, every_line, memory and types")
        if this_rank == rank:
            print(format_timeline(model_or_traces, numbered=True), file=file)
        return
    traces = as_traces(model_or_traces)
    if this_rank != rank:
        return
    select((), traces.plan, unit, only)  # refuses before anything is printed
    if memory is not None:
        require_forecast_of(traces, memory)
    table = table_of(traces, memory) if memory else step_table(traces)
    table = table.typed() if types else table
    parts = _parts(table, phase, unit, only, rows_of if every_line else shown_rows)
    _print(table, parts, outside_of_the_peak(memory) if memory else [], Console(file=file))


def _parts(
    table: Table, phase: str, unit: str | None, only: str | None, read: Callable[[Table, str], tuple[Row, ...]]
) -> dict[str, tuple[Row | int, ...]]:
    """Return the selected rows of each phase, which ``read`` reads from the traces."""
    sites = [OUTER_STEP] * (phase == "both" and table.traces.exchanges is not None)
    rows = {name: read(table, name) for name in PHASES[phase]} | {name: rows_of(table, name) for name in sites}
    return {name: select(lines, table.traces.plan, unit, only) for name, lines in rows.items()}


def _print(table: Table, parts: Mapping[str, Sequence[Row | int]], notes: list[str], console: Console) -> None:
    """Print the legend, the rows of each phase, the notes and wrong types."""
    plan, types = table.traces.plan, table.types
    if table.no_memory:
        write(console, f"# {table.no_memory}\n")
    legend = HOW_TO_READ_SLICES * plan.mesh.is_sliced + HOW_TO_READ_SITES * (table.traces.exchanges is not None)
    write(console, HOW_TO_READ + legend + HOW_TO_READ_TYPES * bool(types), QUIET)
    if types and types.not_checked:
        write(console, f"# types: not checked: {types.not_checked}\n")
    for name, rows in parts.items():
        if not rows_of(table, name):
            write(console, "# no backward: nothing here needs a gradient\n")
            continue
        is_deferred = name != OUTER_STEP and not table.traces.facts.synced
        print_rows(rows, plan, f"{name} under no_sync" if is_deferred else name, console)
        if table.memory is not None and (name, table.memory.peak_line.phase) == ("forward", "loss"):
            write(console, f"# the peak of the step: {size(table.memory.peak)} alive in the loss\n")
    for line in notes:
        write(console, f"# {line}")
    for fault in types.faults if types else ():
        axis, where = names_of_axes(plan.mesh)[fault.axis], f" ({fault.where})" if fault.where else ""
        write(console, f"# {fault.kind} on {axis}: {fault.text}{where}")
    print_total([row for name, rows in parts.items() if name != OUTER_STEP for row in rows], console)


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
    return table.rows(where=lambda row: row.phase == phase)


def json_of(
    traces: Traces,
    phase: str = "both",
    *,
    unit: str | None = None,
    only: str | None = None,
    types: bool = False,
) -> dict[str, Any]:
    """Return the output of :func:`thunder_zero.print_trace` as data: lines are as in ``Table.as_dicts``."""
    plan, table = traces.plan, step_table(traces)
    table = table.typed() if types else table
    return {
        "stage": plan.policy.stage,
        "rank": plan.mesh.shard.place,
        "world_size": plan.mesh.shard.size,
        "replicas": plan.mesh.replicate.size,
        "slices": plan.mesh.tensor.size,
        "units": list(plan.units),
        "lines": [
            {"phase": name, "lines_left_out": row} if isinstance(row, int) else asdict(row)
            for name, rows in _parts(table, phase, unit, only, rows_of).items()
            for row in rows
        ],
    }


def shown(trace: TraceCtx, freed: Mapping[int, Sequence[str]]) -> Iterator[tuple[int, str, int | None]]:
    """Yield (position, code, position of a view that the code has at its end) of the lines to show.

    ``freed`` has the gathered parameters that the ``del`` line at a position frees."""
    chains, inside, appended = _views(trace)
    folded = {name: _code(chains[name]) for name in inside}
    hidden = {*inside, *appended.values()}
    position_of = {
        proxy.name: position for position, bsym in enumerate(trace.bound_symbols) for proxy in bsym.flat_proxy_outs
    }
    for position, bsym in enumerate(trace.bound_symbols):
        results = [proxy.name for proxy in bsym.flat_proxy_outs]
        if bsym.sym.id is prims.PrimIDs.DEL:
            if position in freed:
                yield position, f"del {', '.join(freed[position])}", None
        elif bsym.sym.id not in HIDDEN and hidden.isdisjoint(results):
            if operator_of(bsym) is None:
                yield position, _line(bsym), None
                continue
            name, _, call = short(_python(bsym)).rpartition(" = ")
            if _stands_inside(bsym):
                call = _code(chains.get(name) or (bsym.flat_proxy_args[0], (_view(bsym),)))
            call = NAME.sub(lambda match: folded.get(match[0], match[0]), call)
            view = appended.get(name)
            if view is not None:
                name, call = view, _code(chains[view], call)
            yield position, f"{name} = {call}" if name else call, position_of.get(view or "")


def _views(trace: TraceCtx) -> tuple[dict[str, Chain], set[str], dict[str, str]]:
    """Return the chains of views by name, and two groups of views that are printed in an operator's line.

    The first group has the views that only one operator reads, which are printed inside its line. The second maps an
    operator's result to the view that is its only reader, which is printed at the end of the operator's line.
    """
    reads: Counter[str] = Counter()
    read_by_others: set[str] = set()  # values that lines without an operator read
    made: set[str] = set()  # the only values of operators, except views
    for bsym in trace.bound_symbols:
        if bsym.sym.id is not prims.PrimIDs.DEL:
            names = {proxy.name for proxy in bsym.flat_proxy_args}
            reads.update(names)
            read_by_others.update(() if operator_of(bsym) else names)
            if operator_of(bsym) and isinstance(bsym.output, TensorProxy) and not _stands_inside(bsym):
                made.add(bsym.output.name)
    chains: dict[str, Chain] = {}
    folded: set[str] = set()
    appended: dict[str, str] = {}
    for bsym in trace.bound_symbols:
        if isinstance(bsym.output, TensorProxy) and operator_of(bsym) is not None and _stands_inside(bsym):
            base, name = bsym.flat_proxy_args[0], bsym.output.name
            root, _ = chains[name] = _then(chains[base.name] if base.name in folded else (base, ()), _view(bsym))
            if reads[name] == 1 and name not in read_by_others:
                folded.add(name)
            elif reads[root.name] == 1 and root.name in made:
                appended[root.name] = name
    return chains, folded, appended


def _stands_inside(bsym: BoundSymbol) -> bool:
    return makes_view(bsym) and not is_collective(operator_of(bsym))


def _view(bsym: BoundSymbol) -> View:
    name = bsym.sym.name.removeprefix("_unsafe_")
    further = [*map(prettyprint, bsym.args[1:]), *(f"{key}={prettyprint(arg)}" for key, arg in bsym.kwargs.items())]
    return name, ", ".join(further), _shape(bsym.output) if isinstance(bsym.output, TensorProxy) else ()


def _then(chain: Chain, view: View) -> Chain:
    """Return the chain with a further view. Earlier views that the further view undoes are removed."""
    (root, views), (name, args, shape) = chain, view
    if name in ("t", "transpose") and views and views[-1][:2] == (name, args):
        return root, views[:-1]
    views = views[:-1] if name == "reshape" and views and views[-1][0] == name else views
    before = views[-1][2] if views else _shape(root)
    return root, views if name == "reshape" and shape == before else (*views, view)


def _code(chain: Chain, code: str = "") -> str:
    """Return the code of the chain's last view, applied to ``code`` (default: the chain's value)."""
    code = code or chain[0].name
    for name, args, _ in chain[1]:
        inside = ", ".join(filter(None, (code, args)))
        code = f"{code}.{name}({args})" if name in METHODS else f"aten.{name}({inside})"
    return code


def _shape(proxy: TensorProxy) -> tuple[Any, ...]:
    """Return a shape in which names replace symbols."""
    return tuple(size.name if isinstance(size, Proxy) else size for size in proxy.shape)


def _line(bsym: BoundSymbol) -> str:
    """Return the code of a line that calls no operator.

    Paths are left out if the names of values show the paths. A return statement has the outputs and the saved values.
    """
    if isinstance(bsym.sym.executor, ZeroExecutor) and bsym.flat_proxy_outs and len(bsym.args) > 1:
        values, paths, *axes = bsym.args
        args = [prettyprint(tuple(values))] if isinstance(values, tuple | list) else [values.name, repr(paths)]
        args += [f"over={axis!r}" for axis in axes]
        return f"{prettyprint(bsym.output)} = {bsym.sym.name}({', '.join(args)})"
    if bsym.sym.id is prims.PrimIDs.RETURN and isinstance(bsym.args[0], dict) and len(bsym.args) == 2:
        result, (tensors, saved_numbers) = bsym.args
        return f"return {prettyprint(tuple(result['output']))}, {prettyprint((*tensors, *saved_numbers))}"
    return _python(bsym)


def _python(bsym: BoundSymbol) -> str:
    return "\n".join(bsym.python(indent=0, print_depth=1))
