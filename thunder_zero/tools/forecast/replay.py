"""Runs the lines of the traces on meta tensors, as a training step would.

The same lines run as in the step, so allocations, views and deletions match the step::

    inputs -> forward lines -> outputs -> loss -> gradients of outputs -> backward lines -> gradients -> optimizer
                     \\______ saved values (two lists, of tensors and numbers) ____/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from thunder_zero.schedule.ops import Compute, Defer, Free, Gather, Op, Reduce, Wait, ends
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.tools.forecast.figures import OPTIMIZER_STEP, Holds
from thunder_zero.tools.forecast.lines import PythonLine, empty_like, python_lines, run_region
from thunder_zero.tools.forecast.rehearsal import Rehearsal, take_step
from thunder_zero.tools.forecast.watch import META, Watch, needs_no_values
from thunder_zero.tools.table.rows import label
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.symbols import functions_of

from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.trace import TraceCtx, tracectx

Loss = Callable[[Any], Tensor]
Context = AbstractContextManager[object]
# The initial label of storages that a line of this kind allocates. A later line may relabel them.
DURING = {
    "gather": Holds.IN_FLIGHT,
    "reduce": Holds.IN_FLIGHT,
    "wait": Holds.IN_FLIGHT,
    "defer": Holds.DEFERRED,
}


class _LossInput(torch.autograd.Function):
    """Makes a differentiable alias of an output. Autograd can compute its gradient after the alias is dropped."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, output: Tensor) -> Tensor:
        return output.detach()


@dataclass(frozen=True, slots=True)
class RunLine:
    """A line that ran."""

    phase: str  # "forward", "loss", "backward" or "optimizer step"
    position: int  # its position in the trace of its phase; -1 outside a trace
    code: str  # its Python statement
    highest: int  # the most bytes alive while the line ran
    events: int  # the number of allocations and frees until the line ended


@dataclass
class Replay:
    """A step that runs line by line."""

    traces: Traces
    watch: Watch
    rehearsal: Rehearsal  # the model's state, on which the collectives of lines run
    optimizer: torch.optim.Optimizer | None  # the optimizer that steps the shards after backward, if any
    # around_loss, around_optimizer: contexts in which the loss and the optimizer run
    around_loss: Context = field(default_factory=nullcontext)
    around_optimizer: Context = field(default_factory=nullcontext)
    lines: list[RunLine] = field(default_factory=list)  # the lines that ran
    # the gradients that backward returned, keyed by path of the parameter
    gradients: dict[str, Tensor] = field(default_factory=dict)
    # the inputs. Like a caller, the replay keeps the inputs alive until the optimizer's step.
    caller_inputs: list[Tensor] = field(default_factory=list)
    # the module's buffers. Like the module, the replay keeps the buffers alive.
    buffers: list[Tensor] = field(default_factory=list)

    def run_phases(self, loss: Loss | None) -> None:
        """Run forward and, if there is a backward, the loss and backward."""
        values = self._inputs()
        self.watch.begin_step()
        result, saved = self._run_forward(values)
        values.clear()
        if self.traces.backward is None:
            return
        cotangents = self._run_loss(result, loss)
        names = [name for name, _ in self.traces.backward.siginfo().args]
        values.update(zip(names, (self._saved_for_backward(saved), cotangents), strict=True))
        saved.clear()
        self._run_lines("backward", self.traces.backward, values)
        self.gradients = {path: values[name] for path, name in self.traces.timeline.gradients}

    def run_without_phases(self, loss: Loss | None) -> None:
        """Run only the loss and the optimizer's step, on meta outputs and gradients."""
        self.watch.begin_step()
        if self.traces.backward is None:
            return
        result = values_of_return(self.traces.forward)[0]
        self._run_loss([result["output"], result["flat_output"]], loss)
        values = _returned_values(self.traces.backward)
        self.gradients = {path: values[name] for path, name in self.traces.timeline.gradients}
        self.step_optimizer()

    def step_optimizer(self) -> None:
        """Drop the inputs, then step the optimizer and drop the gradients, unless they are deferred."""
        self.caller_inputs.clear()
        if self.optimizer is None or not self.gradients or not self.traces.facts.synced:
            return
        self.watch.begin_line()
        self.watch.kind = Holds.TEMPORARY
        shards = self.rehearsal.trained_on_device()
        returned = self.gradients.items()
        with self.around_optimizer:
            gradients = {path: self.rehearsal.params[path].gradient(grad) for path, grad in returned if path in shards}
            take_step(self.optimizer, gradients, shards)
        self.gradients.clear()
        self._end_line(OPTIMIZER_STEP, -1, "optimizer.step()")

    def _inputs(self) -> dict[str, Any]:
        """Return forward's arguments keyed by proxy name. The replay keeps inputs and buffers alive."""
        timeline, buffer_paths = self.traces.timeline, self.traces.others
        values: dict[str, Any] = {}
        for proxy in self.traces.forward.args:
            if isinstance(proxy, NumberProxy):
                values[proxy.name] = proxy.value
            elif path := timeline.inputs.get(proxy.name):
                values[proxy.name] = self.rehearsal.params[path].rows
            elif isinstance(proxy, TensorProxy):
                is_buffer = proxy.name in buffer_paths
                self.watch.kind = Holds.BUFFER if is_buffer else Holds.INPUT
                values[proxy.name] = tensor = empty_like(proxy)
                self.watch.record(tensor).name = buffer_paths.get(proxy.name, proxy.name)
                (self.buffers if is_buffer else self.caller_inputs).append(tensor)
        return values

    def _run_forward(self, values: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """Run forward. Return its outputs, nested and flat, and its two lists of saved values: tensors and numbers."""
        returned = self._run_lines("forward", self.traces.forward, values)
        if self.traces.backward is None:
            return [], []
        result, (tensors, numbers) = returned
        for tensor in tensors:
            self._relabel(tensor, Holds.TEMPORARY, Holds.SAVED)
        return [result["output"], result["flat_output"]], [list(tensors), list(numbers)]

    def _saved_for_backward(self, saved: list[list[Any]]) -> list[list[Any]]:
        """Reorder forward's two lists of saved values into the two lists that backward reads."""
        assert self.traces.backward is not None
        proxy_lists = self.traces.forward.bound_symbols[-1].args[1]
        by_name = {
            proxy.name: value
            for proxies, values in zip(proxy_lists, saved, strict=True)
            for proxy, value in zip(proxies, values, strict=True)
        }
        return [[by_name[proxy.name] for proxy in proxies] for proxies in self.traces.backward.args[0]]

    def _run_loss(self, result: list[Any], loss: Loss | None) -> list[Tensor | None]:
        """Return the loss's gradients with respect to forward's outputs; uninitialized gradients without a loss.

        ``result`` is emptied when training code would drop forward's result.
        """
        self.watch.begin_line()
        self.watch.kind = Holds.LOSS
        output, flat = result
        result.clear()
        assert self.traces.backward is not None
        proxies = self.traces.backward.args[1]  # a proxy is None if its output has no gradient
        for tensor in flat:
            self._relabel(tensor, Holds.TEMPORARY, Holds.LOSS)
        del tensor  # this name keeps the last output alive
        with self.around_loss:
            inputs = loss_inputs(flat)
            # The zip has no name of its own, since a named zip would keep its last output alive.
            trained = [inputs[id(tensor)] for tensor, proxy in zip(flat, proxies, strict=True) if proxy is not None]
            shapes = [(tensor.shape, tensor.dtype) for tensor in trained]
            gradients: Sequence[Tensor | None]
            if loss is None:
                gradients = [torch.empty_like(tensor) for tensor in trained]
            else:
                edges = [get_gradient_edge(tensor) for tensor in trained]
                output = tree_map(lambda leaf: inputs.get(id(leaf), leaf), output)
                inputs.clear()
                del flat, trained  # training code holds only ``output``
                value = call_loss(loss, restore_output(self.traces, output))
                del output
                gradients = torch.autograd.grad(value, edges, allow_unused=True)
                del value
            # an output that the loss does not use gets materialized zeros from autograd
            filled = iter(
                [
                    torch.zeros(shape, dtype=dtype, device=META) if gradient is None else gradient
                    for (shape, dtype), gradient in zip(shapes, gradients, strict=True)
                ]
            )
            del gradients
            cotangents = [None if proxy is None else next(filled) for proxy in proxies]
        self._end_line("loss", -1, "the loss and its gradient" if loss else "the gradients of the outputs")
        return cotangents

    @torch.no_grad()
    def _run_lines(self, phase: str, trace: TraceCtx, values: dict[str, Any]) -> Any:
        """Run a phase and return its results. Values that no line deletes stay in ``values``."""
        names, lines = python_lines(trace)
        context = names | functions_of(ModelRuntime(self.rehearsal), self.traces.plan)
        by_line = {
            position: (op, positions)
            for op, positions in zip(self.traces.timeline.ops, self.traces.lines, strict=True)
            if op.backward is (phase == "backward") and not isinstance(op, Free)
            for position in positions
        }
        with tracectx(trace):
            for line in lines:
                context.update(line.objects)  # printing has given the objects new names
                op, positions = by_line.get(line.position, (None, ()))
                self.watch.begin_line()
                self.watch.kind = DURING.get(op.kind, Holds.TEMPORARY) if op else Holds.TEMPORARY
                self._run_line(line, context, values)
                if op is not None:
                    self._label(op, line.position, positions, values)
                self._end_line(phase, line.position, line.code)
        return _returned(trace, values)

    def _run_line(self, line: PythonLine, context: dict[str, Any], values: dict[str, Any]) -> None:
        with needs_no_values(f"memory: the line {line.code.partition(chr(10))[0]!r}", "measure the step instead"):
            if line.line.sym.is_fusion:
                run_region(line.line, values, self.watch.record)
            else:
                exec(line.compiled, context, values)

    def _label(self, op: Op, position: int, positions: Sequence[int], values: dict[str, Any]) -> None:
        """Label the storages that one line of an operation allocated or read."""
        if isinstance(op, Compute):
            for name in op.writes:
                if isinstance(value := values.get(name), Tensor):
                    allocation = self.watch.record(value)
                    allocation.name = allocation.name or name
            return
        plan, timeline = self.traces.plan, self.traces.timeline
        # With an encoding, an operation has two lines: the first reads gradients, the last writes parameters.
        if isinstance(op, Reduce | Defer) and position == min(positions) and not timeline.is_second_reduction(op):
            for name, path in zip(op.reads, op.params, strict=True):
                self._relabel(values[name], Holds.TEMPORARY, Holds.FULL_GRADIENT, path)
        elif isinstance(op, Wait) and position == max(positions) and not timeline.feeds_reduction(op):
            is_gather = ends(op, Gather)
            for name, path in zip(op.writes, op.params, strict=True):
                new_kind = Holds.GATHERED if is_gather else Holds.REDUCED_GRADIENT
                self._relabel(values[name], Holds.IN_FLIGHT, new_kind, path)
                if not is_gather and plan.rests_on_host(plan.by_name[path]):
                    self.watch.stop_counting(values[name])
        is_of_gradients = isinstance(op, Reduce) or ends(op, Reduce)
        self.watch.name_new(label(op.params, plan, gradients=is_of_gradients))

    def _relabel(self, tensor: Any, old_kind: Holds, new_kind: Holds, path: str = "") -> None:
        if isinstance(tensor, Tensor) and (allocation := self.watch.record(tensor)).kind is old_kind:
            allocation.kind = new_kind
            allocation.name = path or allocation.name

    def _end_line(self, phase: str, position: int, code: str) -> None:
        self.lines.append(RunLine(phase, position, code, self.watch.highest_in_line, self.watch.events))


def loss_inputs(flat: Sequence[Any]) -> dict[int, Tensor]:
    """Return a mapping from the ``id`` of each forward output to a differentiable alias."""
    root = torch.empty(0, device=META, requires_grad=True)
    with torch.enable_grad():
        return {
            id(output): _LossInput.apply(root, output)  # type: ignore[no-untyped-call]
            if output.is_floating_point()
            else output
            for output in flat
            if isinstance(output, Tensor)
        }


def restore_output(traces: Traces, output: Sequence[Any]) -> Any:
    """Convert the forward trace's result to the model's result. Outputs that are inputs become None."""
    return output if traces.restored is None else traces.restored(output)


def values_of_return(trace: TraceCtx) -> Any:
    """Return the trace's result, with meta tensors in place of proxies."""
    return _returned(trace, _returned_values(trace))


def _returned(trace: TraceCtx, values: Mapping[str, Any]) -> Any:
    args = trace.bound_symbols[-1].args
    return tree_map(
        lambda leaf: values[leaf.name] if isinstance(leaf, Proxy) else leaf, args[0] if len(args) == 1 else args
    )


def _returned_values(trace: TraceCtx) -> dict[str, Any]:
    """Return a mapping from names of returned values to meta tensors."""
    return {proxy.name: empty_like(proxy) for proxy in trace.bound_symbols[-1].flat_proxy_args}


@torch.enable_grad()
def call_loss(loss: Loss, output: Any) -> Tensor:
    """Return the loss of a model's result, one number with a gradient. Raise if the loss reads a tensor's value."""
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
        result = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"loss= returned {result}; return a tensor of one number that depends on what forward returns, and leave "
            f"backward() to the forecast"
        )
    return value
