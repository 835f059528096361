"""The graphs that dynamo captured of one model, and which of them are kept.

Dynamo captures a function again when it is called in another way: for other shapes it makes sizes symbols, so that one
graph serves all; a graph that branches on a size, or on a string, has one for each. Of each function, and each choice
of parameters that it is called with, ``MOST`` are kept. Past that the one that ran longest ago is dropped, with its
programs, and dynamo forgets it: called like that again, it is captured and compiled anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from thunder_zero.compat import aot
from thunder_zero.compat.dynamo import CompiledFrame
from thunder_zero.frontends.compilations import Spent
from thunder_zero.frontends.dynamo.captured import Looks, Paths
from thunder_zero.frontends.dynamo.programs import Programs

MOST = 32  # graphs of one function with the same parameters


@dataclass(frozen=True)
class GradMode:
    """Whether autograd records, and whether tensors are made that it never will."""

    enabled: bool = True
    inference: bool = False

    @staticmethod
    def now() -> GradMode:
        """The mode of the code that runs."""
        return GradMode(torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The mode, inside the block."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.enabled):
            yield


@dataclass(frozen=True)
class Captured:
    """A graph as dynamo captured it.

    Attributes:
        joint: the graph with its backward; its parameters are inputs.
        frame: the function that dynamo compiled.
        name: of the function that it is of.
        paths: of the parameters that it was captured with.
        looks: equal for graphs that compute the same for inputs that look the same; None if unknown.
        shared: inputs that overlapped in memory when it was captured.
        shapes: of its inputs; dynamo drops their names once it has compiled the graph.
        spent: on tracing it.
        made: what is compiled of it, by the parameters that dynamo calls it with.
    """

    joint: aot.Joint
    frame: CompiledFrame
    name: str
    paths: Paths
    looks: Looks | None
    shared: tuple[object, ...]
    shapes: Mapping[str, torch.Size]
    spent: Spent
    made: dict[Paths, Programs] = field(default_factory=dict)


@dataclass
class Graphs:
    """The graphs of one model.

    Attributes:
        captured: those that are kept, by their numbers; the one that ran last is the last.
        names: by dynamo's numbers of the functions that they are of, in the order in which those were compiled.
        ran: in the last forward, in order.
        breaks: where dynamo ended graphs of the model, and why, in sentences.
        for_all_modes: a graph that dynamo captured with gradients on is all of forward, whatever the grad mode; None
            before there is one.
        user: the user's grad mode, while forward enters dynamo with gradients on for such a graph.
        warned: somebody was told that graphs are dropped.
        numbered: how many graphs have got a number.
        compiled: how many programs were compiled.
    """

    captured: dict[int, Captured] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    ran: list[Programs] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    for_all_modes: bool | None = None
    user: GradMode | None = None
    warned: bool = False
    numbered: int = 0
    compiled: int = 0

    def name_of(self, frame: CompiledFrame) -> str:
        """Functions are numbered in the order in which dynamo compiles them first, which ranks compare."""
        return self.names.setdefault(frame.function, f"graph {len(self.names)}")

    def keep(self, captured: Captured) -> int:
        """Keep a graph; return its number."""
        self.captured[self.numbered] = captured
        self.numbered += 1
        return self.numbered - 1

    def about_to_run(self, number: int) -> Captured:
        """Return a graph, from now on the one that ran last."""
        self.captured[number] = captured = self.captured.pop(number)
        return captured

    def drop_oldest(self) -> Iterator[list[Captured]]:
        """Drop what ran longest ago of each function that has too many graphs; yield those that there were."""
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
