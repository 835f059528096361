"""Keeps the graphs that dynamo captured for one model, up to a limit.

Dynamo captures a function again when its guards fail. If shapes change, dynamo makes sizes symbols, so that one graph
serves all shapes. A function that branches on a size or a string has a graph for each value. At most ``MOST`` graphs
are kept for a function and a choice of parameters. Beyond this limit the least recently used graph is dropped with its
programs, and dynamo forgets the graph. A later call that needs the graph captures and compiles it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from thunder_zero.compat import aot
from thunder_zero.compat.dynamo import CompiledFrame
from thunder_zero.frontends.compilations import Shapes, Spent
from thunder_zero.frontends.dynamo.captured import GraphKey, Paths
from thunder_zero.frontends.dynamo.programs import Programs

MOST = 32  # graphs of one function with the same parameters


@dataclass(frozen=True)
class GradMode:
    """A grad mode of torch: two flags, for gradients and for inference mode."""

    enabled: bool = True
    inference: bool = False

    @staticmethod
    def now() -> GradMode:
        """Return the current grad mode."""
        return GradMode(torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the mode for a block."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.enabled):
            yield


@dataclass(frozen=True)
class Captured:
    """A graph as dynamo captured it.

    Attributes:
        joint: the graph with its backward. Parameters are inputs of the graph.
        frame: the function that dynamo compiled.
        name: the function's name, such as "graph 0".
        paths: for each input of the captured call, the path of a parameter or None.
        key: a key that is equal for graphs that compute equal values; None if unknown.
        overlaps: the groups of inputs that overlapped in memory in the captured call.
        shapes: a mapping from names of inputs to shapes. Dynamo drops the names once it has compiled the graph.
        spent: the cost of tracing the graph.
        programs: the compiled programs, keyed by the paths of a call's parameters and those of all frozen parameters.
    """

    joint: aot.Joint
    frame: CompiledFrame
    name: str
    paths: Paths
    key: GraphKey | None
    overlaps: tuple[object, ...]
    shapes: Shapes
    spent: Spent
    programs: dict[tuple[Paths, frozenset[str]], Programs] = field(default_factory=dict)


@dataclass
class Graphs:
    """The graphs of one model.

    Attributes:
        captured: the kept graphs, keyed by number, least recently used first.
        names: a mapping from dynamo's numbers of functions to names, in the order of first compilations.
        ran: the programs that the last forward ran, in order.
        breaks: a sentence for each graph break, with the position and the reason.
        for_all_modes: True if a single graph, captured with gradients on, serves forward in all grad modes. None before
            there is a graph.
        user_mode: the user's grad mode while dynamo looks a graph up in another mode. None at other times.
        warned: True once the user was warned that graphs are dropped.
        graph_count: the number of graphs captured so far.
        program_count: the number of programs compiled so far.
    """

    captured: dict[int, Captured] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    ran: list[Programs] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    for_all_modes: bool | None = None
    user_mode: GradMode | None = None
    warned: bool = False
    graph_count: int = 0
    program_count: int = 0

    def name_of(self, frame: CompiledFrame) -> str:
        """Return a function's name, such as "graph 0". Functions are numbered by their first compilation."""
        return self.names.setdefault(frame.function, f"graph {len(self.names)}")

    def keep(self, captured: Captured) -> int:
        """Keep a graph, and return its number."""
        self.captured[self.graph_count] = captured
        self.graph_count += 1
        return self.graph_count - 1

    def use(self, number: int) -> Captured:
        """Return a graph, and make it the most recently used one."""
        self.captured[number] = captured = self.captured.pop(number)
        return captured

    def shapes_by_kind(self) -> Iterable[Sequence[Shapes]]:
        """Return the input shapes of each function's graphs with the same parameters, with and without a backward."""
        shapes: dict[tuple[str, Paths, bool], list[Shapes]] = {}
        for captured in self.captured.values():
            if any(captured.paths):
                kind = captured.name, captured.paths, captured.joint.differentiates
                shapes.setdefault(kind, []).append(captured.shapes)
        return shapes.values()

    def drop_oldest(self) -> Iterator[list[Captured]]:
        """Yield all graphs of each function that has too many graphs, then drop the oldest of them."""
        if len(self.captured) <= MOST:  # as in nearly every forward
            return
        kinds: dict[tuple[str, Paths], list[int]] = {}
        for number, captured in self.captured.items():
            kinds.setdefault((captured.name, captured.paths), []).append(number)
        for numbers in kinds.values():
            if len(numbers) > MOST:
                yield [self.captured[number] for number in numbers]
                for number in numbers[: len(numbers) - MOST]:
                    self.captured.pop(number).frame.forget()
