"""Compiles the programs of a graph from the joint graph that PyTorch traced.

::

    trace              compat/aot/               a joint graph: forward and backward of torch's operators
    convert            convert.py                a joint trace: takes rows, gathers them, reduces gradients
    schedule           traces/pipeline.py        a scheduled trace, whose passes are proved
    split              traces/pipeline.py        two traces, proved and compared between ranks
    compile            compat/aot/               a function with PyTorch's autograd, writes and aliases

A graph has up to three programs: for training steps, for ``no_sync`` (gradients are deferred), and without a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node

from thunder_zero.compat import aot
from thunder_zero.compat.torch.autograd import at_end_of_backward, running_backward
from thunder_zero.frontends.compilations import Spent, metered, uncollected
from thunder_zero.frontends.compiled import Entry, Traces
from thunder_zero.frontends.dynamo.captured import rebuild, restoring
from thunder_zero.frontends.dynamo.convert import Converted, convert
from thunder_zero.frontends.dynamo.kernels import Fakes, with_kernels
from thunder_zero.frontends.dynamo.random_slices import draws
from thunder_zero.sharded.accumulation import refuse_wrong_backward
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.sharded.state import State
from thunder_zero.traces import pipeline
from thunder_zero.traces.fuse import fuse_regions
from thunder_zero.traces.lift import proxies_in
from thunder_zero.traces.missing_tangents import drop_tangents
from thunder_zero.traces.symbols import ZeroExecutor
from thunder_zero.traces.write import function_of

from thunder.common import CompileData, transform_to_torch_types
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.trace import TraceCtx


@dataclass(frozen=True)
class Mode:
    """A key of a graph's programs: flags for programs with a backward, and for programs that reduce gradients."""

    differentiates: bool
    synced: bool


@dataclass(frozen=True, eq=False)
class GraphEntry(Entry):
    """A compiled program of a graph. ``run`` takes a list of inputs, with rows in place of parameters."""

    run: Callable[[list[Any]], Sequence[Any]]
    spent: Callable[[], Spent]


@dataclass(eq=False)
class Programs:
    """The programs of one graph with one choice of parameters. The last entry is the program that ran last.

    ``paths`` has, for each input of the graph, the path of a parameter or None.
    """

    joint: aot.Joint
    paths: Sequence[str | None]
    name: str  # the name of the model's class
    executor: ZeroExecutor
    fuses: bool
    state: State
    runtime: GraphRuntime
    entries: dict[Mode, GraphEntry] = field(default_factory=dict)
    restored: Callable[[Sequence[Any]], Any] | None = None  # builds forward's result from the trace's outputs
    _outputs: Sequence[ref[Any] | None] = ()  # the outputs of the last call, until ``restored`` is set

    def __post_init__(self) -> None:
        self._parameters = [path for path in self.paths if path is not None]
        self.draws = draws(self.joint)

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the program of this call's mode, compiled at its first use, and return the graph's outputs."""
        is_recording = torch.is_grad_enabled() or self.joint.turns_on
        mode = Mode(self.joint.differentiates and is_recording, self.runtime.synced)
        entry = self.entries.pop(mode, None) or self._compile(mode)
        self.entries[mode] = entry
        shards = [self.state.shards[path] for path in self._parameters]
        with torch.set_grad_enabled(is_recording):
            rows = iter(self.runtime.take_rows(shards, self._parameters) if shards else ())
            pairs = zip(inputs, self.paths, strict=True)
            outputs = entry.run([value if path is None else next(rows) for value, path in pairs])
        if detached := self.joint.without_history if is_recording else range(len(outputs)):
            other_inputs = [value for value, path in zip(inputs, self.paths, strict=True) if path is None]
            outputs = [
                _without_history(output, other_inputs) if position in detached else output
                for position, output in enumerate(outputs)
            ]
        if self.restored is None and not self.joint.returns_subclasses:
            self._outputs = [ref(output) if isinstance(output, Tensor) else None for output in outputs]
        return outputs

    def note_returned(self, returned: Any) -> None:
        """Record, once, how the result of forward is built from the outputs of its only graph.

        Nothing is recorded if an output is a tensor subclass.
        """
        if self.restored is not None or self.joint.returns_subclasses:
            return
        tensors = [None if output is None else output() for output in self._outputs]
        markers = [object() for _ in tensors]
        marker_of = {id(tensor): marker for tensor, marker in zip(tensors, markers, strict=True) if tensor is not None}
        self.restored = restoring(rebuild(returned, marker_of), markers, self.joint.plain_outputs())
        self._outputs = ()

    def _compile(self, mode: Mode) -> GraphEntry:
        with metered() as spent, uncollected():
            converted, program = program_of(self.joint, self.paths, self.executor, mode, fuses=self.fuses)
            phases = TracedPhases(converted, program, self.name, fuses=self.fuses)
            run = aot.compiled(self.joint, phases, self._check_backward(mode))
        return GraphEntry(
            mode.synced,
            phases.computation_fn,
            lambda: Traces.of(phases.ran, restored=self.restored),
            run,
            lambda: spent() + phases.spent,
        )

    def _check_backward(self, mode: Mode) -> Callable[[Node, Sequence[Any]], None]:
        """Return a check that runs at the start of each backward of a program."""
        accumulation, takes_dtensors = self.state.accumulation, self.joint.returns_subclasses

        def check(node: Node, tangents: Sequence[Any]) -> None:
            plain = () if takes_dtensors else tangents
            refuse_wrong_backward(node, plain, self.name, accumulation, was_synced=mode.synced)

        return check


def program_of(
    joint: aot.Joint, paths: Sequence[str | None], executor: ZeroExecutor, mode: Mode, *, fuses: bool
) -> tuple[Converted, pipeline.Program]:
    """Convert a joint graph to a joint trace, compile the trace for a mode, and return the trace and the program."""
    with thunder_context():
        converted = convert(joint, paths, executor, backward=mode.differentiates, synced=mode.synced)
        return converted, pipeline.compile_program(pipeline.schedule_trace(converted.joint), phases_of(fuses=fuses))


def program_without(program: pipeline.Program, missing: Sequence[str], *, fuses: bool) -> pipeline.Program:
    """Return a program whose backward does not take the output gradients that ``missing`` names."""
    with thunder_context():
        pruned = pipeline.compile_program(drop_tangents(program.scheduled, missing), phases_of(fuses=fuses))
    return replace(pruned, forward=program.forward)


def traces_without(program: pipeline.Program, *, fuses: bool, **other_fields: Any) -> Traces:
    """Return the traces of a program, with the function ``Traces.without``."""

    def without(missing: Sequence[str]) -> Traces:
        return Traces.of(program_without(program, missing, fuses=fuses), **other_fields)

    return Traces.of(program, without=without, **other_fields)


def phases_of(*, fuses: bool) -> Callable[[TraceCtx], pipeline.TwoTraces]:
    """Return a function that splits a scheduled trace into phases. If ``fuses``, the function also fuses regions."""
    return (lambda trace: pipeline.make_phases(fuse_regions(trace))) if fuses else pipeline.make_phases


def thunder_context() -> Any:
    """Return Thunder's context of a compilation, with default options."""
    return compile_data_and_stats(CompileData(fn=_nothing, disable_preprocessing=True), None)


def _nothing() -> None:
    """Do nothing: Thunder's context needs a function."""


class _Backward(NamedTuple):
    """A backward: the function, and the positions of the saved tensors and saved numbers that the function takes."""

    program: pipeline.Program
    run: Callable[..., Any]
    positions: Sequence[Sequence[int]]


class TracedPhases:
    """The functions that AOTAutograd calls to run a program's traces (:class:`thunder_zero.compat.aot.Phases`).

    Each set of missing tangents has its own backward, compiled lazily.

    Attributes:
        saved: the fakes of the values that forward saves.
        ran: the program whose backward ran last.
        computation_fn: the function of forward.
        spent: the cost of compiling backwards.
    """

    def __init__(self, converted: Converted, program: pipeline.Program, module: str, *, fuses: bool) -> None:
        forward, backward = program.forward, program.backward
        result = forward.bound_symbols[-1].args
        self._saved: tuple[Sequence[Any], Sequence[Any]] = result[1] if backward is not None else ((), ())
        self.saved: Sequence[Any] = [converted.values[proxy.name] for proxy in (*self._saved[0], *self._saved[1])]
        self._tangents, self._constants = converted.tangents, list(converted.constants.values())
        self._plain_outputs, self._gradients = converted.outputs, converted.gradients  # counts for AOTAutograd
        self._outputs = len(result[0]["output"]) if backward is not None else 0
        self.ran, self._program, self._fuses, self._module = program, program, fuses, module
        self._fakes = fakes_of(converted) if fuses else None
        forward, values = self._compile_regions(forward, {})
        names = (proxy.name for part in self._saved for proxy in part)
        self._saved_values = {name: values[name] for name in names if name in values}
        self.computation_fn = function_of(transform_to_torch_types(forward))
        self.spent = Spent()
        self._backward: dict[frozenset[int], _Backward] = {}  # positions of missing tangents: backward

    def forward(self, args: list[Any]) -> list[Any]:
        """Return the outputs and the values that backward reads, and clear ``args``."""
        inputs = (*args, *self._constants)
        args.clear()
        result = self.computation_fn(*inputs)
        if self._program.backward is None:
            return list(result)
        data, (tensors, numbers) = result
        return [*data["output"][: self._plain_outputs], *tensors, *numbers]

    def backward(self, args: list[Any]) -> list[Any]:
        """Return the gradients of the inputs, and clear ``args``."""
        count, saved = len(self._saved[1]), len(self.saved)
        numbers, tensors, tangents = args[:count], args[count:saved], args[saved:]
        args.clear()
        missing = frozenset(number for number, tangent in enumerate(tangents) if tangent is None)
        if missing not in self._backward:
            self._backward[missing] = self._compile_backward(missing)
        self.ran, run, (tensor_positions, number_positions) = self._backward[missing]
        cotangents: list[Any] = [None] * self._outputs
        for position, _ in reversed(self._tangents):
            cotangents[position] = tangents.pop()  # the only reference: backward frees the tangent after its last use
        saved_values = [[tensors[index] for index in tensor_positions], [numbers[index] for index in number_positions]]
        tensors.clear()
        gradients = run(saved_values, cotangents)
        return list(gradients[: self._gradients])

    def _compile_backward(self, missing: frozenset[int]) -> _Backward:
        """Return the backward for missing tangents."""
        with metered() as spent, uncollected():
            names = [self._tangents[position][1] for position in missing]
            program = program_without(self._program, names, fuses=self._fuses) if missing else self._program
            assert program.backward is not None, "it returns the remaining gradients"
            position_of = [{proxy.name: index for index, proxy in enumerate(saved)} for saved in self._saved]
            input_names = [proxy.name for proxy in proxies_in(program.backward.args[0])]
            positions = [[indices[name] for name in input_names if name in indices] for indices in position_of]
            trace, _ = self._compile_regions(program.backward, self._saved_values)
            backward = _Backward(program, function_of(trace), positions)
        self.spent += spent()
        return backward

    def _compile_regions(
        self, trace: TraceCtx, forward_values: Mapping[str, Any]
    ) -> tuple[TraceCtx, Mapping[str, Any]]:
        """Return a phase with compiled regions, and its fake values. If nothing is fused, there are no fake values."""
        return (trace, {}) if self._fakes is None else with_kernels(trace, self._fakes, forward_values, self._module)


def fakes_of(converted: Converted) -> Fakes:
    """Return the fake values of a graph."""
    values = {**converted.values, **converted.constants}
    return Fakes(values, converted.parameters, converted.joint.facts.executor)


def _without_history(output: Any, inputs: Sequence[Any]) -> Any:
    """Return an output as under ``no_grad``, since AOTAutograd runs with gradients on in all modes.

    As under ``no_grad``, a view of an input requires a gradient if the input does.
    """
    if not isinstance(output, Tensor) or not output.requires_grad or any(output is value for value in inputs):
        return output
    bases = {id(value._base if value._is_view() else value) for value in inputs if isinstance(value, Tensor)}
    with torch.no_grad():
        return output.view_as(output) if output._is_view() and id(output._base) in bases else output.detach()


class GraphRuntime(ModelRuntime):
    """The functions that the traces of all graphs of one model call."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._at_end_of = -1  # autograd's number of the last backward with a reduction at its end

    def reduce_deferred(self, paths: Sequence[str]) -> None:
        """Reduce the deferred gradients of all parameters at the end of this backward.

        Only at the end is it known which parameters this backward has reached.
        """
        backward = running_backward()
        if backward != self._at_end_of:
            self._at_end_of = backward
            at_end_of_backward(self._reduce_all_deferred)

    def _reduce_all_deferred(self) -> None:
        super().reduce_deferred([param.path for param in self._state.plan.params if param.requires_grad])
