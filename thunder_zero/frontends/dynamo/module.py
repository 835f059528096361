"""DynamoModule: the sharded model that ``tz.compile`` returns, with its graphs.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from thunder_zero.compat import aot, dynamo
from thunder_zero.compat.packed_sequences import packed_as_operators
from thunder_zero.compat.uncapturable import require_traceable
from thunder_zero.frontends.compilations import Shapes, metered, too_many, uncollected
from thunder_zero.frontends.compiled import Entry
from thunder_zero.frontends.dynamo.captured import (
    key_of_graph,
    paths_of,
    replaced_parameter,
    shapes_of_inputs,
    shared_memory,
    with_slices,
)
from thunder_zero.frontends.dynamo.checkpoints import joint_of
from thunder_zero.frontends.dynamo.convert import returned_message, written_message
from thunder_zero.frontends.dynamo.graphs import Captured, GradMode, Graphs
from thunder_zero.frontends.dynamo.programs import GraphRuntime, Programs
from thunder_zero.frontends.refusals import PARTS
from thunder_zero.frontends.zero_module import ZeroModule
from thunder_zero.sharded.accumulation import tensors_in
from thunder_zero.sharded.placeholders import Placeholder, ValuesNeeded
from thunder_zero.sharded.slices import path_of, require_unhooked
from thunder_zero.traces.symbols import ZeroExecutor

from thunder.core.module import ThunderModule


class DynamoModule(ZeroModule):
    """A sharded model whose forward dynamo captures."""

    _runtime: GraphRuntime
    _graphs: Graphs
    _fuses: bool
    _is_recurrent: bool

    def capture(self, *, dynamic: bool | None, fuses: bool) -> None:
        """Prepare the model so that dynamo captures forward in the first call.

        ``dynamic`` is the argument of ``torch.compile``. If ``fuses`` is True, inductor compiles the regions
        between lines of the schedule.
        """
        self._fuses = fuses
        self._is_recurrent = any(isinstance(part, nn.RNNBase) for part in self.plain.modules())
        self._runtime, self._graphs = GraphRuntime(self.state), Graphs()
        model = ref(self)  # dynamo keeps the backend and its results as long as the process lives

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            number = _alive(model)._capture(graph, inputs)
            return lambda *inputs: _alive(model)._call(number, inputs)

        captured = dynamo.capture(self.plain, backend, lambda: _alive(model)._compiling(), dynamic=dynamic)
        self._forward_fn = lambda *args, **kwargs: captured(*args, **kwargs)  # a module would become a submodule

    def graphs(self) -> Sequence[Sequence[Entry]]:
        """Return the programs of each graph of the last forward. A graph's last program is the one that ran last."""
        return [[*programs.entries.values()] for programs in self._graphs.ran]

    def _count_programs(self) -> int:
        return self._graphs.program_count

    def _list_shapes(self) -> Iterable[Sequence[Shapes]]:
        return self._graphs.shapes_by_kind()

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Change dynamo's settings and disable garbage collection while dynamo captures inside the block."""
        with dynamo.capturing(self._graphs.breaks, (Placeholder,)), uncollected():
            yield

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._graphs.ran.clear()
        for dropped in self._graphs.drop_oldest():
            self._warn(dropped)
        try:
            with packed_as_operators() if self._is_recurrent else nullcontext():
                output = self._captured(*args, **kwargs)
        except ValuesNeeded as error:
            raise RuntimeError(_read_outside_message(self.plain, error, self._graphs.breaks)) from error
        except dynamo.NOT_TRACED as error:
            name, inner = type(self.plain).__name__, getattr(error, "inner_exception", None)
            if isinstance(inner, aot.Untraced):
                raise RuntimeError(f"cannot trace {name}: {inner}") from error
            sentence, cause = dynamo.failure(error, name, self.state.plan.mesh.tensor.size)
            raise RuntimeError(sentence) from cause
        if self.state.plan.mesh.is_sliced:
            require_unhooked(self.state.placeholders)
        for tensor in tensors_in(output):
            if (path := path_of(tensor)) is not None:  # dynamo captured no graph, and returned an input
                raise RuntimeError(returned_message(path))
        if len(self._graphs.ran) == 1:
            self._graphs.ran[0].note_returned(output)
        return output

    def _warn(self, captured: Sequence[Captured]) -> None:
        """Warn once that graphs of one function are dropped, and say what to do."""
        if not self._graphs.warned:
            self._graphs.warned = True
            name, (*before, last) = type(self.plain).__name__, captured
            warnings.warn(
                too_many(name, len(before), [graph.shapes for graph in captured], last.frame.reason()), stacklevel=2
            )

    def _captured(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that dynamo captured.

        A call without gradients uses the training graph if this graph is valid in all grad modes. Dynamo guards the
        grad mode, so gradients are on while dynamo looks up a graph. The program runs in the user's mode.
        """
        user_mode, graphs = GradMode.now(), self._graphs
        if user_mode == GradMode() or not graphs.for_all_modes or any(map(_is_inference, tree_leaves((args, kwargs)))):
            return self._forward_fn(*args, **kwargs)
        graphs.user_mode = user_mode
        try:
            with GradMode().entered(), dynamo.without_compiling():
                return self._forward_fn(*args, **kwargs)
        except Exception:
            if graphs.ran:
                raise
        finally:
            graphs.user_mode = None
        graphs.user_mode = user_mode
        try:  # dynamo has no training graph: it captures one graph for no_grad and inference mode
            with GradMode(enabled=False).entered():
                return self._forward_fn(*args, **kwargs)
        finally:
            graphs.user_mode = None

    def _capture(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> int:
        """Trace the backward of a graph, unless an equal graph was captured before, and return the graph's number."""
        is_for_all = dynamo.is_for_all_modes(graph, type(self.plain).forward)
        if GradMode.now() == GradMode() or not is_for_all:
            self._graphs.for_all_modes = is_for_all and self._graphs.for_all_modes is not False
        frame, paths, inputs = dynamo.CompiledFrame.now(), paths_of(inputs), with_slices(graph, inputs)
        name, key, overlaps = self._graphs.name_of(frame), key_of_graph(graph), shared_memory(inputs)
        for earlier in self._graphs.captured.values() if key is not None else ():
            is_equal = (earlier.key, earlier.name, earlier.overlaps) == (key, name, overlaps)
            if is_equal and (earlier.joint.differentiates or not torch.is_grad_enabled()):
                return self._graphs.keep(replace(earlier, frame=frame, paths=paths))
        if (path := replaced_parameter(graph, inputs)) is not None:
            raise aot.Untraced(written_message(path))
        with metered() as spent:
            joint = joint_of(graph, inputs, paths, self.state.plan)
        return self._graphs.keep(Captured(joint, frame, name, paths, key, overlaps, shapes_of_inputs(graph), spent()))

    def _call(self, number: int, inputs: Sequence[Any]) -> Any:
        """Run a graph, in the user's grad mode."""
        with nullcontext() if self._graphs.user_mode is None else self._graphs.user_mode.entered():
            captured, paths = self._graphs.use(number), paths_of(inputs)
            if captured.joint.mutated and shared_memory(inputs) != captured.overlaps:
                raise RuntimeError(
                    f"{type(self.plain).__name__} writes to its inputs, which share memory in another way than in the "
                    f"call that dynamo captured; give it copies, by clone()"
                )
            key = paths, self.state.frozen
            if key not in captured.programs:
                require_traceable(self.plain, PARTS)
                executor = ZeroExecutor(self.state.plan, self._runtime)
                name, joint = type(self.plain).__name__, captured.joint
                captured.programs[key] = Programs(joint, paths, name, executor, self._fuses, self.state, self._runtime)
            programs = captured.programs[key]
            if programs.draws:
                self.state.same_batch.require_same_generators()
            self._graphs.ran.append(programs)
            count = len(programs.entries)
            outputs = programs.run(inputs)
            self._graphs.program_count += len(programs.entries) - count
            return outputs


def graphs_of(model: ThunderModule) -> Graphs:
    """Return the graphs of a model of ``tz.compile``.

    Raises:
        TypeError: ``model`` is not a model of ``tz.compile``.
    """
    if not isinstance(model, DynamoModule):
        raise TypeError(
            f"programs takes a model of thunder_zero.compile, got {type(model).__name__}; thunder.compile_stats(model) "
            f"has those of thunder.jit"
        )
    return model._graphs


def _alive(model: ref[DynamoModule]) -> DynamoModule:
    result = model()
    assert result is not None, "the model is being called"
    return result


def _is_inference(value: Any) -> bool:
    """Return whether a value is an inference tensor, whose uses autograd never records."""
    return isinstance(value, Tensor) and value.is_inference()


def _read_outside_message(module: nn.Module, error: ValuesNeeded, breaks: Sequence[str]) -> str:
    """Return the error message for a parameter that was read outside of every graph."""
    owner = module.get_submodule(error.path.rpartition(".")[0])
    action = "move the read into code that dynamo captures, or put the parameter's module into Policy.ignored"
    if type(owner).__module__.startswith("transformers.") and type(owner).__name__.endswith("Experts"):
        action = "call set_experts_implementation('grouped_mm') of the plain model, whose experts are then one graph"
    return (
        f"{type(owner).__name__} reads parameter {error.path!r} outside of the graphs that dynamo captured of "
        f"{type(module).__name__}, where nothing gathers it; {_reason(breaks)}; {action}"
    )


def _reason(breaks: Sequence[str]) -> str:
    if not breaks:
        return "dynamo did not capture this code (torch.compiler.disable, a dispatch mode, or a function that it skips)"
    return breaks[-1]
