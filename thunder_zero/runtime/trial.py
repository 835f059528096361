"""Steps the same stand-ins whole and in pieces, and compares the steps and what they leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_zero.runtime.gradients_to_try import STEPS, gradient_of
from thunder_zero.runtime.stand_ins import attributes_of, in_words

TOLERANCE = 1e-6  # of a row's step, or of the largest value of a state
ROUNDING = 64 * torch.finfo(torch.float64).eps  # of a row's largest value
COMMUNICATES = ("c10d", "_c10d_functional", "symm_mem")  # namespaces of torch's collectives

DEPTH = 8  # of collections and objects in a state
NOT_COMPARED = (str, bytes, type(None), torch.dtype, torch.device, type)

Seed = Callable[[int], None]  # called before each team's step with the number of the step
MakeOptimizer = Callable[[Sequence[tuple[int, Tensor]]], Optimizer]  # of numbers of stand-ins, and tensors


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``start`` to ``stop`` of the stand-in of a number; all of it by default."""

    number: int
    start: int = 0
    stop: int | None = None

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """These rows of the tensor of this number: a view."""
        tensor = tensors[self.number].detach()
        return tensor[self.start : self.stop] if tensor.ndim else tensor


class Team:
    """Pieces that one optimizer steps.

    Attributes:
        pieces: what of which stand-ins.
        params: their values, in the order of the pieces.
        optimizer: their optimizer.
    """

    def __init__(self, make: MakeOptimizer, starts: Sequence[Tensor], pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.params = [nn.Parameter(piece.of(starts).clone()) for piece in pieces]
        self.optimizer = make([(piece.number, param) for piece, param in zip(pieces, self.params, strict=True)])
        self._before = self._options(), self._attributes()
        self._needs_closure = bool(needed_by_step(self.optimizer))

    def step(self, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Step with the pieces' rows of the gradients of all stand-ins, or without any; returns how far each piece
        moves."""
        before = [param.detach().clone() for param in self.params]

        def set_gradients() -> Tensor:
            for piece, param in zip(self.pieces, self.params, strict=True):
                param.grad = None if gradients is None else piece.of(gradients).clone()
            return torch.stack([param.detach().sum() for param in self.params]).sum()

        step: Any = self.optimizer.step
        set_gradients()
        step(set_gradients) if self._needs_closure else step()
        return [param.detach() - old for param, old in zip(self.params, before, strict=True)]

    def moved_options(self) -> set[str]:
        """The options of groups that the steps have changed."""
        return changed_options(self._before[0], self._options())

    def moved_attributes(self) -> set[str]:
        """The attributes that the steps have changed."""
        return changed_options([self._before[1]], [self._attributes()])

    def _options(self) -> list[dict[str, str]]:
        return [in_words(group) for group in self.optimizer.param_groups]

    def _attributes(self) -> dict[str, str]:
        return in_words(attributes_of(self.optimizer))

    def left(self, at: int) -> dict[str, Any]:
        """Numbers and tensors of the state of one piece, and of its group, by readable names."""
        param = self.params[at]
        group = next(group for group in self.optimizer.param_groups if any(one is param for one in group["params"]))
        options = {name: value for name, value in group.items() if name != "params"}
        state = dict(_leaves("the state", self.optimizer.state.get(param, {})))
        return state | dict(_leaves("the group's", options))


def needed_by_step(optimizer: Optimizer) -> list[str]:
    """The arguments that a step needs, such as a closure."""
    return [
        parameter.name
        for parameter in signature(optimizer.step).parameters.values()
        if parameter.default is Parameter.empty and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
    ]


def changed_options(before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> set[str]:
    """The names of what differs, or is there only before or after, in one of several mappings."""
    pairs = zip(before, after, strict=True)
    return {name for old, new in pairs for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


class NoCollectives(TorchDispatchMode):
    """Refuses collectives: not every rank may try at the same time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COMMUNICATES:
            raise RuntimeError(f"its step calls the collective {func}")
        return func(*args, **(kwargs or {}))


def unseeded(step: int) -> None:
    """A seed that leaves generators as they are."""


def first_difference(whole: Team, *teams: Team, seed: Seed = unseeded) -> str:
    """Let all teams step until a piece steps otherwise than the same rows of the whole, or is left with another state;
    in words, empty if none does.

    Args:
        whole: steps whole stand-ins.
        teams: step pieces of stand-ins of the whole.
        seed: called before each team's step.

    Raises:
        ValueError: the steps of the whole show nothing: values become NaN or Inf, or stay as they are; or a state
            cannot be compared.
    """
    last = [torch.zeros_like(param) for param in whole.params]
    still = set(range(len(whole.params)))
    for step in range(STEPS):
        last = [gradient_of(step, at, param.detach(), last[at]) for at, param in enumerate(whole.params)]
        seed(step)
        moves = whole.step(last)
        still -= {at for at, move in enumerate(moves) if move.any()}
        if not all(bool(param.isfinite().all()) for param in whole.params):
            zeros = ", where gradients have rows of zeros" if any(map(_has_zero_row, last)) else ""
            raise ValueError(f"stand-ins for parameters become NaN or Inf in step {step + 1}{zeros}")
        for team in teams:
            seed(step)
            for piece, move in zip(team.pieces, team.step(last), strict=True):
                if off := _off(piece.of(moves), move, piece.of(whole.params)):
                    return f"step {step + 1} was off by {100 * off:.3g}%"
    if still:
        raise ValueError(f"stand-ins for parameters did not move in {STEPS} steps")
    found = (_other_left(whole, team, at) for team in teams for at in range(len(team.pieces)))
    return next((f"after {STEPS} steps {name} was another one" for name in found if name), "")


def _has_zero_row(grad: Tensor) -> bool:
    return grad.ndim > 0 and bool((grad.reshape(len(grad), -1) == 0).all(1).any())


def _off(right: Tensor, found: Tensor, values: Tensor) -> float:
    """By how much a move is off, relative to the larger of the two, in the row where it is the most; 0 if by rounding
    alone."""
    rows = (right.shape[0] if right.ndim else 1, -1)
    right, found, values = (tensor.detach().reshape(rows) for tensor in (right, found, values))
    size = torch.maximum(right.abs(), found.abs()).amax(1)
    off = (right - found).abs().amax(1)
    wrong = ~(off <= TOLERANCE * size + ROUNDING * values.abs().amax(1))  # NaN is wrong
    return float((off / size)[wrong].nan_to_num(1.0).max()) if wrong.any() else 0.0


def _other_left(whole: Team, team: Team, at: int) -> str:
    """The name of the first value that an optimizer left for a piece, and the one of the whole left otherwise."""
    piece = team.pieces[at]
    of_whole, of_piece = whole.left(piece.number), team.left(at)
    shapes = tuple(whole.params[piece.number].shape), tuple(team.params[at].shape)
    for name in sorted(of_whole.keys() | of_piece.keys()):
        if name not in of_whole or name not in of_piece:
            return name
        right, found = (
            torch.as_tensor(left[name]).detach().to("cpu", torch.complex128) for left in (of_whole, of_piece)
        )
        right = _rows_of(right, found, piece, shapes)
        if right.shape != found.shape:
            return name
        most = max((float(tensor.abs().max()) for tensor in (right, found) if tensor.numel()), default=0.0)
        if not torch.allclose(right, found, rtol=0.0, atol=TOLERANCE * most, equal_nan=True):
            return name
    return ""


def _rows_of(right: Tensor, found: Tensor, piece: Piece, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
    """A piece's rows of a state that has a row for each of the parameter's, as a vector too; any other as it is.

    Args:
        right: the state of the whole.
        found: the same state of the piece.
        piece: the piece.
        shapes: of the parameter, whole and the piece.
    """
    whole, part = shapes
    if whole == part or not right.ndim or not found.ndim:
        return right
    if (len(right), len(found)) == (whole[0], part[0]) and right.shape[1:] == found.shape[1:]:
        return right[piece.start : piece.stop]
    if (right.shape, found.shape) == ((prod(whole),), (prod(part),)):
        return right.reshape(whole[0], -1)[piece.start : piece.stop].reshape(-1)
    return right


def _leaves(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The numbers and tensors of a value: in collections, and in attributes of objects.

    Raises:
        ValueError: an object without attributes, or many inside each other.
    """
    if isinstance(value, Tensor | int | float | complex):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name} {key!r}", inner, depth + 1)
    elif isinstance(value, list | tuple | deque):
        for at, inner in enumerate(value):
            yield from _leaves(f"{name}[{at}]", inner, depth + 1)
    elif not isinstance(value, NOT_COMPARED) and not callable(value):
        try:
            attributes = vars(value)
        except TypeError:
            raise ValueError(f"{name} is of type {type(value).__name__}, which cannot be compared") from None
        if depth > DEPTH:
            raise ValueError(f"{name} has too many objects inside each other")
        yield from _leaves(name, attributes, depth + 1)
