"""CapturedForward: the forward of a sharded model, with the graphs that dynamo captured.

In: calls of the model. Out: the results of forward. Dynamo captures forward in the first call, and passes each graph to
``_capture``, which numbers the graph. When forward reaches a graph, ``_call(number, inputs)`` runs the graph::

    forward    | graph | Python without a graph | graph |  ->  output
                   |                                |
               _call(0, inputs)                 _call(1, inputs)         parameters among inputs are placeholders
                   |
               kept[0].programs[paths].run(other inputs)             GraphPrograms (programs.py), created at first use

Dynamo guards shapes and dtypes of parameters, not their identity. So one graph may run for several submodules. It has
GraphPrograms for each choice of parameters' paths. A function of torch that reads a parameter between graphs becomes a
graph (``placeholders.py``). Where dynamo compiles nothing, such a read raises, since no graph gathers the parameter.
Dynamo captures a function again when its guards fail. If shapes change, dynamo makes sizes symbols, so that one graph
serves all shapes. A function that branches on a size or a string has a graph for each value. At most ``MOST`` graphs
are kept for a function and a choice of parameters. Beyond this limit the least recently used graph is dropped with its
programs, and dynamo forgets the graph. A later call that needs the graph captures and compiles it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import fx, nn

from thunder_zero.capture.compilations import Shapes, metered, too_many, uncollected
from thunder_zero.capture.convert import returned_message, written_message
from thunder_zero.capture.graphs import (
    Graph,
    Paths,
    key_of_graph,
    paths_of,
    replaced_parameter,
    shapes_of_inputs,
    shared_memory,
)
from thunder_zero.capture.joint import joint_of, with_slices
from thunder_zero.capture.programs import Executable, GraphPrograms
from thunder_zero.capture.refusals import PARTS
from thunder_zero.compat import aot, dynamo
from thunder_zero.compat.packed_sequences import packed_as_operators
from thunder_zero.compat.uncapturable import require_traceable
from thunder_zero.sharded.placeholders import Placeholder, ValuesNeeded, path_of
from thunder_zero.sharded.reduce import tensors_in
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.sharded.state import State
from thunder_zero.traces.pipeline import telling_all_ranks

from thunder.common import CompileStats
from thunder.core.transform_common import Transform

MOST = 32  # graphs of one function with the same parameters


class CapturedForward:
    """The forward of a sharded model. Dynamo captures it in the first call.

    ``transforms`` are the user's other transforms. ``thunder.last_traces`` and ``thunder.cache_hits`` read ``stats``.
    """

    def __init__(
        self,
        plain: nn.Module,
        state: State,
        stats: CompileStats,
        *,
        dynamic: bool | None,
        fuses: bool,
        transforms: Sequence[Transform],
    ) -> None:
        self.plain, self.state, self.stats = plain, state, stats
        self.fuses, self.transforms = fuses, transforms
        self.kept: dict[int, Graph] = {}  # graphs by number, least recently used first
        self.names: dict[int, str] = {}  # by dynamo's numbers of functions, in the order of first compilations
        self.breaks: list[str] = []  # a sentence for each graph break, with the position and the reason
        self.graphs_run: list[GraphPrograms] = []  # those that the last forward ran, in order
        self.graph_count = self.program_count = 0  # captured, and compiled, so far
        self.warned = False  # True once the user was warned that graphs are dropped
        self.is_recurrent = any(isinstance(part, nn.RNNBase) for part in plain.modules())
        self.runtime = ModelRuntime(state)
        this = ref(self)  # dynamo keeps the backend and its results as long as the process lives

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            number = _alive(this)._capture(graph, inputs)
            return lambda *inputs: _alive(this)._call(number, inputs)

        self._captured = dynamo.capture(plain, backend, lambda: _alive(this)._compiling(), dynamic=dynamic)

    @property
    def ran(self) -> Sequence[Sequence[Executable]]:
        """The programs of each graph of the last forward. A graph's last program is the one that ran last."""
        return [[*programs.by_mode.values()] for programs in self.graphs_run]

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        with dynamo.capturing(self.breaks, (Placeholder,)), uncollected():
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count = self.program_count
        self.graphs_run.clear()
        if len(self.kept) > MOST:
            self._drop_oldest()
        try:
            with packed_as_operators() if self.is_recurrent else nullcontext():
                output = self._captured(*args, **kwargs)
        except ValuesNeeded as error:
            raise RuntimeError(_read_outside_message(self.plain, error, self.breaks)) from error
        except dynamo.NOT_TRACED as error:
            name, inner = type(self.plain).__name__, getattr(error, "inner_exception", None)
            if isinstance(inner, aot.Untraced):
                raise RuntimeError(f"cannot trace {name}: {inner}") from error
            sentence, cause = dynamo.failure(error, name, self.state.plan.mesh.tensor.size)
            raise RuntimeError(sentence) from cause
        for tensor in tensors_in(output):
            if (path := path_of(tensor)) is not None:  # dynamo captured no graph, and returned an input
                raise RuntimeError(returned_message(path))
        if len(self.graphs_run) == 1:
            self.graphs_run[0].note_returned(output)
            self._require_right_types(self.graphs_run[0])
        self._note_stats(self.program_count - count)
        return output

    def _require_right_types(self, programs: GraphPrograms) -> None:
        """Check once what the values of a sliced model are between ranks. The types of several graphs are unknown."""
        executable = next(reversed(programs.by_mode.values()))
        if self.state.plan.mesh.tensor.size == 1 or executable.is_checked or programs.joint.returns_subclasses:
            return
        from thunder_zero.spmd.of_trace import require_right_types  # imports what only sliced models need

        traces = executable.traces()
        with telling_all_ranks(traces.facts, traces.timeline):
            require_right_types(traces)
        executable.is_checked = True

    def _note_stats(self, compiled: int) -> None:
        stats = self.stats
        stats.calls += 1
        stats.cache_misses += compiled
        stats.cache_hits += not compiled
        stats.last_prologue_traces = ()  # dynamo's guards choose a program
        if self.graphs_run:
            last = self.ran[-1][-1]
            stats.last_computation = last.computation_fn
            stats.last_traces, stats.last_backward_traces = last.forward_traces, last.backward_traces

    def _drop_oldest(self) -> None:
        """Drop the oldest graphs of each function that has too many, and warn once."""
        kinds: dict[tuple[str, Paths], list[int]] = {}
        for number, captured in self.kept.items():
            kinds.setdefault((captured.name, captured.paths), []).append(number)
        for numbers in kinds.values():
            graphs = [self.kept[number] for number in numbers]
            if len(graphs) > MOST and not self.warned:
                self.warned = True
                name, reason = type(self.plain).__name__, graphs[-1].frame.reason()
                warnings.warn(too_many(name, len(graphs) - 1, [graph.shapes for graph in graphs], reason), stacklevel=2)
            for number in numbers[: max(0, len(numbers) - MOST)]:
                self.kept.pop(number).frame.forget()

    def shapes_by_kind(self) -> Iterable[Sequence[Shapes]]:
        """Return the input shapes of each function's graphs with the same parameters, with and without a backward."""
        shapes: dict[tuple[str, Paths, bool], list[Shapes]] = {}
        for captured in self.kept.values():
            if any(captured.paths):
                kind = captured.name, captured.paths, captured.joint.differentiates
                shapes.setdefault(kind, []).append(captured.shapes)
        return shapes.values()

    def _keep(self, captured: Graph) -> int:
        self.kept[self.graph_count] = captured
        self.graph_count += 1
        return self.graph_count - 1

    def _capture(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> int:
        """Trace the backward of a graph, unless an equal graph was captured before, and return the graph's number."""
        frame, paths, inputs = dynamo.CompiledFrame.now(), paths_of(inputs), with_slices(graph, inputs)
        name = self.names.setdefault(frame.function, f"graph {len(self.names)}")
        key, overlaps = key_of_graph(graph), shared_memory(inputs)
        for earlier in self.kept.values() if key is not None else ():
            is_equal = (earlier.key, earlier.name, earlier.overlaps) == (key, name, overlaps)
            if is_equal and (earlier.joint.differentiates or not torch.is_grad_enabled()):
                return self._keep(replace(earlier, frame=frame, paths=paths))
        if (path := replaced_parameter(graph, inputs)) is not None:
            raise aot.Untraced(written_message(path))
        with metered() as spent:
            joint = joint_of(graph, inputs, paths, self.state.plan)
        return self._keep(Graph(joint, frame, name, paths, key, overlaps, shapes_of_inputs(graph), spent()))

    def _call(self, number: int, inputs: Sequence[Any]) -> Any:
        self.kept[number] = captured = self.kept.pop(number)  # the most recently used one
        paths = paths_of(inputs)
        if captured.joint.mutated and shared_memory(inputs) != captured.overlaps:
            raise RuntimeError(
                f"{type(self.plain).__name__} writes to its inputs, which share memory in another way than in the "
                f"call that dynamo captured; give it copies, by clone()"
            )
        key = paths, self.state.plan.frozen
        if key not in captured.programs:
            require_traceable(self.plain, PARTS)
            args = captured.joint, paths, self.state, self.runtime, self.transforms, self.fuses
            captured.programs[key] = GraphPrograms(*args)
        programs = captured.programs[key]
        if programs.draws:
            self.state.same_batch.require_same_generators()
        self.graphs_run.append(programs)
        count = len(programs.by_mode)
        outputs = programs.run(inputs)
        self.program_count += len(programs.by_mode) - count
        return outputs


def _alive(forward: ref[CapturedForward]) -> CapturedForward:
    result = forward()
    assert result is not None, "the model is being called"
    return result


def _read_outside_message(module: nn.Module, error: ValuesNeeded, breaks: Sequence[str]) -> str:
    owner = module.get_submodule(error.path.rpartition(".")[0])
    reason = "dynamo did not capture this code (torch.compiler.disable, a dispatch mode, or a function that it skips)"
    reason = breaks[-1] if breaks else reason
    action = "move the read into code that dynamo captures, or put the parameter's module into Policy.ignored"
    if type(owner).__module__.startswith("transformers.") and type(owner).__name__.endswith("Experts"):
        action = "call set_experts_implementation('grouped_mm') of the plain model, whose experts are then one graph"
    return (
        f"{type(owner).__name__} reads parameter {error.path!r} outside of the graphs that dynamo captured of "
        f"{type(module).__name__}, where nothing gathers it; {reason}; {action}"
    )
