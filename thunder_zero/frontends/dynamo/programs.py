"""Compiles the programs of a graph, whose joint graph PyTorch traces once.

::

    joint graph        compat/aot/               forward and backward of torch's operators
      convert          convert.py                a joint trace: parameters are rows, gathered and reduced
      scheduled        traces/pipeline.py        the passes, and their proof
      compiled         traces/pipeline.py        two traces, proved and compared between ranks
      compiled         compat/aot/               one function, with PyTorch's own autograd, writes and aliases

A program reduces gradients or defers them (``no_sync``), or has no backward.
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
from thunder_zero.frontends.dynamo.captured import rebuilt, restoring
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
    """What chooses a program of a graph: whether it has a backward, and whether gradients are reduced."""

    differentiates: bool
    synced: bool


@dataclass(frozen=True, eq=False)
class GraphEntry(Entry):
    """A compiled program of a graph; ``run`` takes a list of inputs and rows."""

    run: Callable[[list[Any]], Sequence[Any]]
    spent: Callable[[], Spent]


@dataclass(eq=False)
class Programs:
    """The programs of one graph with one choice of parameters: ``paths``, by the positions of the graph's inputs. The
    program that ran last is the last entry."""

    joint: aot.Joint
    paths: Sequence[str | None]
    name: str  # of the model's class
    executor: ZeroExecutor
    fuses: bool
    state: State
    runtime: GraphRuntime
    entries: dict[Mode, GraphEntry] = field(default_factory=dict)
    restored: Callable[[Sequence[Any]], Any] | None = None  # makes what forward returns of what the trace does
    _outputs: Sequence[ref[Any] | None] = ()  # of the last call, until ``restored`` is known

    def __post_init__(self) -> None:
        self._named = [path for path in self.paths if path is not None]
        self.draws = draws(self.joint)

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """What the graph returns for inputs, by the program that this call needs."""
        records = torch.is_grad_enabled() or self.joint.turns_on
        mode = Mode(self.joint.differentiates and records, self.runtime.synced)
        entry = self.entries.pop(mode, None) or self._compile(mode)
        self.entries[mode] = entry
        shards = [self.state.shards[path] for path in self._named]
        with torch.set_grad_enabled(records):
            rows = iter(self.runtime.take_rows(shards, self._named) if shards else ())
            pairs = zip(inputs, self.paths, strict=True)
            outputs = entry.run([value if path is None else next(rows) for value, path in pairs])
        if cut := self.joint.without_history if records else range(len(outputs)):
            given = [value for value, path in zip(inputs, self.paths, strict=True) if path is None]
            outputs = [_without_history(each, given) if at in cut else each for at, each in enumerate(outputs)]
        if self.restored is None and not self.joint.returns_subclasses:
            self._outputs = [ref(output) if isinstance(output, Tensor) else None for output in outputs]
        return outputs

    def note_returned(self, returned: Any) -> None:
        """Note once how what forward returned is made of what this graph did, its only one; not of subclasses."""
        if self.restored is not None or self.joint.returns_subclasses:
            return
        tensors = [None if output is None else output() for output in self._outputs]
        markers = [object() for _ in tensors]
        marked = {id(each): marker for each, marker in zip(tensors, markers, strict=True) if each is not None}
        self.restored = restoring(rebuilt(returned, marked), markers, self.joint.plain_outputs())
        self._outputs = ()

    def _compile(self, mode: Mode) -> GraphEntry:
        with metered() as spent, uncollected():
            converted, program = program_of(self.joint, self.paths, self.executor, mode, fuses=self.fuses)
            phases = TracedPhases(converted, program, self.name, fuses=self.fuses)
            run = aot.compiled(self.joint, phases, self._look(mode))
        return GraphEntry(
            mode.synced,
            phases.computation_fn,
            lambda: Traces.of(phases.ran, restored=self.restored),
            run,
            lambda: spent() + phases.spent,
        )

    def _look(self, mode: Mode) -> Callable[[Node], None]:
        """Return what looks at each backward of a program."""
        accumulation = self.state.accumulation
        return lambda node: refuse_wrong_backward(node, self.name, accumulation, was_synced=mode.synced)


def program_of(
    joint: aot.Joint, paths: Sequence[str | None], executor: ZeroExecutor, mode: Mode, *, fuses: bool
) -> tuple[Converted, pipeline.Program]:
    """Return a graph as a joint trace, and the program of it that a mode needs."""
    with as_thunder_compiles():
        converted = convert(joint, paths, executor, backward=mode.differentiates, synced=mode.synced)
        return converted, pipeline.compile_program(pipeline.schedule_trace(converted.joint), phases_of(fuses=fuses))


def program_without(program: pipeline.Program, missing: Sequence[str], *, fuses: bool) -> pipeline.Program:
    """Return the program without gradients of outputs that nobody differentiated, by the names of those."""
    with as_thunder_compiles():
        made = pipeline.compile_program(drop_tangents(program.scheduled, missing), phases_of(fuses=fuses))
    return replace(made, forward=program.forward)


def traces_without(program: pipeline.Program, *, fuses: bool, **shown: Any) -> Traces:
    """Return the traces of a program, which can be asked for those that run without gradients of outputs."""

    def without(missing: Sequence[str]) -> Traces:
        return Traces.of(program_without(program, missing, fuses=fuses), **shown)

    return Traces.of(program, without=without, **shown)


def phases_of(*, fuses: bool) -> Callable[[TraceCtx], pipeline.TwoTraces]:
    """Return what makes the phases of a scheduled trace."""
    return (lambda trace: pipeline.make_phases(fuse_regions(trace))) if fuses else pipeline.make_phases


def as_thunder_compiles() -> Any:
    """Thunder's context of a compilation, with its default options."""
    return compile_data_and_stats(CompileData(fn=_nothing, disable_preprocessing=True), None)


def _nothing() -> None:
    """What Thunder takes for the function that is compiled."""


class _Backward(NamedTuple):
    """A backward as a function, and the positions of the saved tensors and numbers that it takes."""

    program: pipeline.Program
    run: Callable[..., Any]
    kept: Sequence[Sequence[int]]


class TracedPhases:
    """The traces of a program as the functions that AOTAutograd calls (:class:`thunder_zero.compat.aot.Phases`).

    ``ran`` is the program with the backward that ran last: of all tangents, or of those that were made. ``spent`` is
    what its backwards took, each of which is compiled when it is first needed.
    """

    def __init__(self, converted: Converted, program: pipeline.Program, module: str, *, fuses: bool) -> None:
        forward, backward = program.forward, program.backward
        result = forward.bound_symbols[-1].args
        self._saved: tuple[Sequence[Any], Sequence[Any]] = result[1] if backward is not None else ((), ())
        self.saved: Sequence[Any] = [converted.values[proxy.name] for proxy in (*self._saved[0], *self._saved[1])]
        self._tangents, self._constants = converted.tangents, list(converted.constants.values())
        self._returned, self._gradients = converted.outputs, converted.gradients
        self._outputs = len(result[0]["output"]) if backward is not None else 0
        self.ran, self._program, self._fuses, self._module = program, program, fuses, module
        self._fakes = fakes_of(converted) if fuses else None
        forward, made = self._compiled(forward, {})
        saved = (proxy.name for part in self._saved for proxy in part)
        self._made = {name: made[name] for name in saved if name in made}  # what backward is given looks like
        self.computation_fn = function_of(transform_to_torch_types(forward))
        self.spent = Spent()
        self._backward: dict[frozenset[int], _Backward] = {}  # those that ran, by the tangents that were missing

    def forward(self, args: list[Any]) -> list[Any]:
        """Compute the outputs, and what backward reads."""
        given = (*args, *self._constants)
        args.clear()
        result = self.computation_fn(*given)
        if self._program.backward is None:
            return list(result)
        data, (tensors, numbers) = result
        return [*data["output"][: self._returned], *tensors, *numbers]

    def backward(self, args: list[Any]) -> list[Any]:
        """Compute the gradients of the inputs."""
        count, saved = len(self._saved[1]), len(self.saved)
        numbers, tensors, tangents = args[:count], args[count:saved], args[saved:]
        args.clear()
        missing = frozenset(number for number, tangent in enumerate(tangents) if tangent is None)
        if missing not in self._backward:
            self._backward[missing] = self._written(missing)
        self.ran, run, kept = self._backward[missing]
        cotangents: list[Any] = [None] * self._outputs
        for position, _ in reversed(self._tangents):
            cotangents[position] = tangents.pop()  # held nowhere else: backward frees it after its last use
        given = [[tensors[position] for position in kept[0]], [numbers[position] for position in kept[1]]]
        tensors.clear()
        gradients = run(given, cotangents)
        return list(gradients[: self._gradients])

    def _written(self, missing: frozenset[int]) -> _Backward:
        """Return the backward for missing tangents; garbage waits, as while forward is compiled."""
        with metered() as spent, uncollected():
            names = [self._tangents[each][1] for each in missing]
            program = program_without(self._program, names, fuses=self._fuses) if missing else self._program
            assert program.backward is not None, "it returns what is left of the gradients"
            positions = [{proxy.name: at for at, proxy in enumerate(saved)} for saved in self._saved]
            taken = [proxy.name for proxy in proxies_in(program.backward.args[0])]
            kept = [[at[name] for name in taken if name in at] for at in positions]
            backward = _Backward(program, function_of(self._compiled(program.backward, self._made)[0]), kept)
        self.spent += spent()
        return backward

    def _compiled(self, trace: TraceCtx, before: Mapping[str, Any]) -> tuple[TraceCtx, Mapping[str, Any]]:
        """Return a phase with its regions compiled, and what its values look like, if that is known."""
        return (trace, {}) if self._fakes is None else with_kernels(trace, self._fakes, before, self._module)


def fakes_of(converted: Converted) -> Fakes:
    """Return what the values of a graph look like."""
    values = {**converted.values, **converted.constants}
    return Fakes(values, converted.parameters, converted.joint.facts.executor)


def _without_history(output: Any, inputs: Sequence[Any]) -> Any:
    """Return an output of forward alone as no_grad makes it: AOTAutograd runs with gradients on, whatever the mode. As
    there, a view of an input says that it requires a gradient if the input does."""
    if not isinstance(output, Tensor) or not output.requires_grad or any(output is value for value in inputs):
        return output
    bases = {id(value._base if value._is_view() else value) for value in inputs if isinstance(value, Tensor)}
    with torch.no_grad():
        return output.view_as(output) if output._is_view() and id(output._base) in bases else output.detach()


class GraphRuntime(ModelRuntime):
    """The functions that the traces of all graphs of one model call."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._at_end_of = -1  # the last backward that will reduce at its end, by autograd's number

    def reduce_deferred(self, paths: Sequence[str]) -> None:
        """Reduce the deferred gradients of parameters that no graph of this backward reaches, once it ends: until then
        nobody knows which those are."""
        backward = running_backward()
        if backward != self._at_end_of:
            self._at_end_of = backward
            at_end_of_backward(self._reduce_rest)

    def _reduce_rest(self) -> None:
        super().reduce_deferred([param.path for param in self._state.plan.params if param.requires_grad])
