"""``tz.tools.memory``: forecasts the memory of a training step from the traces that will run.

In: traces. Out: :class:`Memory`, with the bytes alive after each line, the first and last line of each storage, and
the peak. Tools that show a forecast beside traces call :func:`require_forecast_of` first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby

from thunder_zero.capture.zero_module import traces_of
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import STAGES, is_count
from thunder_zero.tools.forecast.figures import AT_REST, OPTIMIZER_STEP, ByKind, Holds, Memory, MemoryLine, Storage
from thunder_zero.tools.forecast.for_loss import for_loss
from thunder_zero.tools.forecast.lines import python_lines
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer, Rehearsal, optimizer_at_rest
from thunder_zero.tools.forecast.replay import Context, Loss, Replay, RunLine
from thunder_zero.tools.forecast.resized import Shapes, resized
from thunder_zero.tools.forecast.unsent import TRANSPORTS
from thunder_zero.tools.forecast.watch import Allocation, Watch
from thunder_zero.tools.printing.text import place_of
from thunder_zero.tools.table.rows import Row, explained
from thunder_zero.traces.compiled import Traces

from thunder.core.devices import DeviceType
from thunder.core.module import ThunderModule
from thunder.core.proxies import TensorProxy


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
    traces = for_loss(traces, loss) if loss else traces
    backend = backend_of(traces) if backend is None else backend
    _require(backend, reserve)
    with Watch(Holds.PARAMETER) as watch:
        replay = begin_replay(traces, backend, optimizer, watch, accumulating=accumulating)
        return run_step(replay, loss, tuple(excluded_from(traces, loss, optimizer, backend)), reserve)


def begin_replay(
    traces: Traces,
    backend: str,
    optimizer: MakeOptimizer | None,
    watch: Watch,
    *,
    accumulating: bool = False,
    contexts: tuple[Context, Context] | None = None,
) -> Replay:
    """Allocate the memory at rest, and return a replay. Its loss and its optimizer run inside ``contexts``."""
    rehearsal = Rehearsal(traces.plan, backend, synced=traces.facts.synced)
    for path, tensor in rehearsal.at_rest():
        watch.record(tensor).name = path
    for tensor in rehearsal.on_host():
        watch.stop_counting(tensor)
    shards = rehearsal.trained_on_device()
    built_optimizer = None
    foreach = backend == "nccl" and not STAGES[traces.plan.policy.stage].sharded
    if optimizer is not None and shards:
        built_optimizer = optimizer_at_rest(optimizer, shards, watch, foreach=foreach)
    if accumulating:
        watch.kind = Holds.DEFERRED
        for path in rehearsal.accumulate():
            watch.name_new(path)
    return Replay(traces, watch, rehearsal, built_optimizer, *(contexts or (nullcontext(), nullcontext())))


def run_step(replay: Replay, loss: Loss | None, excluded: tuple[str, ...], reserve: int = 0) -> Memory:
    """Run a step and return its figures."""
    replay.run_phases(loss)
    peak, events = replay.watch.highest, replay.watch.events_at_highest
    replay.step_optimizer()
    allocations = replay.watch.allocations
    storages = _storages(allocations, replay.lines, _modules(replay))
    lines = _lines(storages, replay.lines, reserve)
    at_peak = [
        storage for storage, allocation in zip(storages, allocations, strict=True) if allocation.is_alive_after(events)
    ]
    return Memory(
        lines=lines,
        storages=storages,
        at_rest=sum(storage.nbytes for storage in storages if storage.line < 0 and storage.kind in AT_REST) + reserve,
        peak=peak + reserve,
        optimizer_step=lines[-1].highest if lines[-1].phase == OPTIMIZER_STEP else None,
        plan=_plan_to_compare(replay.traces),
        at_peak=tuple(sorted(at_peak, key=lambda storage: -storage.nbytes)),
        reserve=reserve,
        excluded=excluded,
    )


def _storages(
    allocations: Sequence[Allocation], lines: Sequence[RunLine], modules: Sequence[str]
) -> tuple[Storage, ...]:
    ends = [line.events for line in lines]
    storages = []
    for allocation in allocations:
        index = allocation.line - 1  # the watch's line 0 is before the first line
        freed = None if allocation.freed is None else bisect_right(ends, allocation.freed)
        module = modules[index] if index >= 0 else ""
        freed = None if freed is None or freed == len(lines) else freed
        storages.append(Storage(allocation.kind, allocation.nbytes, allocation.name, module, index, freed))
    return tuple(storages)


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
        memory_lines.append(MemoryLine(line.phase, line.position, line.code, by_kind, total, line.highest + reserve))
    return tuple(memory_lines)


def _modules(replay: Replay) -> list[str]:
    """Return each line's module: the last module in this phase that computed with a parameter or gradient."""
    modules: list[str] = []
    for phase, lines in groupby(replay.lines, key=lambda line: line.phase):
        trace = {"forward": replay.traces.forward, "backward": replay.traces.backward}.get(phase)
        sources = [Row(phase, line.position, line.code) for line in lines]
        if trace is None:
            modules += [""] * len(sources)
            continue
        sources.append(Row(phase, len(trace.bound_symbols) - 1, "return"))
        module = ""
        rows = list(explained(sources, replay.traces.timeline, replay.traces.lines, backward=phase == "backward"))
        for row in rows[:-1]:
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


def _require(backend: str, reserve: int) -> None:
    if backend not in TRANSPORTS:
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(map(repr, TRANSPORTS))}")
    if not is_count(reserve):
        raise ValueError(f"reserve is {reserve!r}; give a number of bytes, 0 or more")


def excluded_from(traces: Traces, loss: Loss | None, optimizer: MakeOptimizer | None, backend: str) -> Iterator[str]:
    """Yield descriptions of the parts of a step that a forecast of these traces leaves out."""
    if traces.backward is not None:
        if loss is None:
            yield "the loss outside of the model: give loss="
        if optimizer is None:
            yield "the optimizer's state and step: give optimizer="
    elif any(param.requires_grad for param in traces.plan.params):
        yield "backward: the traces (of a model: those that ran last) have none; run or trace it with gradients"
    if backend == "nccl" and backend_of(traces) != "nccl":
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
        (phase, line.position): line.code for phase, trace in phases if trace for line in python_lines(trace)[1]
    }
    for phase, position in sorted(forecast_codes.keys() | trace_codes.keys()):
        codes = (forecast_codes.get((phase, position), "missing"), trace_codes.get((phase, position), "missing"))
        expected, actual = (code.partition("\n")[0] for code in codes)
        if expected != actual:
            raise ValueError(
                f"memory is a forecast of other traces, where line {position} of {phase} is {expected!r}, not "
                f"{actual!r}; {action}"
            )
