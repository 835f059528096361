"""DynamoModule: the sharded model that ``tz.compile`` makes, and the graphs that it has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn

from thunder_zero.compat import dynamo
from thunder_zero.compat.automatic import register
from thunder_zero.compiled import Compiled
from thunder_zero.dynamo.captured import Paths, detached, paths_of, require_apart, shapes_of, with_parameters, written
from thunder_zero.dynamo.graph_calls import GraphCalls
from thunder_zero.dynamo.graph_transform import GraphTransform
from thunder_zero.dynamo.sentences import changed, outside_of_graphs, too_many
from thunder_zero.refusals import DYNAMO_PARTS, require_traceable
from thunder_zero.runtime.placeholders import ValuesNeeded
from thunder_zero.zero_module import ZeroModule, entries_of

import thunder
from thunder import compile_data
from thunder.core.module import ThunderModule

MOST_PROGRAMS = 64  # of one function: a frame that calls submodules of one class has one for each
WARN_AFTER = 8


@dataclass(frozen=True)
class Graph:
    """One graph that dynamo captured, with one choice of parameters, as Thunder compiles it.

    Attributes:
        jitted: by Thunder.
        transform: its hooks.
    """

    jitted: ThunderModule
    transform: GraphTransform

    def entries(self) -> list[tuple[Compiled, Any]]:
        """Its programs, the one that ran last at the end."""
        return entries_of(self.jitted, self.transform.compiled)


@dataclass(frozen=True)
class Captured:
    """A graph as dynamo captured it.

    Attributes:
        graph: its parameters are inputs.
        name: of the function that it is of.
        positions: of the inputs that it writes to.
        apart: for each output, whether it has no gradient.
        made: what Thunder compiles of it, by the parameters that dynamo calls it with.
    """

    graph: fx.GraphModule
    name: str
    positions: Sequence[int]
    apart: Sequence[bool]
    made: dict[Paths, Graph] = field(default_factory=dict)


@dataclass
class Graphs:
    """The graphs of one model.

    Attributes:
        captured: all of them, in order.
        names: by dynamo's numbers of the functions that they are of, in the order in which those were compiled.
        shapes: by name, the shapes of the inputs of each graph that dynamo captured.
        ran: in the last forward, in order.
        breaks: where dynamo ended graphs of the model, and why, in sentences.
    """

    captured: list[Captured] = field(default_factory=list)
    names: dict[int | None, str] = field(default_factory=dict)
    shapes: dict[str, list[Mapping[str, torch.Size]]] = field(default_factory=dict)
    ran: list[Graph] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)


class DynamoModule(ZeroModule):
    """A sharded model whose forward dynamo captures."""

    _calls: GraphCalls
    _graphs: Graphs

    def capture(self) -> None:
        """Let dynamo capture forward, when it is called."""
        self._calls, self._graphs = GraphCalls(self.state), Graphs()
        model = ref(self)  # dynamo keeps what it is given, and what that returns, as long as the process lives

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            number = _alive(model)._capture(graph, inputs)
            return lambda *inputs: _alive(model)._call(number, inputs)

        captured = dynamo.capture(self.plain, backend)
        self._forward_fn = lambda *args, **kwargs: captured(*args, **kwargs)  # a module would become a submodule

    def graphs(self) -> Sequence[list[tuple[Compiled, Any]]]:
        """Of each graph of the last forward, its programs."""
        return [graph.entries() for graph in self._graphs.ran]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._graphs.ran.clear()
        try:
            with dynamo.whole(MOST_PROGRAMS, self._graphs.breaks):
                output = self._forward_fn(*args, **kwargs)
        except ValuesNeeded as error:
            raise RuntimeError(outside_of_graphs(self.plain, error, self._graphs.breaks)) from error
        except dynamo.TooManyPrograms as error:
            shapes = max(self._graphs.shapes.values(), key=len, default=list[Mapping[str, torch.Size]]())
            raise RuntimeError(too_many(type(self.plain).__name__, MOST_PROGRAMS, shapes)) from error
        for name, buffer in self.plain.named_buffers():  # forward may have assigned to some
            self._overrides_buffers[name] = buffer
        return output

    def _capture(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> int:
        """Keep a graph; returns its number."""
        register(graph)
        name = self._name()
        self._note_shapes(name, shapes_of(graph, inputs))
        self._graphs.captured.append(Captured(graph, name, written(graph), detached(graph)))
        return len(self._graphs.captured) - 1

    def _call(self, number: int, inputs: Sequence[Any]) -> Any:
        """Run a graph as Thunder compiled it for these parameters."""
        of, paths, kind = self._graphs.captured[number], paths_of(inputs), type(self.plain).__name__
        if paths not in of.made:
            require_traceable(self.plain, DYNAMO_PARTS)
            of.made[paths] = self._jit(with_parameters(of.graph, inputs, kind), of.name)
        require_apart(inputs, of.positions, kind)
        self._graphs.ran.append(of.made[paths])
        output = of.made[paths].jitted(*(value for value, path in zip(inputs, paths, strict=True) if path is None))
        self.guard(output)
        output = _write(output, [inputs[position] for position in of.positions])
        return tuple(value.detach() if alone else value for value, alone in zip(output, of.apart, strict=True))

    def _jit(self, graph: nn.Module, name: str) -> Graph:
        transform = GraphTransform(self.state, self._calls, name)
        return Graph(thunder.jit(graph, transforms=[transform], executors=compile_data(self).executors_list), transform)

    def _note_shapes(self, name: str, shapes: Mapping[str, torch.Size]) -> None:
        """Warn if the shapes of inputs make dynamo compile one function again and again."""
        found = self._graphs.shapes.setdefault(name, [])
        found.append(shapes)
        if len(found) == WARN_AFTER and (sentence := changed(found)):
            warnings.warn(f"{type(self.plain).__name__} was compiled {WARN_AFTER} times: {sentence}", stacklevel=2)

    def _name(self) -> str:
        """Functions are numbered in the order in which dynamo compiles them first, which ranks compare."""
        return self._graphs.names.setdefault(dynamo.function_number(), f"graph {len(self._graphs.names)}")


def _alive(model: ref[DynamoModule]) -> DynamoModule:
    found = model()
    assert found is not None, "it is being called"
    return found


def _write(output: tuple[Any, ...], inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Write a graph's last outputs to these of its inputs, as it would have; return the others."""
    rest = len(output) - len(inputs)
    for tensor, value in zip(inputs, output[rest:], strict=True):
        tensor.copy_(value)
    return output[:rest]
