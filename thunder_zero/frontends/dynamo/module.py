"""DynamoModule: the sharded model that ``tz.compile`` makes, and the graphs that it has.

In: calls of the model. Out: what its forward returns. Dynamo captures forward when it is first called, and gives each
graph to ``_capture``; whenever forward comes to a graph, ``_call`` runs it by its number::

    forward    | graph | Python without a graph | graph |  ->  output
                   |                                |
               _call(0, inputs)                 _call(1, inputs)         inputs that are placeholders have paths
                   |
               captured[0].made[paths].run(other inputs)                 Programs (programs.py), made at the first call

Dynamo guards the looks of parameters, not which they are, so one graph may run for several submodules: it has Programs
for each choice of paths. A parameter that is read between graphs raises, as nothing gathers it there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from thunder_zero.compat import aot, dynamo
from thunder_zero.compat.uncapturable import require_traceable
from thunder_zero.frontends.compilations import metered, too_many, uncollected
from thunder_zero.frontends.compiled import Entry
from thunder_zero.frontends.dynamo.captured import (
    looks,
    paths_of,
    replaced,
    shapes_of_inputs,
    shared_memory,
    with_slices,
)
from thunder_zero.frontends.dynamo.checkpoints import joint_of
from thunder_zero.frontends.dynamo.convert import returned, written
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

    _calls: GraphRuntime
    _graphs: Graphs
    _fuses: bool

    def capture(self, *, dynamic: bool | None, fuses: bool) -> None:
        """Let dynamo capture forward, when it is called; ``dynamic`` is that of ``torch.compile``. ``fuses``: inductor
        compiles what lies between lines of ours."""
        self._fuses = fuses
        self._calls, self._graphs = GraphRuntime(self.state), Graphs()
        model = ref(self)  # dynamo keeps what it is given, and what that returns, as long as the process lives

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            number = _alive(model)._capture(graph, inputs)
            return lambda *inputs: _alive(model)._call(number, inputs)

        captured = dynamo.capture(self.plain, backend, lambda: _alive(model)._compiling(), dynamic=dynamic)
        self._forward_fn = lambda *args, **kwargs: captured(*args, **kwargs)  # a module would become a submodule

    def graphs(self) -> Sequence[Sequence[Entry]]:
        """Of each graph of the last forward, its programs, the one that ran last at the end."""
        return [[*graph.entries.values()] for graph in self._graphs.ran]

    def _programs_made(self) -> int:
        return self._graphs.compiled

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Dynamo captures something, inside the block: nothing else needs its settings, or no garbage collection."""
        with dynamo.capturing(self._graphs.breaks, (Placeholder,)), uncollected():
            yield

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._graphs.ran.clear()
        for dropped in self._graphs.drop_oldest():
            self._warn(dropped)
        try:
            output = self._captured(*args, **kwargs)
        except ValuesNeeded as error:
            raise RuntimeError(_outside_of_graphs(self.plain, error, self._graphs.breaks)) from error
        except dynamo.NOT_TRACED as error:
            name, inner = type(self.plain).__name__, getattr(error, "inner_exception", None)
            if isinstance(inner, aot.Untraced):
                raise RuntimeError(f"cannot trace {name}: {inner}") from error
            sentence, cause = dynamo.failure(error, name, self.state.plan.mesh.tensor.size)
            raise RuntimeError(sentence) from cause
        if self.state.plan.mesh.is_sliced:
            require_unhooked(self.state.placeholders)
        for tensor in tensors_in(output):
            if (path := path_of(tensor)) is not None:  # dynamo returns what it was given without a graph
                raise RuntimeError(returned(path))
        if len(self._graphs.ran) == 1:
            self._graphs.ran[0].note_returned(output)
        return output

    def _warn(self, captured: Sequence[Captured]) -> None:
        """Warn once that graphs of one function are dropped, and what to do."""
        if not self._graphs.warned:
            self._graphs.warned = True
            name, (*before, last) = type(self.plain).__name__, captured
            warnings.warn(
                too_many(name, len(before), [each.shapes for each in captured], last.frame.reason()), stacklevel=2
            )

    def _captured(self, *args: Any, **kwargs: Any) -> Any:
        """Call what dynamo captured. Without gradients, take the graph that it has for training, if that is good for
        all grad modes: dynamo guards the mode, so gradients are on where it looks, and the program runs without."""
        user, graphs = GradMode.now(), self._graphs
        if user == GradMode() or not graphs.for_all_modes or any(map(_is_inference, tree_leaves((args, kwargs)))):
            return self._forward_fn(*args, **kwargs)
        graphs.user = user
        try:
            with GradMode().entered(), dynamo.without_compiling():
                return self._forward_fn(*args, **kwargs)
        except Exception:
            if graphs.ran:
                raise
        finally:
            graphs.user = None
        graphs.user = user
        try:  # dynamo has no such graph: it captures one for both modes without gradients
            with GradMode(enabled=False).entered():
                return self._forward_fn(*args, **kwargs)
        finally:
            graphs.user = None

    def _capture(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> int:
        """Keep a graph; returns its number."""
        for_all = dynamo.is_for_all_modes(graph, type(self.plain).forward)
        if GradMode.now() == GradMode() or not for_all:
            self._graphs.for_all_modes = for_all and self._graphs.for_all_modes is not False
        frame, paths, inputs = dynamo.CompiledFrame.now(), paths_of(inputs), with_slices(graph, inputs)
        name, of = self._graphs.name_of(frame), looks(graph)
        alike = of, name, shared_memory(inputs)
        kept = self._graphs.captured.values()
        same = (old for old in kept if of is not None and (old.looks, old.name, old.shared) == alike)
        old = next((old for old in same if old.joint.differentiates or not torch.is_grad_enabled()), None)
        if old is not None:
            return self._graphs.keep(replace(old, frame=frame, paths=paths))
        if (path := replaced(graph, inputs)) is not None:
            raise aot.Untraced(written(path))
        with metered() as spent:
            joint = joint_of(graph, inputs, paths, self.state.plan)
        return self._graphs.keep(Captured(joint, frame, name, paths, of, alike[-1], shapes_of_inputs(graph), spent()))

    def _call(self, number: int, inputs: Sequence[Any]) -> Any:
        """Run a graph, in the user's grad mode."""
        with nullcontext() if self._graphs.user is None else self._graphs.user.entered():
            of, paths = self._graphs.about_to_run(number), paths_of(inputs)
            if of.joint.mutated and shared_memory(inputs) != of.shared:
                raise RuntimeError(
                    f"{type(self.plain).__name__} writes to its inputs, which share memory in another way than in the "
                    f"call that dynamo captured; give it copies, by clone()"
                )
            if paths not in of.made:
                require_traceable(self.plain, PARTS)
                executor = ZeroExecutor(self.state.plan, self._calls, of.name)
                name = type(self.plain).__name__
                of.made[paths] = Programs(of.joint, paths, name, executor, self._fuses, self.state, self._calls)
            programs = of.made[paths]
            if programs.draws:
                self.state.same_batch.require_same_generators()
            self._graphs.ran.append(programs)
            before = len(programs.entries)
            outputs = programs.run(inputs)
            self._graphs.compiled += len(programs.entries) - before
            return outputs


def graphs_of(model: ThunderModule) -> Graphs:
    """Return the graphs of a model of ``tz.compile``.

    Raises:
        TypeError: another one.
    """
    if not isinstance(model, DynamoModule):
        raise TypeError(
            f"programs takes a model of thunder_zero.compile, got {type(model).__name__}; thunder.compile_stats(model) "
            f"has those of thunder.jit"
        )
    return model._graphs


def _alive(model: ref[DynamoModule]) -> DynamoModule:
    found = model()
    assert found is not None, "it is being called"
    return found


def _is_inference(value: Any) -> bool:
    """Whether autograd can never record what is computed with a value, whatever the mode."""
    return isinstance(value, Tensor) and value.is_inference()


def _outside_of_graphs(module: nn.Module, error: ValuesNeeded, breaks: Sequence[str]) -> str:
    """Why a parameter was read outside of every graph."""
    owner = module.get_submodule(error.path.rpartition(".")[0])
    instead = "move the read into code that dynamo captures, or put the parameter's module into Policy.ignored"
    if type(owner).__module__.startswith("transformers.") and type(owner).__name__.endswith("Experts"):
        instead = "call set_experts_implementation('grouped_mm') of the plain model, whose experts are then one graph"
    return (
        f"{type(owner).__name__} reads parameter {error.path!r} outside of the graphs that dynamo captured of "
        f"{type(module).__name__}, where nothing gathers it; {_reason(breaks)}; {instead}"
    )


def _reason(breaks: Sequence[str]) -> str:
    if not breaks:
        return "dynamo did not capture this code (torch.compiler.disable, a dispatch mode, or a function that it skips)"
    return breaks[-1]
