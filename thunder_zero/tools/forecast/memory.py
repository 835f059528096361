"""``tz.tools.memory``: forecasts the memory of a training step from the traces that will run.

In: traces. Out: :class:`Memory`. Tools that show a forecast beside traces call :func:`require_forecast_of` first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, zip_longest
from typing import Any

from thunder_zero.capture.zero_module import as_traces
from thunder_zero.plan.amounts import name_of
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import is_count
from thunder_zero.schedule.ops import Reduce, ends
from thunder_zero.tools.forecast.figures import Memory, Storage
from thunder_zero.tools.forecast.fold import Fold, FoldedLine
from thunder_zero.tools.forecast.for_loss import Loss, for_loss
from thunder_zero.tools.forecast.loading import loading
from thunder_zero.tools.forecast.recorder import Recorder
from thunder_zero.tools.forecast.rehearsal import TRANSPORTS, MakeOptimizer
from thunder_zero.tools.forecast.resized import Shapes, resized
from thunder_zero.tools.printing.words import place_of
from thunder_zero.tools.table.lines import AROUND, in_order, traced_rows
from thunder_zero.tools.table.rows import AFTER_BACKWARD, DIGESTS, LOSS, Row, label
from thunder_zero.traces.compiled import Traces

from thunder.core.devices import DeviceType
from thunder.core.module import ThunderModule
from thunder.core.proxies import TensorProxy

ENTER = "zero_enter("


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
        NoForecast: a line, the loss or the optimizer reads a tensor's value. It is a RuntimeError.
    """
    traces = as_traces(model_or_traces)
    traces = resized(traces, shapes) if shapes else traces
    recorder = recorder_of(traces, loss, optimizer, backend, accumulating=accumulating, reserve=reserve)
    return memory_of(recorder, reserve)


def recorder_of(
    traces: Traces,
    loss: Loss | None,
    optimizer: MakeOptimizer | None,
    backend: str | None = None,
    *,
    accumulating: bool = False,
    reserve: int = 0,
) -> Recorder:
    """Return the records of a program for training with a loss. The arguments are as for :func:`memory`."""
    backend = backend_of(traces) if backend is None else backend
    if backend not in TRANSPORTS:
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(map(repr, TRANSPORTS))}")
    if not is_count(reserve):
        raise ValueError(f"reserve is {reserve!r}; give a number of bytes, 0 or more")
    traces = for_loss(traces, loss) if loss else traces
    return Recorder(traces, backend, loss, optimizer, accumulating=accumulating)


def memory_of(recorder: Recorder, reserve: int = 0) -> Memory:
    traces, fold = recorder.traces, Fold(recorder, recorder.traces.timeline).run()
    codes = AROUND if recorder.of_loss else AROUND | {LOSS: "# the gradients of the outputs"}
    phases = {*(line.phase for line in fold.lines), *([DIGESTS] if recorder.digested else [])}
    rows = in_order(traced_rows(traces), {phase: code for phase, code in codes.items() if phase in phases})
    indices = list(_indices(fold, rows))
    storages = tuple(_storages(fold, indices, list(_modules(rows))))
    numbers = {id(allocation): number for number, allocation in enumerate(fold.allocations)}
    for index, line in zip(indices, fold.lines, strict=True):
        rows[index] = replace(rows[index], written=_written(line, numbers))
    highest = {index: line.highest for index, line in zip(indices, fold.lines, strict=True)}
    events = Counter(map(id, fold.events[: fold.until_peak]))  # 1 for what is allocated and not freed
    pairs = zip(storages, fold.allocations, strict=True)
    at_peak = (storage for storage, allocation in pairs if events[id(allocation)] == 1)
    return Memory(
        lines=tuple(with_bytes(rows, storages, highest, reserve)),
        storages=storages,
        plan=_plan_to_compare(traces),
        at_peak=tuple(sorted(at_peak, key=lambda storage: -storage.nbytes)),
        reserve=reserve,
        excluded=tuple(_excluded(recorder)),
        loading=loading(traces.plan, on_cpu=recorder.backend != "nccl"),
    )


def _indices(fold: Fold, rows: Sequence[Row]) -> Iterator[int]:
    """Yield the index of the row of each line of the fold, which runs all rows but unpacking, announcing, returning."""
    for phase, lines in Counter(line.phase for line in fold.lines).items():
        of_phase = [index for index, row in enumerate(rows) if row.phase == phase]
        ran = [index for index in of_phase if rows[index].kind != "return" and not rows[index].code.startswith(ENTER)]
        if phase == "backward":  # begins when it has dropped its arguments
            yield next(index for index in of_phase if rows[index].code == "del cotangents")
            lines -= 1
        yield from ran[len(ran) - lines :]


def _storages(fold: Fold, indices: Sequence[int], modules: Sequence[str]) -> Iterator[Storage]:
    for allocation in fold.allocations:
        line, freed_by, op = allocation.line, allocation.freed_by, allocation.op
        is_of_gradients = isinstance(op, Reduce) or (op is not None and ends(op, Reduce))
        index = indices[line] if line >= 0 else -1
        yield Storage(
            kind=allocation.kind,
            nbytes=allocation.nbytes,
            name=allocation.name or (label(op.params, fold.timeline.plan, gradients=is_of_gradients) if op else ""),
            module=modules[index] if line >= 0 else "",
            line=index,
            freed=indices[freed_by] if freed_by is not None and freed_by < len(indices) else None,
        )


def _written(line: FoldedLine, numbers: Mapping[int, int]) -> dict[str, dict[str, Any]]:
    """Return ``Row.written`` of a line. ``numbers`` has the indices of storages, by the ids of their allocations."""
    return {
        name: {"storage": numbers[id(held)], "dtype": name_of(layout.dtype), "shape": layout.shape}
        for name, (held, layout) in line.written.items()
        if id(held) in numbers
    }


def with_bytes(
    rows: Sequence[Row], storages: Iterable[Storage], highest: Mapping[int, int], reserve: int = 0
) -> Iterator[Row]:
    """Yield rows with their bytes. ``highest`` has the most bytes alive in rows that allocate or free, by index."""
    allocated, freed = ([Counter[str]() for _ in rows] for _ in range(2))
    alive, after = 0, list[int]()
    for storage in storages:
        alive += storage.nbytes * (storage.line < 0)
        if storage.line >= 0:
            allocated[storage.line][str(storage.kind)] += storage.nbytes
        if storage.freed is not None:
            freed[storage.freed][str(storage.kind)] += storage.nbytes
    for made, dropped in zip(allocated, freed, strict=True):
        alive += made.total() - dropped.total()
        after.append(alive)
    most = [highest.get(index, alive) for index, alive in enumerate(after)]
    peak = max((index for index, row in enumerate(rows) if row.phase not in AFTER_BACKWARD), key=most.__getitem__)
    for index, row in enumerate(rows):
        alive, highest_alive = after[index] + reserve, most[index] + reserve
        kinds: dict[str, Any] = {"allocated": dict(allocated[index]), "freed": dict(freed[index])}
        yield replace(row, **kinds, alive=alive, highest=highest_alive, is_peak=index == peak)


def _modules(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each line's module: the last module in this phase that computed with a parameter or gradient."""
    for _, lines in groupby(rows, key=lambda row: row.phase):
        module = ""
        for row in lines:
            if row.kind == "compute" and row.params:
                module = row.params[0].rpartition(".")[0]
            yield module


def backend_of(traces: Traces) -> str:
    devices = {arg.device.devicetype for arg in traces.forward.args if isinstance(arg, TensorProxy)}
    return "nccl" if DeviceType.CUDA in devices else "gloo"


def _excluded(recorder: Recorder) -> Iterator[str]:
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
    sizes_of = traces.facts.input_shapes  # a size that may change is a symbol
    inputs = (arg for arg in traces.forward.args if any(isinstance(size, str) for size in sizes_of.get(arg.name, ())))
    if shown := ", ".join(f"{arg.name} {(*arg.shape,)}" for arg in inputs):
        yield f"other sizes than {shown}: give shapes="


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
    listed = (
        [f"{row.phase} line {row.position}: {row.statement}" for row in rows if row.position >= 0]
        for rows in (memory.lines, traced_rows(traces))
    )
    for theirs, ours in zip_longest(*listed, fillvalue="nothing"):
        if theirs != ours:
            raise ValueError(f"memory is a forecast of other traces, with {theirs!r} in place of {ours!r}; {action}")
