"""Compiles the programs of a graph from the joint graph that PyTorch traced.

::

    trace              compat/aot/               a joint graph: forward and backward of torch's operators
    convert            convert.py                a trace of the plain module, which traces/ shards
    schedule           traces/pipeline.py        operations, whose passes are proved
    write              traces/pipeline.py        two traces, proved and compared between ranks
    compile            compat/aot/               a function with PyTorch's autograd, writes and aliases

A graph has up to three programs: for training steps, for ``no_sync`` (gradients are deferred), and without a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map

from thunder_zero.capture.compilations import Spent, metered, uncollected
from thunder_zero.capture.convert import Converted, convert
from thunder_zero.capture.joint import draws
from thunder_zero.compat import aot
from thunder_zero.compat.aot.joint import input_of
from thunder_zero.sharded.reduce import refuse_wrong_backward
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.sharded.state import State
from thunder_zero.traces import pipeline
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.foreign import require_own_lines
from thunder_zero.traces.function import function_of
from thunder_zero.traces.kernels import Fakes, with_kernels
from thunder_zero.traces.symbols import ZeroExecutor

from thunder.common import transform_to_torch_types
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform


@dataclass(frozen=True)
class Mode:
    """A key of a graph's programs: flags for programs with a backward, and for programs that reduce gradients."""

    differentiates: bool
    synced: bool


@dataclass(eq=False)
class Executable:
    synced: bool  # True if the program reduces gradients
    computation_fn: Callable[..., Any]  # the function of forward
    traces: Callable[[], Traces]  # a function that returns the traces of the last run
    run: Callable[[list[Any]], Sequence[Any]]  # a function of a list of inputs, with rows in place of parameters
    spent: Callable[[], Spent]  # a function that returns the cost of compiling the program so far
    # forward_traces, backward_traces: what ``thunder.last_traces`` and ``thunder.last_backward_traces`` return. The
    # last trace of each is the one that runs.
    forward_traces: Sequence[TraceCtx]
    backward_traces: Sequence[TraceCtx]
    is_checked: bool = False  # True if the types of its values were checked


@dataclass(eq=False)
class GraphPrograms:
    """The programs of one graph with one choice of parameters. The last one ran last.

    ``paths`` has, for each input of the graph, the path of a parameter or None.
    """

    joint: aot.Joint
    paths: Sequence[str | None]
    state: State
    runtime: ModelRuntime
    transforms: Sequence[Transform]  # the user's other transforms, for finished traces
    fuses: bool
    by_mode: dict[Mode, Executable] = field(default_factory=dict)
    restored: Callable[[Sequence[Any]], Any] | None = None  # builds forward's result from the trace's outputs
    _outputs: Sequence[ref[Any] | None] = ()  # the outputs of the last call, until ``restored`` is set

    def __post_init__(self) -> None:
        self._parameters = [path for path in self.paths if path is not None]
        self.draws = any(draws(node) or "rng" in str(node.target) for node in self.joint.graph.graph.nodes)
        self.executor = ZeroExecutor(self.state.plan, self.runtime)

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the program of this call's mode, compiled at its first use, and return the graph's outputs."""
        is_recording = torch.is_grad_enabled() or self.joint.turns_on
        mode = Mode(self.joint.differentiates and is_recording, self.state.synced)
        executable = self.by_mode.pop(mode, None) or self._compile(mode)
        self.by_mode[mode] = executable
        with torch.set_grad_enabled(is_recording):
            rows = iter(self.runtime.take_rows(self._parameters) if self._parameters else ())
            pairs = zip(inputs, self.paths, strict=True)
            outputs = executable.run([value if path is None else next(rows) for value, path in pairs])
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

    def _compile(self, mode: Mode) -> Executable:
        state, name = self.state, self.state.class_name
        takes_dtensors = self.joint.returns_subclasses

        def check(node: Node, tangents: Sequence[Any]) -> None:
            refuse_wrong_backward(node, () if takes_dtensors else tangents, name, state, was_synced=mode.synced)

        with metered() as spent, uncollected():
            with pipeline.thunder_context():
                converted = convert(self.joint, self.paths, backward=mode.differentiates)
            program = program_of(converted, self.executor, mode, fuses=self.fuses)
            phases = RunningPhases(converted, program, name, self.transforms)
            run = aot.compiled(self.joint, phases, check, materialize_grads=state.plan.policy.materialize_grads)
        return Executable(
            mode.synced,
            phases.computation_fn,
            lambda: replace(phases.ran, restored=self.restored),
            run,
            lambda: spent() + phases.spent,
            TraceList(lambda: [*self._joint_traces(mode), *phases.forward_traces]),
            TraceList(lambda: phases.backward_traces),
        )

    def _joint_traces(self, mode: Mode) -> list[TraceCtx]:
        with pipeline.thunder_context():
            plain = convert(self.joint, self.paths, backward=mode.differentiates)
            return [joint.trace for joint in pipeline.shard(plain.traced(self.executor, synced=mode.synced))]


def program_of(converted: Converted, executor: ZeroExecutor, mode: Mode, *, fuses: bool) -> Traces:
    with pipeline.thunder_context():
        lowered = pipeline.shard(converted.traced(executor, synced=mode.synced))[-1]
        return pipeline.write_program(pipeline.schedule(lowered), fuses=fuses)


@dataclass(frozen=True, eq=False)
class TraceList(Sequence[TraceCtx]):
    """Traces up to those that run, made whenever they are read, so that a model holds only those that run."""

    make: Callable[[], Sequence[TraceCtx]]

    def __getitem__(self, index: Any) -> Any:
        return self.make()[index]

    def __iter__(self) -> Iterator[TraceCtx]:
        return iter(self.make())  # once, not once for each index

    def __len__(self) -> int:
        return len(self.make())


class _Backward(NamedTuple):
    program: Traces
    run: Callable[..., Any]
    traces: Sequence[TraceCtx]


class RunningPhases:
    """The functions that AOTAutograd calls to run a program's traces (:class:`thunder_zero.compat.aot.Phases`).

    Each set of missing tangents has its own backward, compiled lazily. ``forward_traces`` and ``backward_traces`` have
    the phase, and the phase after each of the user's transforms. The last runs.
    """

    def __init__(
        self,
        converted: Converted,
        program: Traces,
        module: str,
        transforms: Sequence[Transform],
    ) -> None:
        forward, backward = program.forward, program.backward
        result = forward.bound_symbols[-1].args
        self._saved: tuple[Sequence[Any], Sequence[Any]] = result[1] if backward is not None else ((), ())
        values = fake_values(converted, program)
        self.saved: Sequence[Any] = [values[proxy.name] for proxy in (*self._saved[0], *self._saved[1])]
        self._tangents, self._constants = converted.tangents, list(converted.constants.values())
        self._plain_outputs, self._gradients = converted.outputs, converted.gradients  # counts for AOTAutograd
        self._outputs = len(result[0]["output"]) if backward is not None else 0
        self.ran = program  # the program whose backward ran last
        self._program, self._module = program, module
        self._values, self._parameters = values, converted.parameters
        forward, computed = self._compile_regions(forward, program, {})
        names = (proxy.name for part in self._saved for proxy in part)
        self._saved_values = {name: computed[name] for name in names if name in computed}
        self._transforms = transforms
        traces = self._transformed(forward, program)
        self.forward_traces = traces
        self.backward_traces: list[TraceCtx] = [] if backward is None else [backward]
        self.computation_fn = function_of(transform_to_torch_types(traces[-1]))
        self.spent = Spent()  # on backwards
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
        self.ran, run, self.backward_traces[:] = self._backward[missing]
        cotangents: list[Any] = [None] * self._outputs
        for position, _ in reversed(self._tangents):
            cotangents[position] = tangents.pop()  # the only reference: backward frees the tangent after its last use
        gradients = run([tensors, numbers], cotangents)  # which clears the lists
        return list(gradients[: self._gradients])

    def _compile_backward(self, missing: frozenset[int]) -> _Backward:
        with metered() as spent, uncollected():
            names = [self._tangents[position][1] for position in missing]
            program = self._program.without(names) if missing else self._program
            assert program.backward is not None, "it returns the remaining gradients"
            trace, _ = self._compile_regions(program.backward, program, self._saved_values)
            traces = self._transformed(trace, program)
            backward = _Backward(program, function_of(traces[-1]), traces)
        self.spent += spent()
        return backward

    def _transformed(self, trace: TraceCtx, program: Traces) -> list[TraceCtx]:
        traces, facts, timeline = [trace], program.facts, program.timeline
        for transform in self._transforms:
            with pipeline.thunder_context(), pipeline.telling_all_ranks(facts, timeline):
                result = transform.transform_trace_post_optimization(traces[-1], executors_list=[facts.executor])
                require_own_lines(traces[-1], result, timeline, facts.executor, type(transform).__name__)
            traces.append(result)
        return traces

    def _compile_regions(
        self, trace: TraceCtx, program: Traces, forward_values: Mapping[str, Any]
    ) -> tuple[TraceCtx, Mapping[str, Any]]:
        """Return a phase with compiled regions, and its fake values. If nothing is fused, there are no fake values."""
        if not program.fuses:
            return trace, {}
        full = {name: self._parameters[path] for name, path in program.timeline.full_parameters.items()}
        return with_kernels(trace, Fakes(self._values, full), forward_values, self._module)


def named_inputs(joint: aot.Joint, converted: Converted) -> dict[int, str]:
    """Return a mapping from positions of the graph's inputs to the names of the trace's inputs for them."""
    tangents = joint.tangents()
    nodes = [node for node in joint.placeholders() if node not in tangents]
    positions = [input_of(node) for node in nodes]
    names = [proxy.name for proxy in converted.trace.args]
    return {position: name for position, name in zip(positions, names, strict=False) if position is not None}


def fake_values(converted: Converted, program: Traces) -> dict[str, Any]:
    """Return the fake values of a program, keyed by name. Those of rows are the full parameters'."""
    parameters, inputs = converted.parameters, program.facts.inputs
    return {**converted.values, **converted.constants, **{name: parameters[path] for name, path in inputs.items()}}


def _without_history(output: Any, inputs: Sequence[Any]) -> Any:
    """Return an output as under ``no_grad``, since AOTAutograd runs with gradients on in all modes.

    As under ``no_grad``, a view of an input requires a gradient if the input does.
    """
    if not isinstance(output, Tensor) or not output.requires_grad or any(output is value for value in inputs):
        return output
    bases = {id(value._base if value._is_view() else value) for value in inputs if isinstance(value, Tensor)}
    with torch.no_grad():
        return output.view_as(output) if output._is_view() and id(output._base) in bases else output.detach()


def restoring(returned: Any, markers: Sequence[object], positions: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds the result of the module's forward from the outputs of the forward trace.

    ``returned`` is the result of forward with a marker in place of each output of the graph. ``positions`` has, for
    each marker, the position of its value among the trace's outputs.
    """
    position_of = dict(zip(map(id, markers), positions, strict=True))
    return lambda outputs: rebuild(returned, {marker: outputs[position] for marker, position in position_of.items()})


def rebuild(tree: Any, values: Mapping[int, Any]) -> Any:
    """Return a copy of a structure in which ``values`` replace leaves. ``values`` is keyed by the ids of leaves."""
    if is_dataclass(tree) and not isinstance(tree, type) and not isinstance(tree, Mapping):
        names = [field.name for field in fields(tree)]
        return replace(tree, **{name: rebuild(getattr(tree, name), values) for name in names})
    return tree_map(lambda leaf: values.get(id(leaf), leaf), tree)
