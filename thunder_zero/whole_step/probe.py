"""Tries an ordinary optimizer on stand-ins: what it couples, what it draws, what its steps change.

Stand-ins step all together and each alone. A difference proves that the optimizer couples parameters, or draws random
numbers. No difference proves nothing: it may do other things after more steps, or with other gradients.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_zero.runtime.optimizers import hyper_parameters, names_of, without_hooks
from thunder_zero.whole_step.stepper import Members
from thunder_zero.whole_step.words import attributes_of, changed, in_words

SIDE, KINDS = 32, 16  # the most rows or columns of a stand-in; the most stand-ins that do not look alike
SCALES = (1.0, 1e-6, 1e3)  # of gradients; stand-ins are float64, far from Inf and zero, squared too
DOWNHILL = 8  # steps at the end that go one way, as in training: some optimizers measure how far they get
STEPS = 4 * len(SCALES) + DOWNHILL
SOON = 4  # steps: what an optimizer would do only after more of them, it does after so many in a second trial
SOME_LR = 1e-3
TOLERANCE = 1e-6  # of a stand-in's step, or of the largest value of a state
ROUNDING = 64 * torch.finfo(torch.float64).eps  # of a stand-in's largest value
DEPTH = 8  # of collections and objects in a state
COMMUNICATES = ("c10d", "_c10d_functional", "symm_mem")  # namespaces of torch's collectives

MakeOn = Callable[[Sequence[Mapping[str, Any]], Members], Optimizer]  # of the options of groups, and members


@dataclass(frozen=True, slots=True)
class Found:
    """What was found.

    Attributes:
        couples: what differed beside other stand-ins, by how much; empty if nothing did.
        draws: what differed in the same steps again; empty if nothing did.
        unknown: why it cannot be tried; empty if it can.
        fails_empty: the error of steps of groups without parameters; empty if there is none.
        moving: the options of groups that steps change.
        moving_if_any: those of them that steps of groups without parameters leave as they are.
        moves_all: steps move parameters without a gradient, too.
    """

    couples: str = ""
    draws: str = ""
    unknown: str = ""
    fails_empty: str = ""
    moving: frozenset[str] = frozenset()
    moving_if_any: frozenset[str] = frozenset()
    moves_all: bool = False


@dataclass(frozen=True, eq=False)
class _Kind:
    """A stand-in: the number that gives it its values, and what it has of the parameter that it stands for."""

    number: int
    group: int
    shape: tuple[int, ...]
    name: str | None
    marks: Mapping[str, Any]


def tried(make_on: MakeOn, like: Optimizer, device: torch.device) -> Found:
    """Try an optimizer: the same on every rank that has the same options; the random state stays as it is.

    Args:
        make_on: makes optimizers like it.
        like: one over parameters of the whole shapes; is not stepped.
        device: of the stand-ins.
    """
    no_collectives: Any = NoCollectives  # torch's constructor has no types
    with _undisturbed(device), no_collectives():
        trial = _Trial(make_on, like, device)
        fails_empty, moved_empty = "", frozenset[str]()
        try:
            empty = trial.team([])
            for _ in range(STEPS):
                empty.step([])
            moved_empty = empty.moved()
        except Exception as error:
            fails_empty = _in_short(error)
        try:
            whole, couples, draws = trial.compare()
            moving = whole.moved()
            if not (couples or draws) and trial.hurry():
                try:
                    _, couples, draws = trial.compare()
                except Exception:
                    couples = draws = ""  # such options do not fit together: the first trial has to do
        except Exception as error:
            return Found(unknown=_in_short(error), fails_empty=fails_empty)
        return Found(couples, draws, "", fails_empty, moving, moving - moved_empty, whole.moves_all())


class _Team:
    """Stand-ins that one optimizer steps."""

    def __init__(self, make: Callable[[Members], Optimizer], kinds: Sequence[_Kind], device: torch.device) -> None:
        self.kinds = kinds
        self.params = [nn.Parameter(0.1 * _noise(-1, kind.number, kind.shape, device)) for kind in kinds]
        for kind, param in zip(kinds, self.params, strict=True):
            vars(param).update(kind.marks)
        self.optimizer = make([(of.group, of.name, param) for of, param in zip(kinds, self.params, strict=True)])
        self._before = self._options()

    def step(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Step; returns how far each stand-in moves."""
        before = [param.detach().clone() for param in self.params]
        for param, grad in zip(self.params, gradients, strict=True):
            param.grad = None if grad is None else grad.clone()
        step: Any = self.optimizer.step
        step()
        return [param.detach() - old for param, old in zip(self.params, before, strict=True)]

    def _options(self) -> list[dict[str, str]]:
        return [in_words(hyper_parameters(group)) for group in self.optimizer.param_groups]

    def moved(self) -> frozenset[str]:
        """The options of groups that the steps have changed."""
        return frozenset(changed(self._before, self._options()))

    def moves_all(self) -> bool:
        """Whether a step without gradients moves a stand-in; False if it fails."""
        try:
            return any(bool(move.any()) for move in self.step([None] * len(self.params)))
        except Exception:
            return False

    def left(self, at: int) -> dict[str, Any]:
        """Numbers and tensors of the state of a stand-in, and of its group, by readable names."""
        group = hyper_parameters(self.optimizer.param_groups[self.kinds[at].group])
        state = dict(_leaves("the state", self.optimizer.state.get(self.params[at], {})))
        return state | dict(_leaves("the group's", group))


class _Trial:
    """Compares teams of stand-ins."""

    def __init__(self, make_on: MakeOn, like: Optimizer, device: torch.device) -> None:
        self._make_on, self._device, self._sooner = make_on, device, False
        self._groups = [_with_rate(hyper_parameters(group), like) for group in like.param_groups]
        self._counts = [of for values in (attributes_of(like), *self._groups) for of in values.values()]
        self._kinds = _kinds(like)

    def hurry(self) -> bool:
        """From now on whole numbers above SOON in options and attributes are SOON; whether there are any."""
        self._sooner = True
        return any(map(_is_late, self._counts))

    def team(self, kinds: Sequence[_Kind]) -> _Team:
        """These stand-ins, which one optimizer steps."""

        def make(members: Members) -> Optimizer:
            _seed(self._device, 0)
            optimizer = self._make_on(self._groups, members)
            for values in (vars(optimizer), *optimizer.param_groups) if self._sooner else ():
                values.update({name: SOON for name, of in values.items() if _is_late(of)})
            return optimizer

        return _Team(make, kinds, self._device)

    def compare(self) -> tuple[_Team, str, str]:
        """All stand-ins together, after steps; what differs where each steps alone; what differs in the same steps.

        Raises:
            ValueError: it draws random numbers and couples; or as :meth:`_difference`.
        """
        whole = self.team(self._kinds)
        if not (couples := self._difference(whole, [self.team([kind]) for kind in self._kinds])):
            return whole, "", ""
        if not (draws := self._difference(self.team(self._kinds), [self.team(self._kinds)])):
            return whole, couples, ""
        for kind in self._kinds:  # seeded alike, the first one draws what it draws alone
            first = self.team([kind, *(of for of in self._kinds if of is not kind)])
            if found := self._difference(first, [self.team([kind])], seeded=True):
                raise ValueError(f"it draws random numbers, and beside other stand-ins {found}")
        return whole, "", draws

    def _difference(self, whole: _Team, teams: Sequence[_Team], *, seeded: bool = False) -> str:
        """Step all teams until a stand-in steps otherwise than in the whole, or is left with another state; in words.

        Raises:
            ValueError: the steps of the whole show nothing: values become NaN or Inf, or stay as they are.
        """
        last = [torch.zeros_like(param) for param in whole.params]
        places = {kind.number: at for at, kind in enumerate(whole.kinds)}
        still = set(range(len(last)))
        for step in range(STEPS):
            given = zip(whole.kinds, whole.params, last, strict=True)
            last = [_gradient(step, kind.number, param.detach(), grad) for kind, param, grad in given]
            if seeded:
                _seed(self._device, step)
            moves = whole.step(last)
            still -= {at for at, move in enumerate(moves) if move.any()}
            if not all(bool(param.isfinite().all()) for param in whole.params):
                raise ValueError(f"stand-ins for parameters become NaN or Inf in step {step + 1}")
            for team in teams:
                if seeded:
                    _seed(self._device, step)
                own = [places[kind.number] for kind in team.kinds]
                for at, move in zip(own, team.step([last[at] for at in own]), strict=True):
                    if off := _off(moves[at], move, whole.params[at].detach()):
                        return f"step {step + 1} was off by {100 * off:.3g}%"
        if still:
            raise ValueError(f"stand-ins for parameters did not move in {STEPS} steps")
        pairs = ((places[kind.number], team, at) for team in teams for at, kind in enumerate(team.kinds))
        found = (_other(whole.left(place), team.left(at)) for place, team, at in pairs)
        return next((f"after {STEPS} steps {name} was another one" for name in found if name), "")


def _kinds(like: Optimizer) -> list[_Kind]:
    """Stand-ins for parameters of which no two look alike: of those with the same options, marks and number of
    dimensions the largest, then of each the next one, and so on, up to KINDS; then one more like the first, since two
    that look alike may be coupled."""
    families: defaultdict[object, dict[object, tuple[Any, ...]]] = defaultdict(dict)
    members = [
        (param, number, name)
        for number, group in enumerate(like.param_groups)
        for name, param in zip(names_of(group), group["params"], strict=True)
        if param.numel()
    ]
    looks = [repr(in_words(hyper_parameters(group), amounts=False)) for group in like.param_groups]
    for param, number, name in sorted(members, key=lambda member: -member[0].numel()):
        role = "".join(char for char in name or "" if not char.isdigit())  # layers have the same
        family = families[looks[number], repr(in_words(vars(param))), param.ndim]
        shape = tuple(min(length, SIDE) for length in param.shape)
        family.setdefault((param.shape, role), (number, shape, name, vars(param)))
    in_turn = zip_longest(*(family.values() for family in families.values()))
    chosen = [of for turn in in_turn for of in turn if of is not None][:KINDS]
    if len(members) > len(chosen):
        number, shape, name, marks = chosen[0]
        chosen.append((number, shape, name and f"{name} 2", marks))
    return [_Kind(number, *of) for number, of in enumerate(chosen)]


def _is_late(value: object) -> bool:
    return type(value) is int and value > SOON


def _with_rate(group: dict[str, Any], like: Optimizer) -> dict[str, Any]:
    """Options with a learning rate that moves stand-ins: a warmup may begin with zero."""
    if "lr" in group:
        rates = (group.get("initial_lr"), group["lr"], like.defaults.get("lr"), SOME_LR)
        group["lr"] = next(rate for rate in rates if isinstance(rate, int | float | Tensor) and rate != 0)
    return group


def _gradient(step: int, number: int, param: Tensor, last: Tensor) -> Tensor:
    """The gradient of a stand-in: noise, the last one again, its opposite, downhill, in each scale; then downhill.
    Stand-ins of other numbers have other scales."""
    size = SCALES[(step // 4 + number) % len(SCALES)]
    if step % 4 == 3 or step >= STEPS - DOWNHILL:
        return param * (size / param.abs().max().clamp_min(torch.finfo(param.dtype).tiny))
    return (size * _noise(step, number, param.shape, param.device), last, -last)[step % 4]


def _noise(step: int, number: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """The same on every rank; the random state stays as it is."""
    generator = torch.Generator().manual_seed(1000 * number + step + 1)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64, device="cpu").to(device)


def _off(right: Tensor, found: Tensor, values: Tensor) -> float:
    """By how much a move is off, relative to the larger of the two; 0 if by rounding alone."""
    size, off = float(torch.maximum(right.abs(), found.abs()).max()), float((right - found).abs().max())
    within = off <= TOLERANCE * size + ROUNDING * float(values.abs().max())  # NaN is not
    return 0.0 if within else off / size if off == off else 1.0


def _other(right: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The name of the first value that was left otherwise; empty if none was."""
    for name in sorted(right.keys() | found.keys()):
        if name not in right or name not in found:
            return name
        one, other = (torch.as_tensor(of[name]).detach().to("cpu", torch.complex128) for of in (right, found))
        most = max((float(of.abs().max()) for of in (one, other) if of.numel()), default=0.0)
        if one.shape != other.shape or not torch.allclose(one, other, rtol=0, atol=TOLERANCE * most, equal_nan=True):
            return name
    return ""


def _leaves(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The numbers and tensors of a value: in collections, and in attributes of objects."""
    if isinstance(value, Tensor | int | float | complex):
        yield name, value
    elif depth < DEPTH and not callable(value):
        numbered = dict(enumerate(value)) if isinstance(value, list | tuple) else {}
        inner = value if isinstance(value, Mapping) else getattr(value, "__dict__", numbered)
        for key, one in inner.items():
            yield from _leaves(f"{name} {key!r}", one, depth + 1)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


class NoCollectives(TorchDispatchMode):
    """Refuses collectives: ranks step different parameters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COMMUNICATES:
            raise RuntimeError(f"its step calls the collective {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Afterwards random numbers go on as before. Inside the block no warnings, and no hooks of all optimizers."""
    numpy = sys.modules.get("numpy")
    state, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    with without_hooks(), torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(of_numpy)


def _seed(device: torch.device, number: int) -> None:
    """Seed all generators, so that all ranks find the same."""
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
