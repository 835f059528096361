"""Records what each line of a program does to memory: runs the line once, alone, on meta tensors.

::

    h = aten.addmm(b, x, w)      reads slots 0, 1, 2    allocates slot 3, 4 MiB    h lies in slot 3
    y = aten.view(h, [8, 128])   reads slot 0           allocates nothing          y lies in slot 0

A record does not depend on the schedule, so ``fold.py`` computes the memory of any schedule of the lines from their
records. A launch is recorded together with its wait, once for each bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from thunder_zero.plan.mesh import OF_MEANS
from thunder_zero.plan.policy import STAGES
from thunder_zero.schedule.ops import Compute, Defer, Gather, Launch, Reduce
from thunder_zero.sharded.param import ShardedParam
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.tools.forecast.figures import OPTIMIZER_STEP, Holds
from thunder_zero.tools.forecast.lines import empty_like, filled, run_line, run_region
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer, Rehearsal, optimizer_at_rest, take_step
from thunder_zero.tools.forecast.watch import FREED, META, Event, Layout, Placed, Watch, WithoutValues, needs_no_values
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.lift import read_by, written_by
from thunder_zero.traces.operators import operator_of
from thunder_zero.traces.symbols import functions_of

from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

Loss = Callable[[Any], Tensor]
Context = AbstractContextManager[object]
T = TypeVar("T")
OPERATORS: dict[object, Record] = {}  # records of torch's operators: equal calls do the same to memory


@dataclass(frozen=True, slots=True)
class Record:
    """What a line does to memory. Its first slots are the storages of the values that it reads."""

    events: tuple[Event, ...]
    outputs: tuple[Any, ...]  # ``Placed`` for each tensor that it writes; other values as they are, such as a number
    kept: frozenset[int] = frozenset()  # slots that the model's state holds from now on


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """What the lines of a launch and of its wait do to memory. All lines of a collective have common slots."""

    launch: tuple[tuple[Event, ...], ...]  # the events of each line: the launch, or encode, the launch, and a ``del``
    wait: tuple[tuple[Event, ...], ...]  # the wait and a ``del`` of its handle, then decode and a ``del`` if it decodes
    outputs: tuple[Placed, ...]  # the tensors that the wait writes, decoded
    lasting: frozenset[int]  # slots of what the launch reads that are held until the last line
    kept: frozenset[int]  # slots that the model's state holds from now on


@dataclass(frozen=True, slots=True)
class AtRest:
    """A storage from before the step, or of an input."""

    nbytes: int | None  # None if it is in host memory
    kind: Holds
    name: str


class Recorder:
    """The records of the lines of a program. A line is recorded when a schedule first needs it.

    Attributes:
        at_rest: the storages from before the step, and the inputs. Slot ``~0`` is the first.
        deferred: the slots of deferred gradients, keyed by path.
        of_loss, steps: the loss, and whether an optimizer was given. ``optimizer`` steps the shards, if any.
        inputs: the inputs of forward, keyed by name: where a tensor lies, or a number.
        codes: what each phase outside of the traces does, in words.
        tangents: the names of the gradients of forward's outputs.
    """

    def __init__(
        self,
        traces: Traces,
        backend: str,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        *,
        accumulating: bool = False,
        around: tuple[Context, Context] = (nullcontext(), nullcontext()),
    ) -> None:
        """The loss and the optimizer's step run inside of the contexts ``around``."""
        self.traces, self.plan, self.backend, self.of_loss, self._around = traces, traces.plan, backend, loss, around
        self.steps = optimizer is not None
        with WithoutValues():  # rows on the host are meta tensors as well
            self.rehearsal = Rehearsal(traces.plan, backend, synced=traces.facts.synced)
        self.at_rest: list[AtRest] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self._runtime = ModelRuntime(self.rehearsal)
        self._functions = functions_of(self._runtime, traces.plan)
        self._records: dict[object, Any] = {}  # with the lines whose ids are in the keys
        self._slots: dict[int, int] = {}  # the slots of storages at rest, keyed by address
        self._tensors: list[Tensor] = []  # keeps these addresses
        for path, tensor in self.rehearsal.at_rest():
            self._rest(tensor, Holds.PARAMETER, path, counts=not self.plan.rests_on_host(self.plan.by_name[path]))
        self._step_once(optimizer, foreach=backend == "nccl" and not STAGES[self.plan.policy.stage].sharded)
        params = self.rehearsal.params.values() if accumulating else ()
        self.deferred = {
            param.path: self._rest(_full_gradient(param), Holds.DEFERRED, param.path)
            for param in params
            if param.planned.requires_grad
        }
        self.inputs = dict(self._inputs())
        tangents = () if traces.backward is None else traces.backward.args[1]
        self.tangents = [proxy.name for proxy in tangents if proxy is not None]
        self.codes = {
            "loss": "the loss and its gradient" if loss else "the gradients of the outputs",
            OPTIMIZER_STEP: "optimizer.step()",
        }

    def _rest(self, tensor: Tensor, kind: Holds, name: str, *, counts: bool = True) -> int:
        """Add a storage at rest, and return its slot. A storage that was added before gets the new name."""
        storage = tensor.untyped_storage()
        slot = self._slots.setdefault(storage._cdata, ~len(self.at_rest))
        self.at_rest[~slot : ~slot + 1] = [AtRest(storage.nbytes() if counts else None, kind, name)]
        self._tensors.append(tensor)
        return slot

    def _step_once(self, make: MakeOptimizer | None, *, foreach: bool) -> None:
        """Build the optimizer, and let a first step allocate its state."""
        shards = self.rehearsal.trained_on_device()
        if make is None or not shards:
            return
        with Watch(self._slots) as watch:
            self.optimizer, named = optimizer_at_rest(make, shards, foreach=foreach)
        names = {watch.record(tensor): name for name, tensor in reversed(named)}
        nbytes = {slot: size for slot, size in watch.taken() if size != FREED}
        for address, slot in watch.alive().items():
            self._slots[address] = ~len(self.at_rest)
            self.at_rest.append(AtRest(nbytes[slot], Holds.OPTIMIZER, names.get(slot, "all parameters")))

    def _inputs(self) -> Iterator[tuple[str, Any]]:
        timeline, others = self.traces.timeline, self.traces.others
        for proxy in self.traces.forward.args:
            if isinstance(proxy, NumberProxy):
                yield proxy.name, proxy.value
            elif path := timeline.inputs.get(proxy.name):
                tensor = self.rehearsal.params[path].rows
                yield proxy.name, Placed(self._slots[tensor.untyped_storage()._cdata], Layout.of(tensor))
            elif isinstance(proxy, TensorProxy):
                tensor, buffer = empty_like(proxy), others.get(proxy.name)
                slot = self._rest(tensor, Holds.BUFFER if buffer else Holds.INPUT, buffer or proxy.name)
                yield proxy.name, Placed(slot, Layout.of(tensor))

    def line(self, op: Compute | Defer, values: Sequence[Any]) -> Record:
        """Return the record of a line. ``values`` has what it reads: layouts of tensors, and other values."""
        line: Any = op.line if isinstance(op, Compute) else None
        if line is None:
            key: object = (Defer, op.params)
        elif line.sym.is_fusion:  # a region of another schedule may have the same lines
            key = (*map(id, line.subsymbols), *(proxy.name for proxy in line.flat_proxy_outs))
        elif operator_of(line) is None:
            key = id(line)
        else:
            key = _key_of_operator(line, values)
            if key not in OPERATORS:
                OPERATORS[key] = self._record(op, line, values)
            return OPERATORS[key]
        return self._once(key, lambda: (line, self._record(op, line, values)))[1]

    def _once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._records:
            self._records[key] = make()
        result: T = self._records[key]
        return result

    @torch.no_grad()
    def _record(self, op: Compute | Defer, line: Any, values: Sequence[Any]) -> Record:
        read = [value.fresh() if isinstance(value, Layout) else value for value in values]
        params = self._take_up(op)
        with Watch(self._slots, [*read, *(param.deferred for param in params)]) as watch:
            written: list[Any] = [None]
            if isinstance(op, Defer):
                self._runtime.defer(read[0], op.params[0])
            else:
                named = dict(zip(read_by(line), read, strict=True))
                self._run(line, named, watch)
                written = [named[name] for name in written_by(line)]
            events = watch.taken()
            outputs = tuple(map(watch.placed, written))
            held = {output.slot for output in outputs if isinstance(output, Placed)}
            kept = frozenset(slot for slot in watch.alive().values() if slot >= len(values) and slot not in held)
        self._put_down(op)
        return Record(events, outputs, kept)

    def _run(self, line: Any, values: dict[str, Any], watch: Watch) -> None:
        def subject() -> str:
            return f"memory: the line {line.python(indent=0, print_depth=1)[0]!r}"

        with tracectx(TraceCtx()), needs_no_values(subject, "measure the step instead"):
            if line.sym.is_fusion:
                run_region(line, values, watch.record)
            else:
                run_line(line, self._functions, values)

    def collective(self, launch: Launch, values: Sequence[Layout]) -> RecordedCollective:
        """Return the record of a launch and its wait. ``values`` are the layouts of what the launch reads."""
        key = type(launch), launch.over, launch.params
        return self._once(key, lambda: self._record_collective(launch, values))

    @torch.no_grad()
    def _record_collective(self, launch: Launch, values: Sequence[Layout]) -> RecordedCollective:
        runtime, paths, bucket = self._runtime, launch.params, [self.plan.by_name[path] for path in launch.params]
        if isinstance(launch, Gather):
            sent: list[Any] = [self.rehearsal.params[path].rows for path in paths]
            encodes, decodes = self.plan.encodes(*bucket), self.plan.decodes(*bucket)
            encode: Any = runtime.encode
            start: Any = runtime.all_gather
            decode: Any = runtime.decode
        else:
            sent, over = [value.fresh() for value in values], launch.over
            encodes, decodes = self.plan.encodes_gradient(over, *bucket), self.plan.decodes_gradient(over, *bucket)
            encode, start, decode = runtime.encode_grad, runtime.reduce, runtime.decode_grad
        params = self._take_up(launch)
        with Watch(self._slots, [*sent, *(param.deferred for param in params)]) as watch:
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
        self._put_down(launch)
        return RecordedCollective(tuple(launched), tuple(waited), outputs, lasting - kept, kept)

    def deferred_for(self, op: Compute | Defer | Launch) -> list[str]:
        """Return the paths of the deferred gradients that an operation adds to its own."""
        takes = isinstance(op, Defer) or (isinstance(op, Reduce) and op.over not in OF_MEANS)
        return [path for path in op.params if path in self.deferred] if takes else []

    def _take_up(self, op: Compute | Defer | Launch) -> list[ShardedParam]:
        """Defer the gradients that an operation takes, and return their parameters."""
        params = [self.rehearsal.params[path] for path in self.deferred_for(op)]
        for param in params:
            param.defer(_full_gradient(param))
        return params

    def _put_down(self, op: Compute | Defer | Launch) -> None:
        """Let the state forget what an operation left in it."""
        for path in op.params:
            param = self.rehearsal.params[path]
            if param.keeps:
                param.expire()
            if param.deferred is not None:
                param.take_deferred()

    def loss(self, layouts: Mapping[str, Any]) -> Record:
        """Return the record of the loss and its gradient. It reads the outputs of forward, whose layouts are keyed by
        name, and writes the tangents that backward takes."""
        return self._once("loss", lambda: self._record_loss(layouts))

    def _record_loss(self, layouts: Mapping[str, Any]) -> Record:
        outputs = {name: item.fresh() if isinstance(item, Layout) else item for name, item in layouts.items()}
        result = self.traces.forward.bound_symbols[-1].args[0]
        with Watch(self._slots, list(outputs.values())) as watch:
            returned = [filled(result["output"], outputs), list(filled(result["flat_output"], outputs))]
            outputs.clear()
            with self._around[0]:
                gradients = self._gradients(returned)
            events = watch.taken()
            return Record(events, tuple(map(watch.placed, gradients)))

    def _gradients(self, returned: list[Any]) -> list[Tensor]:
        """Return the gradients of forward's outputs, as autograd materializes them; uninitialized without a loss."""
        assert self.traces.backward is not None
        if self.of_loss is None:
            pairs = zip(returned.pop(), self.traces.backward.args[1], strict=True)
            returned.clear()
            return [torch.empty_like(tensor) for tensor, proxy in pairs if proxy is not None]
        proxies = [proxy for proxy in self.traces.backward.args[1] if proxy is not None]
        gradients = gradients_of_loss(self.traces, returned, self.of_loss)
        return [
            torch.zeros_like(empty_like(proxy)) if gradient is None else gradient
            for proxy, gradient in zip(proxies, gradients, strict=True)
        ]

    def optimizer_step(self) -> tuple[Event, ...]:
        """Return the events of the optimizer's step, without those of gradients."""
        return self._once(OPTIMIZER_STEP, self._record_optimizer)

    def _record_optimizer(self) -> tuple[Event, ...]:
        assert self.optimizer is not None, "there is a step to record"
        shards, params = self.rehearsal.trained_on_device(), self.rehearsal.params
        rows = {
            path: torch.empty(params[path].rows.shape, dtype=shards[path].dtype, device=META)
            for path, _ in self.traces.timeline.gradients
            if path in shards
        }
        with Watch(self._slots, list(rows.values())) as watch, self._around[1]:
            take_step(self.optimizer, {path: params[path].gradient(grad) for path, grad in rows.items()}, shards)
            events: tuple[Event, ...] = watch.taken()
        return events


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


def _full_gradient(param: ShardedParam) -> Tensor:
    return torch.empty(param.planned.shape, dtype=param.planned.reduce_dtype, device=META)


class _LossInput(torch.autograd.Function):
    """Makes a differentiable alias of an output. Autograd can compute its gradient after the alias is dropped."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, output: Tensor) -> Tensor:
        return output.detach()


def gradients_of_loss(traces: Traces, result: list[Any], loss: Loss) -> Sequence[Tensor | None]:
    """Return the loss's gradients with respect to the outputs that train; None for an output that it does not use.

    ``result`` has forward's outputs, nested and flat. It is emptied when training code would drop forward's result.
    """
    output, flat = result
    result.clear()
    assert traces.backward is not None
    proxies = traces.backward.args[1]  # a proxy is None if its output has no gradient
    root = torch.empty(0, device=META, requires_grad=True)
    with torch.enable_grad():
        inputs = {
            id(tensor): _LossInput.apply(root, tensor)  # type: ignore[no-untyped-call]
            if tensor.is_floating_point()
            else tensor
            for tensor in flat
            if isinstance(tensor, Tensor)
        }
    # The zip has no name of its own, since a named zip would keep its last output alive.
    edges = [
        get_gradient_edge(inputs[id(tensor)]) for tensor, proxy in zip(flat, proxies, strict=True) if proxy is not None
    ]
    output = tree_map(lambda leaf: inputs.get(id(leaf), leaf), output)
    inputs.clear()
    flat.clear()  # training code holds only ``output``
    output = output if traces.restored is None else traces.restored(output)  # None for outputs that are inputs
    value = call_loss(loss, output)
    del output
    return torch.autograd.grad(value, edges, allow_unused=True)


@torch.enable_grad()
def call_loss(loss: Loss, output: Any) -> Tensor:
    """Return the loss of a model's result, one number with a gradient. Raise if the loss reads a tensor's value."""
    action = "give one that reads no value (.item(), if, a boolean mask), or none"
    try:
        with needs_no_values(lambda: "the loss: it", action):
            value = loss(output)
    except TypeError as error:
        raise TypeError(
            f"loss= was called with what forward returns and raised {error}; give a function of that alone, such as "
            f"lambda output: F.cross_entropy(output, targets)"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        result = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"loss= returned {result}; return a tensor of one number that depends on what forward returns, and leave "
            f"backward() to the forecast"
        )
    return value
