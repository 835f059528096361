"""Probes an optimizer on small parameters: does it couple them, draw numbers, or change options?

All probe parameters are stepped together, then each is stepped alone. A difference proves that the optimizer couples
parameters. Equal results prove nothing: other gradients or later steps may couple them.
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
from thunder_zero.optim.options import changed_names, describe_values, hyper_parameters, names_of
from thunder_zero.optim.stepper import GroupedParams

SIDE = 32  # the maximum number of rows or columns of a probe parameter
SCALES = (1.0, 1e-6, 1e3)  # sizes of gradients: squares are far from Inf and zero in float64
DOWNHILL = 8  # number of last steps, all in one direction, since some optimizers measure progress
STEPS = 4 * len(SCALES) + DOWNHILL
SOME_LR = 1e-3
TOLERANCE = 1e-6  # relative to a probe parameter's step, or to the largest value of a state
ROUNDING = 64 * torch.finfo(torch.float64).eps  # relative to a probe parameter's largest value
COMMUNICATES = ("c10d", "_c10d_functional", "symm_mem")  # namespaces of torch's collectives

MakeOn = Callable[[Sequence[Mapping[str, Any]], GroupedParams], Optimizer]  # takes options of groups, and parameters


@dataclass(frozen=True, slots=True)
class ProbeResult:
    couples: str = ""  # a difference between stepping a parameter alone and with others
    draws: str = ""  # the names of the generators that a step draws from
    unknown: str = ""  # the reason why the optimizer cannot be probed
    fails_empty: str = ""  # the error of a step of groups without parameters
    moving: frozenset[str] = frozenset()  # the options of groups that steps change
    moving_if_any: frozenset[str] = frozenset()  # those that steps change only in groups with parameters
    moves_all: bool = False  # True if a step also updates parameters whose gradient is None


@dataclass(frozen=True, eq=False)
class _ProbeParameter:
    number: int  # seeds its values
    group: int
    shape: tuple[int, ...]
    name: str | None
    attributes: Mapping[str, Any]


def probe_optimizer(make_on: MakeOn, like: Optimizer, device: torch.device) -> ProbeResult:
    """Probe an optimizer like ``like``, which is not stepped. Ranks with equal options get equal results."""
    groups, kinds = [_with_rate(hyper_parameters(group)) for group in like.param_groups], _kinds(like)

    def run(probed: Sequence[_ProbeParameter]) -> _ProbeRun:
        return _ProbeRun(lambda params: make_on(groups, params), probed, device)

    no_collectives: Any = NoCollectives  # torch's constructor has no types
    with _preserved_random_state(device), no_collectives():
        fails_empty, moved_empty = "", frozenset[str]()
        try:
            moved_empty = run([]).moved
        except Exception as error:
            fails_empty = _in_short(error)
        try:
            together = run(kinds)
            couples = _first_difference(run, together)
        except Exception as error:
            return ProbeResult(unknown=_in_short(error), fails_empty=fails_empty)
        moving_if_any = together.moved - moved_empty
        return ProbeResult(
            couples, together.draws, "", fails_empty, together.moved, moving_if_any, together.moves_all()
        )


class _ProbeRun:
    def __init__(
        self, make: Callable[[GroupedParams], Optimizer], kinds: Sequence[_ProbeParameter], device: torch.device
    ) -> None:
        self.kinds, self.draws = kinds, ""
        self.moves: list[list[Tensor]] = []  # for each step, the change of each probe parameter
        _seed(device, 0)
        self._params = [nn.Parameter(0.1 * _noise(-1, kind.number, kind.shape, device)) for kind in kinds]
        for kind, param in zip(kinds, self._params, strict=True):
            vars(param).update(kind.attributes)
        self._optimizer = make(
            [(kind.group, kind.name, param) for kind, param in zip(kinds, self._params, strict=True)]
        )
        initial_options = self._options()
        grads = [torch.zeros_like(param) for param in self._params]
        for step in range(STEPS):
            triples = zip(kinds, self._params, grads, strict=True)
            grads = [_gradient(step, kind.number, param.detach(), grad) for kind, param, grad in triples]
            _seed(device, step)
            expected = _next_numbers(device)
            _seed(device, step)
            self.moves.append(self._step(grads))
            self.draws = ", ".join(sorted(name for name, _ in expected - _next_numbers(device))) or self.draws
            if not all(bool(param.isfinite().all()) for param in self._params):
                raise ValueError(f"probe parameters become NaN or Inf in step {step + 1}")
        if not all(any(bool(move.any()) for move in moves) for moves in zip(*self.moves, strict=True)):
            raise ValueError(f"probe parameters did not move in {STEPS} steps")
        self.moved = frozenset(changed_names(initial_options, self._options()))

    def _options(self) -> list[dict[str, str]]:
        return [describe_values(hyper_parameters(group)) for group in self._optimizer.param_groups]

    def _step(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        old_values = [param.detach().clone() for param in self._params]
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        step_alone(self._optimizer)
        return [param.detach() - old for param, old in zip(self._params, old_values, strict=True)]

    def moves_all(self) -> bool:
        """Return whether a step without gradients changes a probe parameter. Return False if that step fails."""
        try:
            return any(bool(move.any()) for move in self._step([None] * len(self._params)))
        except Exception:
            return False

    def size(self, index: int) -> float:
        return float(self._params[index].detach().abs().max())

    def state_after(self, index: int) -> dict[str, Any]:
        """Return the numbers and tensors in a probe parameter's state and group, keyed by readable names."""
        group = hyper_parameters(self._optimizer.param_groups[self.kinds[index].group])
        values = {"the state": self._optimizer.state.get(self._params[index], {}), "the group": group}
        leaves = ((label, *leaf) for label, value in values.items() for leaf in tree_flatten_with_path(value)[0])
        return {label + keystr(path): value for label, path, value in leaves if isinstance(value, Tensor | int | float)}


def _first_difference(run: Callable[[Sequence[_ProbeParameter]], _ProbeRun], joint: _ProbeRun) -> str:
    """Describe the first difference between stepping a probe parameter alone and with all; "" if there is none."""
    differences = list[tuple[int, str]]()
    for kind in joint.kinds:
        # Runs have equal seeds. The parameter comes first, so that it draws equal random numbers in both runs.
        together = run([kind, *(other for other in joint.kinds if other is not kind)]) if joint.draws else joint
        differences += _differences(together, together.kinds.index(kind), run([kind]))
    return min(differences, key=lambda difference: difference[0])[1] if differences else ""


def _differences(joint: _ProbeRun, index: int, single: _ProbeRun) -> Iterator[tuple[int, str]]:
    """Yield (step, text) tuples for the differences of a probe parameter between a run with all, and a run alone."""
    rounding = ROUNDING * joint.size(index)
    for step, (moves, (move,)) in enumerate(zip(joint.moves, single.moves, strict=True)):
        size = float(torch.maximum(moves[index].abs(), move.abs()).max())
        error = float((moves[index] - move).abs().max())
        if error > TOLERANCE * size + rounding:
            yield step, f"step {step + 1} was off by {100 * error / size:.3g}%"
    state, expected = joint.state_after(index), single.state_after(0)
    for name in sorted(state.keys() | expected.keys()):
        if name not in state or name not in expected or not _is_close(state[name], expected[name]):
            yield STEPS, f"after {STEPS} steps {name} was another one"


def _is_close(first: Any, second: Any) -> bool:
    first, second = (torch.as_tensor(value).detach().to("cpu", torch.complex128) for value in (first, second))
    largest = max((float(value.abs().max()) for value in (first, second) if value.numel()), default=0.0)
    return first.shape == second.shape and torch.allclose(
        first, second, rtol=0, atol=TOLERANCE * largest, equal_nan=True
    )


def _kinds(like: Optimizer) -> list[_ProbeParameter]:
    """Return a probe parameter for each kind of parameter: equal options, shapes, attributes, and names but for digits.

    If any kind has several, add a second probe parameter of the first kind, since they may be coupled.
    """
    by_description: dict[object, _ProbeParameter] = {}
    has_several = False
    for number, group in enumerate(like.param_groups):
        options = repr(describe_values(hyper_parameters(group), amounts=False))
        for name, param in zip(names_of(group), group["params"], strict=True):
            shape = tuple(min(length, SIDE) for length in param.shape)
            role = "".join(char for char in name or "" if not char.isdigit())  # names are equal for all layers
            key = options, shape, role, repr(describe_values(vars(param)))
            has_several = has_several or key in by_description
            if param.numel():
                probe_param = _ProbeParameter(len(by_description), number, shape, name, vars(param))
                by_description.setdefault(key, probe_param)
    kinds = list(by_description.values())
    if has_several:
        first = kinds[0]
        kinds.append(replace(first, number=len(kinds), name=first.name and f"{first.name} 2"))
    return kinds


def _with_rate(group: dict[str, Any]) -> dict[str, Any]:
    """Return options in which a small learning rate replaces zero, the rate at the start of some warmups."""
    rate = group.get("lr")
    return {**group, "lr": SOME_LR} if isinstance(rate, int | float | Tensor) and rate == 0 else group


def _gradient(step: int, number: int, param: Tensor, previous: Tensor) -> Tensor:
    """Return the gradient of a probe parameter in a step.

    Each scale has four steps: noise, equal noise, its negative, and a step towards zero, as all of the last steps are.
    """
    size = SCALES[(step // 4 + number) % len(SCALES)]
    if step % 4 == 3 or step >= STEPS - DOWNHILL:
        return param * (size / param.abs().max().clamp_min(torch.finfo(param.dtype).tiny))
    return (size * _noise(step, number, param.shape, param.device), previous, -previous)[step % 4]


def _noise(step: int, number: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return noise that is equal on every rank, without using the default generators."""
    generator = torch.Generator().manual_seed(1000 * number + step + 1)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64, device="cpu").to(device)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


class NoCollectives(TorchDispatchMode):
    """A mode in which collectives raise. They would hang, since ranks step different parameters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COMMUNICATES:
            raise RuntimeError(f"its step calls the collective {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def _preserved_random_state(device: torch.device) -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def _generators() -> dict[str, Any]:
    """Return the random generators outside of torch, by their name in errors."""
    numpy = sys.modules.get("numpy")
    return {"Python's": random} if numpy is None else {"Python's": random, "numpy's": numpy.random}


def _seed(device: torch.device, number: int) -> None:
    for module in _generators().values():
        module.seed(number)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def _next_numbers(device: torch.device) -> set[tuple[str, float]]:
    drawn = {name: module.random() for name, module in _generators().items()}
    devices = {torch.device("cpu"), device}
    drawn |= {f"torch's on the {place.type}": torch.rand((), device=place).item() for place in devices}
    return set(drawn.items())
