"""``tz.tools.memory``: forecasts the memory of a training step from the traces that will run.

Traces go in; out come lines with the bytes alive after each, storages with the lines between which they live, and the
peak. Whoever shows a forecast with traces asks :func:`require_of` whether it is one of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from thunder_zero.frontends.compiled import Traces
from thunder_zero.frontends.zero_module import traces_of
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import STAGES, is_count
from thunder_zero.schedule.timeline import Kind
from thunder_zero.tools.forecast.figures import AT_REST, OPTIMIZER_STEP, ByKind, Holds, Memory, MemoryLine, Storage
from thunder_zero.tools.forecast.for_loss import for_loss
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer, Rehearsal, optimizer_at_rest
from thunder_zero.tools.forecast.replay import Loss, Replay, RunLine, printed
from thunder_zero.tools.forecast.resized import Shapes, resized
from thunder_zero.tools.forecast.unsent import TRANSPORTS
from thunder_zero.tools.forecast.watch import Allocation, Watch
from thunder_zero.tools.printing.line_meanings import SourceLine, rows
from thunder_zero.tools.printing.text import place_of

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
    """Forecast the memory of a training step from the traces that will run. Nothing of the model is allocated.

    Counts the storages of tensors, as torch's allocators do: neither Python, nor libraries, nor the backend's own
    buffers. Each line runs on tensors without values, and each collective runs in the transport of the backend, which
    then sends nothing. The first rank holds the most rows: trace rank 0 (the default) for the worst. ``excluded`` of
    the result says what is left out: the loss or the optimizer that is not given, a backward that the traces lack.

    >>> traces = tz.trace(model, tokens, policy=3, world_size=8)
    >>> tz.tools.memory(traces, loss=lambda logits: loss_of(logits, targets), optimizer=torch.optim.AdamW).peak

    Args:
        model_or_traces: the result of :func:`thunder_zero.trace`, or a model with ZeroTransform that was called.
        shapes: of inputs, by their names, where they differ from those that the program was traced for: as for
            :func:`thunder_zero.tools.resized`, so the largest batch that fits is found without a compilation.
        loss: from what forward returns to the loss, where the model does not compute it. The forecast assumes that the
            training code keeps no output. Tensors that it brings along, such as targets, are the caller's: they are
            not counted.
        optimizer: a class of optimizers, or a function from parameters to an optimizer, such as
            ``lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)``.
        backend: "gloo" or "nccl", whose transports have different buffers; "mpi" for all others. Default: "nccl" if the
            traces are for CUDA, else "gloo". It changes collectives alone: traces for CPUs stay those.
        accumulating: earlier micro-batches under ``no_sync`` have left a deferred gradient of each parameter.
        reserve: bytes to add to every figure, for what the forecast cannot see.

    Raises:
        TypeError: neither traces nor a model with ZeroTransform.
        ValueError: there is no such backend; ``reserve`` is negative; ``shapes`` as for ``resized``.
        RuntimeError: the model was not called yet; a line reads a value, which a forecast does not have
            (:class:`thunder_zero.tools.forecast.watch.NoForecast`).
    """
    traces = model_or_traces if isinstance(model_or_traces, Traces) else traces_of(model_or_traces)
    traces = resized(traces, shapes) if shapes else traces
    traces = for_loss(traces, loss) if loss else traces
    backend = _backend_of(traces) if backend is None else backend
    _require(backend, reserve)
    with Watch(Holds.PARAMETER, on_cpu=backend != "nccl") as watch:
        replay = begun(traces, backend, optimizer, watch, accumulating=accumulating)
        replay.step(loss)
        peak, events = watch.highest, watch.events_at_highest
        replay.step_optimizer()
    return _figures(replay, peak, events, reserve, tuple(_excluded(traces, loss, optimizer, backend)))


def _figures(replay: Replay, peak: int, events: int, reserve: int, excluded: tuple[str, ...]) -> Memory:
    """The figures of a step that ran; ``events`` is the number of allocations and frees until its peak."""
    allocations = replay.watch.allocations
    storages = _storages(allocations, replay.lines, _modules(replay))
    lines = _lines(storages, replay.lines, reserve)
    at_peak = [one for one, seen in zip(storages, allocations, strict=True) if seen.alive_after(events)]
    return Memory(
        lines=lines,
        storages=storages,
        at_rest=sum(one.nbytes for one in storages if one.line < 0 and one.kind in AT_REST) + reserve,
        peak=peak + reserve,
        optimizer_step=lines[-1].highest if lines[-1].phase == OPTIMIZER_STEP else None,
        plan=plan_of(replay.traces),
        at_peak=tuple(sorted(at_peak, key=lambda one: -one.nbytes)),
        reserve=reserve,
        excluded=excluded,
    )


def begun(traces: Traces, backend: str, optimizer: MakeOptimizer | None, watch: Watch, *, accumulating: bool) -> Replay:
    """A step that is about to begin: all is there that rests in memory."""
    share = Rehearsal(traces.plan, backend, synced=traces.synced)
    for path, tensor in share.at_rest():
        watch.see(tensor).name = path
    for tensor in share.on_host():
        watch.leaves(tensor)
    on_device = share.trained_on_device()
    stepping = None
    foreach = backend == "nccl" and not STAGES[traces.plan.policy.stage].sharded
    if optimizer is not None and on_device:
        stepping = optimizer_at_rest(optimizer, on_device, watch, foreach=foreach)
    if accumulating:
        watch.kind = Holds.DEFERRED
        for path in share.accumulate():
            watch.name_new(path)
    return Replay(traces, watch, share, stepping)


def _storages(
    allocations: Sequence[Allocation], lines: Sequence[RunLine], modules: Sequence[str]
) -> tuple[Storage, ...]:
    ends = [line.events for line in lines]
    found = []
    for one in allocations:
        at = one.line - 1  # line 0 of the watch is before the first
        freed = None if one.freed is None else bisect_right(ends, one.freed)
        module = modules[at] if at >= 0 else ""
        freed = None if freed is None or freed == len(lines) else freed
        found.append(Storage(one.kind, one.nbytes, one.name, module, at, freed))
    return tuple(found)


def _lines(storages: Sequence[Storage], lines: Sequence[RunLine], reserve: int) -> tuple[MemoryLine, ...]:
    changes: list[Counter[Holds]] = [Counter() for _ in range(len(lines) + 1)]
    for one in storages:
        changes[max(one.line, 0)][one.kind] += one.nbytes
        changes[len(lines) if one.freed is None else one.freed][one.kind] -= one.nbytes
    alive: Counter[Holds] = Counter()
    found = []
    for line, change in zip(lines, changes, strict=False):
        alive.update(change)
        by_kind = ByKind(tuple((kind, alive[kind]) for kind in Holds if alive[kind]))
        total = sum(by_kind.values()) + reserve
        found.append(MemoryLine(line.phase, line.position, line.code, by_kind, total, line.highest + reserve))
    return tuple(found)


def _modules(replay: Replay) -> list[str]:
    """For each line, the module whose parameter, or gradient of one, the lines of its phase computed with last."""
    modules: list[str] = []
    for phase, lines in groupby(replay.lines, key=lambda line: line.phase):
        trace = {"forward": replay.traces.forward, "backward": replay.traces.backward}.get(phase)
        sources = [SourceLine(line.code, line.position) for line in lines]
        if trace is None:
            modules += [""] * len(sources)
            continue
        sources.append(SourceLine("return", len(trace.bound_symbols) - 1))
        now = ""
        for row in rows(sources, replay.traces.timeline, backward=phase == "backward")[:-1]:
            if row.kind is Kind.COMPUTE and row.params:
                now = row.params[0].rpartition(".")[0]
            modules.append(now)
    return modules


def _backend_of(traces: Traces) -> str:
    on_cuda = any(
        arg.device.devicetype is DeviceType.CUDA for arg in traces.forward.args if isinstance(arg, TensorProxy)
    )
    return "nccl" if on_cuda else "gloo"


def _require(backend: str, reserve: int) -> None:
    if backend not in TRANSPORTS:
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(map(repr, TRANSPORTS))}")
    if not is_count(reserve):
        raise ValueError(f"reserve is {reserve!r}; give a number of bytes, 0 or more")


def _excluded(traces: Traces, loss: Loss | None, optimizer: MakeOptimizer | None, backend: str) -> Iterator[str]:
    if traces.backward is not None:
        if loss is None:
            yield "the loss outside of the model: give loss="
        if optimizer is None:
            yield "the optimizer's state and step: give optimizer="
    elif any(param.requires_grad for param in traces.plan.params):
        yield "backward: the traces (of a model: those that ran last) have none; run or trace it with gradients"
    if backend == "nccl" and _backend_of(traces) != "nccl":
        yield "what CUDA computes otherwise: the traces are of a run on CPUs; trace a module that is on a CUDA device"


def plan_of(traces: Traces) -> Plan:
    """The plan, without its policy's functions, which often cannot be pickled."""
    return replace(traces.plan, policy=replace(traces.plan.policy, unit_of=None, passes=(), transport=None))


def require_of(memory: Memory, traces: Traces) -> None:
    """Refuse what is no forecast of these traces."""
    action = "give what thunder_zero.tools.memory returns for these traces"
    if not isinstance(memory, Memory):
        raise TypeError(f"memory is of type {type(memory).__name__}; {action}")
    if memory.plan != plan_of(traces):
        theirs, ours = map(place_of, (memory.plan, traces.plan))
        ours = ours if ours != theirs else "the same rank with another module or policy"
        raise ValueError(f"memory is a forecast of {theirs}, the traces are of {ours}; {action}")
    forecast = {(line.phase, line.position): line.code for line in memory.lines if line.position >= 0}
    phases = [("forward", traces.forward), ("backward", traces.backward)]
    here = {(phase, line.position): line.code for phase, trace in phases if trace for line in printed(trace)[1]}
    for phase, position in sorted(forecast.keys() | here.keys()):
        pair = (forecast.get((phase, position), "missing"), here.get((phase, position), "missing"))
        there, line = (code.partition("\n")[0] for code in pair)
        if there != line:
            raise ValueError(
                f"memory is a forecast of other traces, where line {position} of {phase} is {there!r}, not {line!r}; "
                f"{action}"
            )
