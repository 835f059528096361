"""Records what each line of a program does to memory: runs the line once, alone, on meta tensors.

::

    h = aten.addmm(b, x, w)      reads slots 0, 1, 2    allocates slot 3, 4 MiB    h lies in slot 3
    y = aten.view(h, [8, 128])   reads slot 0           allocates nothing          y lies in slot 0

A record does not depend on the schedule, so ``fold.py`` computes the memory of any schedule of the lines from their
records. A launch is recorded together with its wait, once for each bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from thunder_zero.plan.mesh import OF_MEANS
from thunder_zero.schedule.ops import Compute, Defer, Gather, Launch, Reduce, Work
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.sharded.digests import digests_of
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.tools.forecast.for_loss import Loss, gradients_of_outputs, tangents_of
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer, Rehearsal, full_gradient, take_step
from thunder_zero.tools.forecast.run_lines import empty_like, filled, run_convolution, run_line, run_region
from thunder_zero.tools.forecast.watch import META, Event, Layout, Operators, Placed, Watch, needs_no_values
from thunder_zero.tools.table.rows import DIGESTS, LOSS, OPTIMIZER_STEP
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.lift import read_by, written_by
from thunder_zero.traces.operators import operator_of
from thunder_zero.traces.work import work_of

from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

T = TypeVar("T")
OPERATORS: dict[object, Record] = {}  # records of torch's operators: equal calls do the same to memory


@dataclass(frozen=True, slots=True)
class Record:
    """What a line does to memory, or a launch with its wait. The first slots are the storages of what it reads."""

    lines: tuple[tuple[Event, ...], ...]  # the events of the line; of a launch: encode, the launch, and a ``del``
    outputs: tuple[Placed, ...]  # what it writes; of a launch: what the wait writes, decoded
    kept: frozenset[int] = frozenset()  # slots that the model's state holds from now on
    wait: tuple[tuple[Event, ...], ...] = ()  # the wait and a ``del`` of its handle, then decode and a ``del``, if any
    lasting: frozenset[int] = frozenset()  # slots of what a launch reads that are held until the wait's last line


class Recorder:
    """The records of the lines of a program. A line is recorded when a schedule first needs it."""

    def __init__(
        self,
        traces: Traces,
        backend: str,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        *,
        accumulating: bool = False,
    ) -> None:
        self.traces, self.plan, self.backend, self.of_loss = traces, traces.plan, backend, loss
        self.steps = optimizer is not None  # True if an optimizer was given
        self.tangents = [proxy.name for proxy in tangents_of(traces)]  # the gradients of forward's outputs
        # the operators that run without a trace, by phase
        self.around = {
            phase: Operators(phase, backward=phase == OPTIMIZER_STEP) for phase in (DIGESTS, LOSS, OPTIMIZER_STEP)
        }
        self._rehearse = partial(Rehearsal, traces, backend, optimizer, accumulating=accumulating)
        self._records: dict[object, Any] = {}  # with the lines whose ids are in the keys

    @cached_property
    def rehearsal(self) -> Rehearsal:
        return self._rehearse()

    @cached_property
    def _runtime(self) -> ModelRuntime:
        return ModelRuntime(self.rehearsal)

    def line(self, op: Compute | Defer, values: Sequence[Any]) -> Record:
        """Return the record of a line. ``values`` has what it reads: layouts of tensors, and other values."""
        line: Any = op.line if isinstance(op, Compute) else None
        if line is None:
            key: object = (Defer, op.params)
        elif line.sym.is_fusion:  # a region of another schedule may have the same lines
            key = (*map(id, line.subsymbols), *(proxy.name for proxy in line.flat_proxy_outs))
        elif operator_of(line) is None or self._copies(line):
            key = id(line)
        else:
            return _once(OPERATORS, _key_of_operator(line, values), lambda: self._record(op, line, values))
        return _once(self._records, key, lambda: (line, self._record(op, line, values)))[1]

    def _record(self, op: Compute | Defer, line: Any, values: Sequence[Any]) -> Record:
        read = [value.fresh() if isinstance(value, Layout) else value for value in values]
        with self._watched(op, read) as watch:
            written: list[Any] = [None]
            if isinstance(op, Defer):
                self._runtime.defer(read[0], op.params[0])
            else:
                named = dict(zip(read_by(line), read, strict=True))
                self._run(line, named, watch)
                written = [named[name] for name in written_by(line)]
            events, outputs = watch.taken(), tuple(map(watch.placed, written))
            held = {slot for slot, _ in outputs}
            kept = frozenset(slot for slot in watch.alive().values() if slot >= len(values) and slot not in held)
        return Record((events,), outputs, kept)

    def _run(self, line: Any, values: dict[str, Any], watch: Watch) -> None:
        def subject() -> str:
            return f"memory: the line {line.python(indent=0, print_depth=1)[0]!r}"

        with tracectx(TraceCtx()), needs_no_values(subject, "measure the step instead"):
            if line.sym.is_fusion:
                run_region(line, values, watch.record)
            elif self._copies(line):
                run_convolution(line, values, watch.record)
            else:
                run_line(line, self._runtime.functions, values)

    def _copies(self, line: Any) -> bool:
        return self.backend != "nccl" and work_of(line) is Work.CONVOLUTION

    def collective(self, launch: Launch, values: Sequence[Layout]) -> Record:
        """Return the record of a launch and its wait. ``values`` are the layouts of what the launch reads."""
        params = [replace(self.plan.by_name[path], path="", aliases=(), unit="") for path in launch.params]
        alike = type(launch), launch.over, *params, *values, len(self.deferred_for(launch))
        make = partial(self._record_collective, launch, values)
        record = _once(self._records, alike, make)
        if any((slot or 0) < 0 for slot, _ in record.outputs):  # it names storages at rest, of one bucket
            record = _once(self._records, (*alike, launch.params), make)
        return record

    def _record_collective(self, launch: Launch, values: Sequence[Layout]) -> Record:
        runtime, paths, bucket = self._runtime, launch.params, [self.plan.by_name[path] for path in launch.params]
        if isinstance(launch, Gather):
            sent: list[Any] = [self.rehearsal.params[path].rows for path in paths]
            encodes, decodes = self.plan.encodes(*bucket), self.plan.decodes(*bucket)
            calls: tuple[Any, Any, Any] = runtime.encode, runtime.all_gather, runtime.decode
        else:
            sent, over = [value.fresh() for value in values], launch.over
            encodes, decodes = self.plan.encodes_gradient(over, *bucket), self.plan.decodes_gradient(over, *bucket)
            calls = runtime.encode_grad, runtime.reduce, runtime.decode_grad
        encode, start, decode = calls
        with self._watched(launch, sent) as watch:
            launched = []
            if encodes:
                sent[:] = encode(tuple(sent), paths, launch.over)
                launched.append(watch.taken())
            handle: Any = start(tuple(sent), paths, launch.over)
            launched += [watch.taken()] if encodes else []
            sent.clear()
            launched.append(watch.taken())
            arrived: list[Any] = list(handle.wait())
            waited = [watch.taken()]
            del handle
            waited.append(watch.taken())
            if decodes:
                decoded = list(decode(tuple(arrived), paths, launch.over))
                waited.append(watch.taken())
                arrived[:] = decoded
                del decoded
                waited.append(watch.taken())
            outputs = tuple(map(watch.placed, arrived))
            lasting = frozenset(slot for slot in watch.alive().values() if slot < len(values))
            arrived.clear()
            kept = frozenset(watch.alive().values())
        return Record(tuple(launched), outputs, kept, tuple(waited), lasting - kept)

    def deferred_for(self, op: Compute | Defer | Launch) -> list[str]:
        """Return the paths of the deferred gradients that an operation adds to its own."""
        takes = isinstance(op, Defer) or (isinstance(op, Reduce) and op.over not in OF_MEANS)
        return [path for path in op.params if path in self.rehearsal.before] if takes else []

    @contextmanager
    def _watched(self, op: Compute | Defer | Launch, read: list[Any]) -> Iterator[Watch]:
        """Watch an operation. Defer the gradients that it takes before, and forget what it leaves in the state."""
        params = [self.rehearsal.params[path] for path in op.params]
        deferred = [self.rehearsal.params[path] for path in self.deferred_for(op)]
        for param in deferred:
            param.defer(full_gradient(param))
        with torch.no_grad(), Watch(self.rehearsal.slots, [*read, *(param.deferred for param in deferred)]) as watch:
            yield watch
        self.rehearsal.expire(params)
        for param in params:
            if param.deferred is not None:
                param.take_deferred()

    def loss(self, layouts: Mapping[str, Any]) -> Record:
        """Return the record of the loss and its gradient. It reads the outputs of forward, whose layouts are keyed by
        name, and writes the tangents that backward takes."""
        return _once(self._records, LOSS, lambda: self._record_loss(layouts))

    def _record_loss(self, layouts: Mapping[str, Any]) -> Record:
        outputs = {name: item.fresh() if isinstance(item, Layout) else item for name, item in layouts.items()}
        result = self.traces.forward.bound_symbols[-1].args[0]
        with Watch(self.rehearsal.slots, list(outputs.values())) as watch:
            returned = [filled(result["output"], outputs), list(filled(result["flat_output"], outputs))]
            outputs.clear()
            with self.around[LOSS]:
                gradients = gradients_of_outputs(self.traces, returned, self.of_loss)
            events = watch.taken()
            return Record((events,), tuple(map(watch.placed, gradients)))

    def optimizer_step(self) -> tuple[Event, ...]:
        """Return the events of the optimizer's step, without those of gradients."""
        return _once(self._records, OPTIMIZER_STEP, self._record_optimizer)

    def _record_optimizer(self) -> tuple[Event, ...]:
        optimizer, shards, params = self.rehearsal.optimizer, self.rehearsal.shards, self.rehearsal.params
        assert optimizer is not None, "there is a step to record"
        paths = [path for path, _ in self.traces.timeline.gradients if path in shards]
        rows = {path: torch.empty(params[path].rows.shape, dtype=shards[path].dtype, device=META) for path in paths}
        with Watch(self.rehearsal.slots, list(rows.values())) as watch, self.around[OPTIMIZER_STEP]:
            take_step(optimizer, {path: params[path].gradient(grad) for path, grad in rows.items()}, shards)
            events: tuple[Event, ...] = watch.taken()
        return events

    @property
    def is_whole(self) -> bool:
        """True if the step has a backward, and a loss or an optimizer."""
        return self.traces.backward is not None and (self.of_loss is not None or self.steps)

    @property
    def digested(self) -> list[Tensor]:
        """This rank's rows with whose digests a step of ZeRO-1 begins. They show the ranks what to refresh."""
        digests = self.is_whole and self.plan.mesh.shard.size > 1
        return [param.rows for param in self.rehearsal.resident] if digests else []

    def step_timeline(self) -> Timeline:
        """Return the timeline of a step. The loss, its gradient and the optimizer's step add torch's operators to it::

        digests (ZeRO-1) | forward | loss and its gradient | backward | optimizer step
        """
        timeline = self.traces.timeline
        if not self.is_whole:
            return timeline
        outputs = self.traces.forward.bound_symbols[-1].flat_proxy_args
        values = {proxy.name: empty_like(proxy) for proxy in outputs}
        self.loss({name: Layout.of(item) if isinstance(item, Tensor) else item for name, item in values.items()})
        if self.rehearsal.optimizer is not None and self.rehearsal.synced:
            self.optimizer_step()
        digests, loss, step = self.around.values()
        if self.digested and not digests.ops:
            with digests:
                torch.cat(digests_of(self.digested))
        ops, border = timeline.ops, timeline.backward_start
        all_ops = (*digests.ops, *ops[:border], *loss.ops, *ops[border:-1], *step.ops, ops[-1])
        return timeline.with_ops(all_ops, digests.values | loss.values | step.values)


def _once(records: dict[object, Any], key: object, make: Callable[[], T]) -> T:
    if key not in records:
        records[key] = make()
    result: T = records[key]
    return result


def _key_of_operator(line: BoundSymbol, values: Sequence[Any]) -> object:
    """Return a key that is equal for lines that call one operator with equal layouts and constants."""
    read = dict(zip(read_by(line), enumerate(values), strict=True))

    def frozen(tree: Any) -> object:
        if isinstance(tree, Proxy):
            return read[tree.name]
        if isinstance(tree, dict):
            return tuple((name, frozen(item)) for name, item in tree.items())
        return tuple(map(frozen, tree)) if type(tree) in (list, tuple) else (type(tree), tree)

    return operator_of(line), frozen(tuple(line.args)), frozen(dict(line.kwargs))
