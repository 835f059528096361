"""Probes an optimizer on probe parameters: what it couples, draws, and what its steps change.

Probe parameters step all together and each alone. A difference proves that the optimizer couples parameters. No
difference proves nothing: it may do other things after more steps, or with other gradients.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path

from thunder_zero.compat.torch.optimizers import step_alone
from thunder_zero.optim.options import changed, hyper_parameters, in_words, names_of
from thunder_zero.optim.stepper import GroupedParams

SIDE = 32  # the most rows or columns of a probe parameter
SCALES = (1.0, 1e-6, 1e3)  # of gradients; probe parameters are float64, far from Inf and zero, squared too
DOWNHILL = 8  # steps at the end that go one way, as in training: some optimizers measure how far they get
STEPS = 4 * len(SCALES) + DOWNHILL
SOME_LR = 1e-3
TOLERANCE = 1e-6  # of a probe parameter's step, or of the largest value of a state
ROUNDING = 64 * torch.finfo(torch.float64).eps  # of a probe parameter's largest value
COMMUNICATES = ("c10d", "_c10d_functional", "symm_mem")  # namespaces of torch's collectives

MakeOn = Callable[[Sequence[Mapping[str, Any]], GroupedParams], Optimizer]  # of the options of groups, and members


@dataclass(frozen=True, slots=True)
class Found:
    """What was found; a text is empty where nothing was."""

    couples: str = ""  # what differed with other probe parameters, by how much
    draws: str = ""  # whose random numbers it draws
    unknown: str = ""  # why it cannot be tried
    fails_empty: str = ""  # the error of steps of groups without parameters
    moving: frozenset[str] = frozenset()  # the options of groups that steps change
    moving_if_any: frozenset[str] = frozenset()  # those that steps of groups without parameters leave as they are
    moves_all: bool = False  # steps move parameters without a gradient, too


@dataclass(frozen=True, eq=False)
class _ProbeParameter:
    """The number that gives it its values, and what it has of the parameter that it stands for."""

    number: int
    group: int
    shape: tuple[int, ...]
    name: str | None
    attributes: Mapping[str, Any]


def probed(make_on: MakeOn, like: Optimizer, device: torch.device) -> Found:
    """Try an optimizer: the same on every rank that has the same options; the random state stays as it is. ``like``,
    over parameters of the whole shapes, is not stepped."""
    groups, kinds = [_with_rate(hyper_parameters(group)) for group in like.param_groups], _kinds(like)

    def run(of: Sequence[_ProbeParameter]) -> _ProbeRun:
        return _ProbeRun(lambda members: make_on(groups, members), of, device)

    no_collectives: Any = NoCollectives  # torch's constructor has no types
    with _undisturbed(device), no_collectives():
        fails_empty, moved_empty = "", frozenset[str]()
        try:
            moved_empty = run([]).moved
        except Exception as error:
            fails_empty = _in_short(error)
        try:
            whole = run(kinds)
            couples = _coupling(run, whole)
        except Exception as error:
            return Found(unknown=_in_short(error), fails_empty=fails_empty)
        return Found(couples, whole.draws, "", fails_empty, whole.moved, whole.moved - moved_empty, whole.moves_all())


class _ProbeRun:
    """Probe parameters (``kinds``) that one optimizer has stepped: how far each moved in each step (``moves``), whose
    random numbers the steps drew, the options of groups that they changed (``moved``). Raises if these show nothing."""

    def __init__(
        self, make: Callable[[GroupedParams], Optimizer], kinds: Sequence[_ProbeParameter], device: torch.device
    ) -> None:
        self.kinds, self.draws, self.moves = kinds, "", list[list[Tensor]]()
        _seed(device, 0)
        self._params = [nn.Parameter(0.1 * _noise(-1, kind.number, kind.shape, device)) for kind in kinds]
        for kind, param in zip(kinds, self._params, strict=True):
            vars(param).update(kind.attributes)
        self._optimizer = make([(of.group, of.name, param) for of, param in zip(kinds, self._params, strict=True)])
        before = self._options()
        grads = [torch.zeros_like(param) for param in self._params]
        for step in range(STEPS):
            given = zip(kinds, self._params, grads, strict=True)
            grads = [_gradient(step, kind.number, param.detach(), grad) for kind, param, grad in given]
            _seed(device, step)
            expected = _next(device)
            _seed(device, step)
            self.moves.append(self._step(grads))
            self.draws = ", ".join(sorted(name for name, _ in expected - _next(device))) or self.draws
            if not all(bool(param.isfinite().all()) for param in self._params):
                raise ValueError(f"probe parameters become NaN or Inf in step {step + 1}")
        if not all(any(bool(move.any()) for move in of_one) for of_one in zip(*self.moves, strict=True)):
            raise ValueError(f"probe parameters did not move in {STEPS} steps")
        self.moved = frozenset(changed(before, self._options()))

    def _options(self) -> list[dict[str, str]]:
        return [in_words(hyper_parameters(group)) for group in self._optimizer.param_groups]

    def _step(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Step; returns how far each probe parameter moves."""
        before = [param.detach().clone() for param in self._params]
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        step_alone(self._optimizer)
        return [param.detach() - old for param, old in zip(self._params, before, strict=True)]

    def moves_all(self) -> bool:
        """Whether a step without gradients moves a probe parameter; False if it fails."""
        try:
            return any(bool(move.any()) for move in self._step([None] * len(self._params)))
        except Exception:
            return False

    def size(self, at: int) -> float:
        """The largest value of a probe parameter."""
        return float(self._params[at].detach().abs().max())

    def left(self, at: int) -> dict[str, Any]:
        """The numbers and tensors of the state of a probe parameter, and of its group, by readable names."""
        group = hyper_parameters(self._optimizer.param_groups[self.kinds[at].group])
        values = {"the state": self._optimizer.state.get(self._params[at], {}), "the group": group}
        leaves = ((of, *leaf) for of, value in values.items() for leaf in tree_flatten_with_path(value)[0])
        return {of + keystr(path): value for of, path, value in leaves if isinstance(value, Tensor | int | float)}


def _coupling(run: Callable[[Sequence[_ProbeParameter]], _ProbeRun], whole: _ProbeRun) -> str:
    """What differs first where probe parameters step alone, in words."""
    found = list[tuple[int, str]]()
    for kind in whole.kinds:
        # seeded alike, the first one draws what it draws alone
        together = run([kind, *(of for of in whole.kinds if of is not kind)]) if whole.draws else whole
        found += _differences(together, together.kinds.index(kind), run([kind]))
    return min(found, key=lambda one: one[0])[1] if found else ""


def _differences(whole: _ProbeRun, at: int, alone: _ProbeRun) -> Iterator[tuple[int, str]]:
    """The steps in which a probe parameter moved otherwise than alone, or after which it is left with another state;
    with what differs in words."""
    rounding = ROUNDING * whole.size(at)
    for step, (moves, (move,)) in enumerate(zip(whole.moves, alone.moves, strict=True)):
        size, off = float(torch.maximum(moves[at].abs(), move.abs()).max()), float((moves[at] - move).abs().max())
        if off > TOLERANCE * size + rounding:
            yield step, f"step {step + 1} was off by {100 * off / size:.3g}%"
    right, found = whole.left(at), alone.left(0)
    for name in sorted(right.keys() | found.keys()):
        if name not in right or name not in found or not _alike(right[name], found[name]):
            yield STEPS, f"after {STEPS} steps {name} was another one"


def _alike(right: Any, found: Any) -> bool:
    one, other = (torch.as_tensor(of).detach().to("cpu", torch.complex128) for of in (right, found))
    most = max((float(of.abs().max()) for of in (one, other) if of.numel()), default=0.0)
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=TOLERANCE * most, equal_nan=True)


def _kinds(like: Optimizer) -> list[_ProbeParameter]:
    """Probe parameters of which no two look alike, then one more like the first: those may be coupled, too."""
    found: dict[object, _ProbeParameter] = {}
    has_more = False
    for group, of in enumerate(like.param_groups):
        options = repr(in_words(hyper_parameters(of), amounts=False))
        for name, param in zip(names_of(of), of["params"], strict=True):
            shape = tuple(min(length, SIDE) for length in param.shape)
            role = "".join(char for char in name or "" if not char.isdigit())  # layers have the same
            look = options, shape, role, repr(in_words(vars(param)))
            has_more = has_more or look in found
            if param.numel():
                found.setdefault(look, _ProbeParameter(len(found), group, shape, name, vars(param)))
    kinds = list(found.values())
    if has_more:
        first = kinds[0]
        kinds.append(replace(first, number=len(kinds), name=first.name and f"{first.name} 2"))
    return kinds


def _with_rate(group: dict[str, Any]) -> dict[str, Any]:
    """Options with a learning rate that moves probe parameters: a warmup may begin with zero."""
    rate = group.get("lr")
    return {**group, "lr": SOME_LR} if isinstance(rate, int | float | Tensor) and rate == 0 else group


def _gradient(step: int, number: int, param: Tensor, last: Tensor) -> Tensor:
    """The gradient of a probe parameter: noise, the last one again, its opposite, downhill, in each scale; then
    downhill. Probe parameters of other numbers have other scales."""
    size = SCALES[(step // 4 + number) % len(SCALES)]
    if step % 4 == 3 or step >= STEPS - DOWNHILL:
        return param * (size / param.abs().max().clamp_min(torch.finfo(param.dtype).tiny))
    return (size * _noise(step, number, param.shape, param.device), last, -last)[step % 4]


def _noise(step: int, number: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """The same on every rank; the random state stays as it is."""
    generator = torch.Generator().manual_seed(1000 * number + step + 1)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64, device="cpu").to(device)


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
    """Afterwards random numbers go on as before. Inside the block no warnings."""
    numpy = sys.modules.get("numpy")
    state, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(of_numpy)


def _generators() -> dict[str, Any]:
    """The modules that draw random numbers, other than torch, by whose they are."""
    numpy = sys.modules.get("numpy")
    return {"Python's": random} if numpy is None else {"Python's": random, "numpy's": numpy.random}


def _seed(device: torch.device, number: int) -> None:
    """Seed all generators, so that all ranks find the same."""
    for module in _generators().values():
        module.seed(number)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def _next(device: torch.device) -> set[tuple[str, float]]:
    """The number that each generator draws next, with whose it is."""
    drawn = {name: module.random() for name, module in _generators().items()}
    places = {torch.device("cpu"), device}
    drawn |= {f"torch's on the {place.type}": torch.rand((), device=place).item() for place in places}
    return set(drawn.items())
