"""Runs the lines of the traces on tensors without values, as a training step would.

The lines are those that will run, so they allocate, view and delete what the step will. Between the phases Thunder
hands forward's results to autograd, and what it saved to backward, which empties the lists that it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from thunder_zero.frontends.compiled import Traces
from thunder_zero.schedule.timeline import Kind, Op
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.tools.forecast.figures import OPTIMIZER_STEP, Holds
from thunder_zero.tools.forecast.regions import run_region
from thunder_zero.tools.forecast.rehearsal import Rehearsal, take_step
from thunder_zero.tools.forecast.watch import META, Watch, needs_no_values
from thunder_zero.tools.printing.line_meanings import label
from thunder_zero.traces.symbols import functions_of

from thunder.core import dtypes, prims
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

Loss = Callable[[Any], Tensor]
Context = AbstractContextManager[object]
NOT_RUN = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.COMMENT)
# What the storages hold that a line of this kind allocates, until it is known better.
DURING = {
    Kind.GATHER: Holds.IN_FLIGHT,
    Kind.REDUCE: Holds.IN_FLIGHT,
    Kind.WAIT: Holds.IN_FLIGHT,
    Kind.DEFER: Holds.DEFERRED,
}


class _Given(torch.autograd.Function):
    """An output of forward as the loss gets it. Its gradient can be asked for when nobody holds it any more."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, output: Tensor) -> Tensor:
        return output.detach()


@dataclass(frozen=True, slots=True)
class Printed:
    """A line of a trace as Python: its statement, also compiled, and the objects that it names."""

    position: int
    line: BoundSymbol
    code: str
    compiled: CodeType
    objects: dict[str, Any]


PRINTED: WeakKeyDictionary[TraceCtx, tuple[dict[str, Any], tuple[Printed, ...]]] = WeakKeyDictionary()


def printed(trace: TraceCtx) -> tuple[dict[str, Any], tuple[Printed, ...]]:
    """What the lines of a trace name, and those that run. Printing takes as long as running, and a plan runs the same
    lines on several meshes."""
    if trace not in PRINTED:
        context, lines = trace.python_ctx(), []
        with tracectx(trace):
            for position, line in enumerate(trace.bound_symbols[:-1]):
                if line.sym.id not in NOT_RUN:
                    code = "\n".join(line.python(indent=0, print_depth=1))
                    compiled = compile(code, "<line>", "exec")
                    lines.append(Printed(position, line, code, compiled, line.object_ctx()))
        PRINTED[trace] = context, tuple(lines)
    return PRINTED[trace]


@dataclass(frozen=True, slots=True)
class RunLine:
    """One line that ran.

    Attributes:
        phase: "forward", "loss", "backward" or "optimizer step".
        position: of a line of a trace: its position there; else -1.
        code: its Python statement.
        highest: the most bytes alive while it ran.
        events: allocations and frees until its end.
    """

    phase: str
    position: int
    code: str
    highest: int
    events: int


@dataclass
class Replay:
    """A step that runs line by line.

    Attributes:
        share: of the model, which the lines' calls are bound to.
        optimizer: steps the shards after backward; None if it is left out.
        gradients: those that backward returned, by the paths of their parameters.
        callers, modules: the inputs, which the caller holds until the optimizer's step; buffers of the module.
    """

    traces: Traces
    watch: Watch
    share: Rehearsal
    optimizer: torch.optim.Optimizer | None
    lines: list[RunLine] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    callers: list[Tensor] = field(default_factory=list)
    modules: list[Tensor] = field(default_factory=list)

    def step(self, loss: Loss | None) -> None:
        """Run forward and, if there is a backward, the loss and backward."""
        values = self._inputs()
        self.watch.begin()
        result, saved = self._forward(values)
        values.clear()
        if self.traces.backward is None:
            return
        cotangents = self._loss(result, loss)
        names = [name for name, _ in self.traces.backward.siginfo().args]
        values.update(zip(names, (self._taken(saved), cotangents), strict=True))
        saved.clear()
        self._run("backward", self.traces.backward, values)
        self.gradients = {path: values[name] for path, name in self.traces.timeline.gradients}

    def step_outside(self, loss: Loss | None, around: tuple[Context, Context]) -> None:
        """Run the loss and the optimizer's step alone, in these contexts; what phases return is made by its shape."""
        self.watch.begin()
        if self.traces.backward is None:
            return
        result = values_of_return(self.traces.forward)[0]
        with around[0]:
            self._loss([result["output"], result["flat_output"]], loss)
        values = _without_values(self.traces.backward)
        self.gradients = {path: values[name] for path, name in self.traces.timeline.gradients}
        with around[1]:
            self.step_optimizer()

    def step_optimizer(self) -> None:
        """Step the optimizer with the gradients that backward returned, if they are not deferred, and drop them. The
        caller drops the inputs before."""
        self.callers.clear()
        if self.optimizer is None or not self.gradients or not self.traces.synced:
            return
        self.watch.next_line()
        self.watch.kind = Holds.TEMPORARY
        on_device = self.share.trained_on_device()
        found = self.gradients.items()
        gradients = {path: self.share.gradient(grad, path) for path, grad in found if path in on_device}
        take_step(self.optimizer, gradients, on_device)
        self.gradients.clear()
        self._note(OPTIMIZER_STEP, -1, "optimizer.step()")

    def _inputs(self) -> dict[str, Any]:
        """The arguments of forward, by the names of their proxies. Lines delete them; who else holds them is noted."""
        timeline, others = self.traces.timeline, self.traces.others
        values: dict[str, Any] = {}
        for proxy in self.traces.forward.args:
            if isinstance(proxy, NumberProxy):
                values[proxy.name] = proxy.value
            elif path := timeline.inputs.get(proxy.name):
                values[proxy.name] = self.share.rows[path]
            elif isinstance(proxy, TensorProxy):
                is_buffer = proxy.name in others
                self.watch.kind = Holds.BUFFER if is_buffer else Holds.INPUT
                tensor = torch.empty(proxy.shape, dtype=dtypes.to_torch_dtype(proxy.dtype), device=META)
                self.watch.see(tensor).name = others.get(proxy.name, proxy.name)
                values[proxy.name] = tensor
                (self.modules if is_buffer else self.callers).append(tensor)
        return values

    def _forward(self, values: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """Run it; returns its outputs, as the epilogue gets them and flat, and the two lists for backward."""
        returned = self._run("forward", self.traces.forward, values)
        if self.traces.backward is None:
            return [], []
        result, (tensors, others) = returned
        for tensor in tensors:
            self._becomes(tensor, Holds.TEMPORARY, Holds.SAVED)
        return [result["output"], result["flat_output"]], [list(tensors), list(others)]

    def _taken(self, saved: list[list[Any]]) -> list[list[Any]]:
        """What backward takes of the two lists that forward has saved, in its order."""
        assert self.traces.backward is not None
        lists = self.traces.forward.bound_symbols[-1].args[1]
        by_name = {
            proxy.name: value
            for of, kept in zip(lists, saved, strict=True)
            for proxy, value in zip(of, kept, strict=True)
        }
        return [[by_name[proxy.name] for proxy in taken] for taken in self.traces.backward.args[0]]

    def _loss(self, result: list[Any], loss: Loss | None) -> list[Tensor | None]:
        """The gradients of forward's outputs: of the loss outside of the model, or of nobody knows what. Empties
        ``result`` as soon as the training code would have dropped it."""
        self.watch.next_line()
        self.watch.kind = Holds.LOSS
        output, flat = result
        result.clear()
        assert self.traces.backward is not None
        proxies = self.traces.backward.args[1]  # None: an output without a gradient
        for tensor in flat:
            self._becomes(tensor, Holds.TEMPORARY, Holds.LOSS)
        del tensor  # it would keep the last output alive
        given = given_to_loss(flat)
        # No name for the zip: it would keep its last output alive.
        trained = [given[id(tensor)] for tensor, proxy in zip(flat, proxies, strict=True) if proxy is not None]
        shapes = [(tensor.shape, tensor.dtype) for tensor in trained]
        gradients: Sequence[Tensor | None]
        if loss is None:
            gradients = [torch.empty_like(tensor) for tensor in trained]
        else:
            edges = [get_gradient_edge(tensor) for tensor in trained]
            output = tree_map(lambda leaf: given.get(id(leaf), leaf), output)
            given.clear()
            del flat, trained  # the training code holds the output alone
            value = value_of(loss, returned(self.traces, output))
            del output
            gradients = torch.autograd.grad(value, edges, allow_unused=True)
            del value
        # autograd gives zeros to an output that the loss does not use
        made = iter(
            [
                torch.zeros(shape, dtype=dtype, device=META) if gradient is None else gradient
                for (shape, dtype), gradient in zip(shapes, gradients, strict=True)
            ]
        )
        del gradients
        cotangents = [None if proxy is None else next(made) for proxy in proxies]
        self._note("loss", -1, "the loss and its gradient" if loss else "the gradients of the outputs")
        return cotangents

    @torch.no_grad()
    def _run(self, phase: str, trace: TraceCtx, values: dict[str, Any]) -> Any:
        """Run the lines of a phase; returns what it returns, and leaves its last values in ``values``."""
        names, lines = printed(trace)
        context = names | functions_of(ModelRuntime(self.share), self.traces.plan)
        ops = [op for op in self.traces.timeline.ops if op.backward is (phase == "backward")]
        by_line = {position: op for op in ops for position in op.source}
        with tracectx(trace):
            for line in lines:
                context.update(line.objects)  # printing names objects anew
                op = by_line.get(line.position)
                self.watch.next_line()
                self.watch.kind = DURING.get(op.kind, Holds.TEMPORARY) if op else Holds.TEMPORARY
                self._execute(line, context, values)
                if op is not None:
                    self._learn(op, line.position, values)
                self._note(phase, line.position, line.code)
        return _returns(trace, values)

    def _execute(self, line: Printed, context: dict[str, Any], values: dict[str, Any]) -> None:
        with needs_no_values(f"memory: the line {line.code.partition(chr(10))[0]!r}", "measure the step instead"):
            if line.line.sym.is_fusion:
                run_region(line.line, values, self.watch.see)
            else:
                exec(line.compiled, context, values)

    def _learn(self, op: Op, position: int, values: dict[str, Any]) -> None:
        """What storages hold, from the line that made or took them: a gradient is gone once it is encoded, and a
        parameter there once it is decoded."""
        if op.kind is Kind.COMPUTE:
            for name in op.writes:
                if isinstance(made := values.get(name), Tensor):
                    allocation = self.watch.see(made)
                    allocation.name = allocation.name or name
            return
        plan, timeline = self.traces.plan, self.traces.timeline
        if op.kind in (Kind.REDUCE, Kind.DEFER) and position == min(op.source) and not timeline.continues(op):
            for name, path in zip(op.reads, op.params, strict=True):
                self._becomes(values[name], Holds.TEMPORARY, Holds.FULL_GRADIENT, path)
        elif op.kind is Kind.WAIT and position == max(op.source) and not timeline.is_continued(op):
            is_gather = timeline.ends(op, Kind.GATHER)
            for name, path in zip(op.writes, op.params, strict=True):
                became = Holds.GATHERED if is_gather else Holds.REDUCED_GRADIENT
                self._becomes(values[name], Holds.IN_FLIGHT, became, path)
                if not is_gather and plan.rests_on_host(plan.by_name[path]):
                    self.watch.leaves(values[name])
        is_of_gradients = op.kind is Kind.REDUCE or timeline.ends(op, Kind.REDUCE)
        self.watch.name_new(label(op.params, plan, gradients=is_of_gradients))

    def _becomes(self, tensor: Any, was: Holds, now: Holds, path: str = "") -> None:
        if isinstance(tensor, Tensor) and (allocation := self.watch.see(tensor)).kind is was:
            allocation.kind = now
            allocation.name = path or allocation.name

    def _note(self, phase: str, position: int, code: str) -> None:
        self.lines.append(RunLine(phase, position, code, self.watch.highest_in_line, self.watch.events))


def given_to_loss(flat: Sequence[Any]) -> dict[int, Tensor]:
    """Forward's outputs as the loss gets them, by their identities."""
    root = torch.empty(0, device=META, requires_grad=True)
    with torch.enable_grad():
        return {
            id(each): _Given.apply(root, each) if each.is_floating_point() else each  # type: ignore[no-untyped-call]
            for each in flat
            if isinstance(each, Tensor)
        }


def returned(traces: Traces, output: Sequence[Any]) -> Any:
    """What the model returns, made of what the forward trace does; inputs that are handed on are left out."""
    epilogue = traces.epilogue
    if traces.restored is not None:
        return traces.restored(output)
    if epilogue is None:
        return output
    names = [proxy.name for proxy in epilogue.args]
    values = dict.fromkeys(names) | dict(zip(names[len(names) - len(output) :], output, strict=True))
    return epilogue.python_callable(include_decorators=False)(*values.values())


def values_of_return(trace: TraceCtx) -> Any:
    """What a trace returns, with tensors of its proxies' shapes."""
    return _returns(trace, _without_values(trace))


def _returns(trace: TraceCtx, values: Mapping[str, Any]) -> Any:
    result = trace.bound_symbols[-1].args
    return tree_map(
        lambda leaf: values[leaf.name] if isinstance(leaf, Proxy) else leaf, result[0] if len(result) == 1 else result
    )


def _without_values(trace: TraceCtx) -> dict[str, Any]:
    """What a trace returns, by name: tensors of its proxies' shapes."""
    return {
        proxy.name: torch.empty(proxy.shape, dtype=dtypes.to_torch_dtype(proxy.dtype), device=META)
        if isinstance(proxy, TensorProxy)
        else proxy.value
        for proxy in trace.bound_symbols[-1].flat_proxy_args
    }


@torch.enable_grad()
def value_of(loss: Loss, output: Any) -> Tensor:
    """Refuses a loss that reads a value, or is not one number with a gradient."""
    action = "give one that reads no value (.item(), if, a boolean mask), or none"
    try:
        with needs_no_values("the loss: it", action):
            value = loss(output)
    except TypeError as error:
        raise TypeError(
            f"loss= was called with what forward returns and raised {error}; give a function of that alone, such as "
            f"lambda output: F.cross_entropy(output, targets)"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"loss= returned {what}; return a tensor of one number that depends on what forward returns, and leave "
            f"backward() to the forecast"
        )
    return value
