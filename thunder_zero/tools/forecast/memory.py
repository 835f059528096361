"""``tz.tools.memory``: forecasts the memory of a training step from the traces that will run.

In: traces. Out: :class:`Memory`, with the bytes alive after each line, the first and last line of each storage, and
the peak. Tools that show a forecast beside traces call :func:`require_forecast_of` first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from thunder_zero.capture.zero_module import traces_of
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import is_count
from thunder_zero.schedule.ops import Op, Reduce, ends
from thunder_zero.tools.forecast.figures import AT_REST, OPTIMIZER_STEP, ByKind, Holds, Memory, MemoryLine, Storage
from thunder_zero.tools.forecast.fold import Fold
from thunder_zero.tools.forecast.for_loss import Loss, for_loss
from thunder_zero.tools.forecast.lines import python_lines
from thunder_zero.tools.forecast.recorder import Recorder
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.forecast.resized import Shapes, resized
from thunder_zero.tools.forecast.unsent import TRANSPORTS
from thunder_zero.tools.printing.text import place_of
from thunder_zero.tools.table.rows import Row, explained, label
from thunder_zero.traces.compiled import Traces

from thunder.core import prims
from thunder.core.devices import DeviceType
from thunder.core.module import ThunderModule
from thunder.core.proxies import TensorProxy

ENTER = "zero_enter"


def memory(
    model_or_traces: ThunderModule | Traces,
    *,
    shapes: Shapes | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    backend: str | None = None,
    accumulating: bool = False,
    reserve: int = 0,
) -> Memory:
    """Forecast the memory of a training step from the traces that will run. No tensor of the model is allocated.

    The forecast counts storages of tensors, as torch's allocators do. Memory of Python, of libraries, and of buffers
    inside the backend is left out. Each line runs on meta tensors. Each collective runs in the backend's transport,
    without messages. Rank 0, the default of ``trace``, holds the most rows. ``Memory.excluded`` lists the parts of the
    step that are missing: the loss, the optimizer or backward.

    >>> traces = tz.trace(model, tokens, policy=3, world_size=8)
    >>> tz.tools.memory(traces, loss=lambda logits: loss_of(logits, targets), optimizer=torch.optim.AdamW).peak

    Args:
        model_or_traces: the result of :func:`thunder_zero.trace`, or a model with ZeroTransform that was called.
        shapes: new shapes of inputs, by name, as for :func:`thunder_zero.tools.resized`. New shapes need no
            compilation, for example in a search for the largest batch that fits.
        loss: a function from the result of forward to the loss, if forward does not return the loss. The forecast
            assumes that the training code keeps no output. Tensors in the function's closure, such as targets, are not
            counted.
        optimizer: a class of optimizers, or a function from parameters to an optimizer, such as
            ``lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)``.
        backend: "gloo", "nccl", or "mpi" for every other backend (default: "nccl" for traces for CUDA, otherwise
            "gloo"). Only the buffers of collectives depend on the backend.
        accumulating: True if micro-batches under ``no_sync`` have left a deferred gradient of each parameter.
        reserve: bytes to add to every figure, for memory that the forecast cannot see.

    Raises:
        TypeError: ``model_or_traces`` is neither traces nor a model with ZeroTransform.
        ValueError: ``backend`` is unknown, ``reserve`` is negative, or ``resized`` raises for ``shapes``.
        RuntimeError: the model was not called yet, or a line reads a tensor's value
            (:class:`thunder_zero.tools.forecast.watch.NoForecast`).
    """
    traces = model_or_traces if isinstance(model_or_traces, Traces) else traces_of(model_or_traces)
    traces = resized(traces, shapes) if shapes else traces
    recorder = recorder_of(traces, loss, optimizer, backend, accumulating=accumulating, reserve=reserve)
    return memory_of(Fold(recorder, recorder.traces.timeline).run(), reserve)


def recorder_of(
    traces: Traces,
    loss: Loss | None,
    optimizer: MakeOptimizer | None,
    backend: str | None = None,
    *,
    accumulating: bool = False,
    reserve: int = 0,
) -> Recorder:
    """Return the records of a program for training with a loss. The arguments are those of :func:`memory`."""
    backend = backend_of(traces) if backend is None else backend
    if backend not in TRANSPORTS:
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(map(repr, TRANSPORTS))}")
    if not is_count(reserve):
        raise ValueError(f"reserve is {reserve!r}; give a number of bytes, 0 or more")
    traces = for_loss(traces, loss) if loss else traces
    return Recorder(traces, backend, loss, optimizer, accumulating=accumulating)


def memory_of(fold: Fold, reserve: int = 0) -> Memory:
    """Return the figures of a step."""
    traces = fold.recorder.traces
    ran, index_of = _lines_that_ran(fold, traces)
    storages = tuple(_storages(fold, index_of, _modules(ran, traces)))
    lines = _lines(storages, ran, reserve)
    at_peak = (
        storage
        for storage, allocation in zip(storages, fold.allocations, strict=True)
        if allocation.is_alive_after(fold.events_at_peak)
    )
    return Memory(
        lines=lines,
        storages=storages,
        at_rest=sum(storage.nbytes for storage in storages if storage.line < 0 and storage.kind in AT_REST) + reserve,
        peak=fold.peak + reserve,
        optimizer_step=lines[-1].highest if lines[-1].phase == OPTIMIZER_STEP else None,
        plan=_plan_to_compare(traces),
        at_peak=tuple(sorted(at_peak, key=lambda storage: -storage.nbytes)),
        reserve=reserve,
        excluded=tuple(_excluded(fold.recorder)),
    )


class RunLine(NamedTuple):
    """A line that ran. ``highest`` is None for one that only unpacks arguments, or names a phase."""

    phase: str
    position: int  # its position in the trace of its phase; -1 outside a trace
    code: str
    highest: int | None


def _lines_that_ran(fold: Fold, traces: Traces) -> tuple[list[RunLine], list[int]]:
    """Return all lines that ran, and the index among them of each line of the fold."""
    ran: list[RunLine] = []
    index_of: list[int] = []
    traces_of_phases = {"forward": traces.forward, "backward": traces.backward}
    for phase, group in groupby(fold.lines, key=lambda line: line.phase):
        folded = list(group)
        if (trace := traces_of_phases.get(phase)) is None:
            of_loss = "the loss and its gradient" if fold.recorder.of_loss else "the gradients of the outputs"
            code = "optimizer.step()" if phase == OPTIMIZER_STEP else of_loss
            index_of.append(len(ran))
            ran.append(RunLine(phase, -1, code, folded[0].highest))
            continue
        lines = python_lines(trace)
        unpacking = (
            len(lines) - sum(line.line.sym.name == ENTER for line in lines) - len(folded) + (phase == "backward")
        )
        for number, line in enumerate(lines):
            is_first = line.line.sym is prims.python_del and line.line.args[0].name == "cotangents"
            highest = None
            if is_first or not (number < unpacking or line.line.sym.name == ENTER):
                highest = fold.lines[len(index_of)].highest
                index_of.append(len(ran))
            ran.append(RunLine(phase, line.position, line.code, highest))
    return ran, index_of


def _storages(fold: Fold, index_of: Sequence[int], modules: Sequence[str]) -> Iterator[Storage]:
    for allocation in fold.allocations:
        line = index_of[allocation.line] if allocation.line >= 0 else -1
        freed_by = allocation.freed_by
        yield Storage(
            kind=allocation.kind,
            nbytes=allocation.nbytes,
            name=allocation.name or _label(allocation.op, fold.recorder.plan),
            module=modules[line] if line >= 0 else "",
            line=line,
            freed=index_of[freed_by] if freed_by is not None and freed_by < len(index_of) else None,
        )


def _label(op: Op | None, plan: Plan) -> str:
    is_of_gradients = isinstance(op, Reduce) or (op is not None and ends(op, Reduce))
    return label(op.params, plan, gradients=is_of_gradients) if op is not None else ""


def _lines(storages: Sequence[Storage], lines: Sequence[RunLine], reserve: int) -> tuple[MemoryLine, ...]:
    changes: list[Counter[Holds]] = [Counter() for _ in range(len(lines) + 1)]
    for storage in storages:
        changes[max(storage.line, 0)][storage.kind] += storage.nbytes
        changes[len(lines) if storage.freed is None else storage.freed][storage.kind] -= storage.nbytes
    alive: Counter[Holds] = Counter()
    memory_lines = []
    for line, change in zip(lines, changes, strict=False):
        alive.update(change)
        by_kind = ByKind(tuple((kind, alive[kind]) for kind in Holds if alive[kind]))
        total = sum(by_kind.values()) + reserve
        highest = total if line.highest is None else line.highest + reserve
        memory_lines.append(MemoryLine(line.phase, line.position, line.code, by_kind, total, highest))
    return tuple(memory_lines)


def _modules(ran: Sequence[RunLine], traces: Traces) -> list[str]:
    """Return each line's module: the last module in this phase that computed with a parameter or gradient."""
    modules: list[str] = []
    for phase, lines in groupby(ran, key=lambda line: line.phase):
        trace = {"forward": traces.forward, "backward": traces.backward}.get(phase)
        sources = [Row(phase, line.position, line.code) for line in lines]
        if trace is None:
            modules += [""] * len(sources)
            continue
        sources.append(Row(phase, len(trace.bound_symbols) - 1, "return"))
        module = ""
        for row in list(explained(sources, traces.timeline, traces.lines, backward=phase == "backward"))[:-1]:
            if row.kind == "compute" and row.params:
                module = row.params[0].rpartition(".")[0]
            modules.append(module)
    return modules


def backend_of(traces: Traces) -> str:
    """Return the default backend for the traces: "nccl" for CUDA, otherwise "gloo"."""
    on_cuda = any(
        arg.device.devicetype is DeviceType.CUDA for arg in traces.forward.args if isinstance(arg, TensorProxy)
    )
    return "nccl" if on_cuda else "gloo"


def _excluded(recorder: Recorder) -> Iterator[str]:
    """Yield descriptions of the parts of a step that a forecast leaves out."""
    traces = recorder.traces
    if traces.backward is not None:
        if recorder.of_loss is None:
            yield "the loss outside of the model: give loss="
        if not recorder.steps:
            yield "the optimizer's state and step: give optimizer="
    elif any(param.requires_grad for param in traces.plan.params):
        yield "backward: the traces (of a model: those that ran last) have none; run or trace it with gradients"
    if recorder.backend == "nccl" and backend_of(traces) != "nccl":
        yield "what CUDA computes otherwise: the traces are of a run on CPUs; trace a module that is on a CUDA device"


def _plan_to_compare(traces: Traces) -> Plan:
    """Return the plan without the policy's functions, which often cannot be pickled."""
    return replace(traces.plan, policy=replace(traces.plan.policy, unit_of=None, passes=(), transport=None))


def require_forecast_of(traces: Traces, memory: Memory) -> None:
    """Raise TypeError or ValueError unless ``memory`` is a forecast of these traces."""
    action = "give what thunder_zero.tools.memory returns for these traces"
    if not isinstance(memory, Memory):
        raise TypeError(f"memory is of type {type(memory).__name__}; {action}")
    if memory.plan != _plan_to_compare(traces):
        forecast_place, traces_place = map(place_of, (memory.plan, traces.plan))
        traces_place = traces_place if traces_place != forecast_place else "the same rank with another module or policy"
        raise ValueError(f"memory is a forecast of {forecast_place}, the traces are of {traces_place}; {action}")
    forecast_codes = {(line.phase, line.position): line.code for line in memory.lines if line.position >= 0}
    phases = [("forward", traces.forward), ("backward", traces.backward)]
    trace_codes = {
        (phase, line.position): line.code for phase, trace in phases if trace for line in python_lines(trace)
    }
    for phase, position in sorted(forecast_codes.keys() | trace_codes.keys()):
        codes = (forecast_codes.get((phase, position), "missing"), trace_codes.get((phase, position), "missing"))
        expected, actual = (code.partition("\n")[0] for code in codes)
        if expected != actual:
            raise ValueError(
                f"memory is a forecast of other traces, where line {position} of {phase} is {expected!r}, not "
                f"{actual!r}; {action}"
            )
