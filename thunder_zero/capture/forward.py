"""CapturedForward: the forward of a sharded model, with the graphs that dynamo captured.

In: calls of the model. Out: the results of forward. Dynamo captures forward in the first call, and passes each graph to
``_capture``, which numbers the graph. When forward reaches a graph, ``_call(number, inputs)`` runs the graph::

    forward    | graph | Python without a graph | graph |  ->  output
                   |                                |
               _call(0, inputs)                 _call(1, inputs)         parameters among inputs are placeholders
                   |
               captured[0].programs[paths].run(other inputs)             Programs (programs.py), created at first use

Dynamo guards shapes and dtypes of parameters, not their identity. So one graph may run for several submodules. It has
Programs for each choice of parameters' paths. A function of torch that reads a parameter between graphs becomes a graph
(``placeholders.py``). Where dynamo compiles nothing, such a read raises, since no graph gathers the parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import fx, nn

from thunder_zero.capture.compilations import metered, too_many, uncollected
from thunder_zero.capture.convert import returned_message, written_message
from thunder_zero.capture.graphs import (
    Captured,
    Graphs,
    key_of_graph,
    paths_of,
    replaced_parameter,
    shapes_of_inputs,
    shared_memory,
    with_slices,
)
from thunder_zero.capture.joint import joint_of
from thunder_zero.capture.programs import Entry, Programs
from thunder_zero.capture.refusals import PARTS
from thunder_zero.compat import aot, dynamo
from thunder_zero.compat.packed_sequences import packed_as_operators
from thunder_zero.compat.uncapturable import require_traceable
from thunder_zero.sharded.placeholders import Placeholder, ValuesNeeded
from thunder_zero.sharded.reduce import tensors_in
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.sharded.slices import path_of, require_unhooked
from thunder_zero.sharded.state import State

from thunder.common import CompileStats
from thunder.core.transform_common import Transform


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
        self.graphs, self.fuses, self.transforms = Graphs(), fuses, transforms
        self.is_recurrent = any(isinstance(part, nn.RNNBase) for part in plain.modules())
        self.runtime = ModelRuntime(state)
        this = ref(self)  # dynamo keeps the backend and its results as long as the process lives

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            number = _alive(this)._capture(graph, inputs)
            return lambda *inputs: _alive(this)._call(number, inputs)

        self._captured = dynamo.capture(plain, backend, lambda: _alive(this)._compiling(), dynamic=dynamic)

    @property
    def ran(self) -> Sequence[Sequence[Entry]]:
        """The programs of each graph of the last forward. A graph's last program is the one that ran last."""
        return [[*programs.entries.values()] for programs in self.graphs.ran]

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        with dynamo.capturing(self.graphs.breaks, (Placeholder,)), uncollected():
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count = self.graphs.program_count
        self.graphs.ran.clear()
        for dropped in self.graphs.drop_oldest():
            self._warn(dropped)
        try:
            with packed_as_operators() if self.is_recurrent else nullcontext():
                output = self._captured(*args, **kwargs)
        except ValuesNeeded as error:
            raise RuntimeError(_read_outside_message(self.plain, error, self.graphs.breaks)) from error
        except dynamo.NOT_TRACED as error:
            name, inner = type(self.plain).__name__, getattr(error, "inner_exception", None)
            if isinstance(inner, aot.Untraced):
                raise RuntimeError(f"cannot trace {name}: {inner}") from error
            sentence, cause = dynamo.failure(error, name, self.state.plan.mesh.tensor.size)
            raise RuntimeError(sentence) from cause
        if self.state.plan.mesh.is_sliced:
            require_unhooked(param.placeholder for param in self.state.params.values())
        for tensor in tensors_in(output):
            if (path := path_of(tensor)) is not None:  # dynamo captured no graph, and returned an input
                raise RuntimeError(returned_message(path))
        if len(self.graphs.ran) == 1:
            self.graphs.ran[0].note_returned(output)
        self._note_stats(self.graphs.program_count - count)
        return output

    def _note_stats(self, compiled: int) -> None:
        """Tell Thunder's functions about this call, in which ``compiled`` programs were compiled."""
        stats = self.stats
        stats.calls += 1
        stats.cache_misses += compiled
        stats.cache_hits += not compiled
        stats.last_prologue_traces = ()  # dynamo's guards choose a program
        if self.graphs.ran:
            last = self.ran[-1][-1]
            stats.last_computation = last.computation_fn
            stats.last_traces, stats.last_backward_traces = last.forward_traces, last.backward_traces

    def _warn(self, captured: Sequence[Captured]) -> None:
        if not self.graphs.warned:
            self.graphs.warned = True
            name, (*before, last) = type(self.plain).__name__, captured
            warnings.warn(
                too_many(name, len(before), [graph.shapes for graph in captured], last.frame.reason()), stacklevel=2
            )

    def _capture(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> int:
        """Trace the backward of a graph, unless an equal graph was captured before, and return the graph's number."""
        frame, paths, inputs = dynamo.CompiledFrame.now(), paths_of(inputs), with_slices(graph, inputs)
        name, key, overlaps = self.graphs.name_of(frame), key_of_graph(graph), shared_memory(inputs)
        for earlier in self.graphs.captured.values() if key is not None else ():
            is_equal = (earlier.key, earlier.name, earlier.overlaps) == (key, name, overlaps)
            if is_equal and (earlier.joint.differentiates or not torch.is_grad_enabled()):
                return self.graphs.keep(replace(earlier, frame=frame, paths=paths))
        if (path := replaced_parameter(graph, inputs)) is not None:
            raise aot.Untraced(written_message(path))
        with metered() as spent:
            joint = joint_of(graph, inputs, paths, self.state.plan)
        return self.graphs.keep(Captured(joint, frame, name, paths, key, overlaps, shapes_of_inputs(graph), spent()))

    def _call(self, number: int, inputs: Sequence[Any]) -> Any:
        captured, paths = self.graphs.use(number), paths_of(inputs)
        if captured.joint.mutated and shared_memory(inputs) != captured.overlaps:
            raise RuntimeError(
                f"{type(self.plain).__name__} writes to its inputs, which share memory in another way than in the "
                f"call that dynamo captured; give it copies, by clone()"
            )
        key = paths, self.state.plan.frozen
        if key not in captured.programs:
            require_traceable(self.plain, PARTS)
            args = captured.joint, paths, self.state, self.runtime, self.transforms, self.fuses
            captured.programs[key] = Programs(*args)
        programs = captured.programs[key]
        if programs.draws:
            self.state.same_batch.require_same_generators()
        self.graphs.ran.append(programs)
        count = len(programs.entries)
        outputs = programs.run(inputs)
        self.graphs.program_count += len(programs.entries) - count
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
