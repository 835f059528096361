"""Refuses optimizers whose step on rows is not known to be a step of these rows of the whole."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from types import MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from thunder_zero.plan import Param
from thunder_zero.runtime import registry
from thunder_zero.runtime.optimizers import StepsWhole, names_of, parameters_of
from thunder_zero.runtime.probe import Coupling, Subject, Verdict, moves_without_gradients, probe
from thunder_zero.runtime.stand_ins import CODE, FEW, OWN, attributes_of, described, is_data
from thunder_zero.runtime.state import State

# torch's optimizers that treat every element alone. By exact type: a subclass may do anything, and is probed.
ELEMENTWISE: frozenset[type] = frozenset(
    (
        *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
        *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
    )
)

# What is wrong, and what to do, by what the probe found; completed with the class, its short name and the evidence.
SENTENCES = {
    Coupling.ELEMENTS: (
        "{kind} couples elements of one parameter (on rows of a stand-in {evidence})",
        "use tz.whole({name}, ...), which steps whole parameters, an elementwise optimizer such as AdamW, or stage=0",
    ),
    Coupling.PARAMETERS: (
        "{kind} couples parameters (beside other stand-ins {evidence})",
        "use an optimizer that steps every parameter alone, or stage=0 without tz.whole (the loss that a closure "
        "returns must be equal on all ranks)",
    ),
    Coupling.RANDOM: (
        "{kind} draws random numbers, so the same steps of a stand-in differ ({evidence})",
        "use tz.whole({name}, ...), whose owner of a parameter draws for all of it, or stage=0 with all ranks "
        "seeded alike",
    ),
    Coupling.UNKNOWN: (
        "{kind} may couple elements, and cannot be probed ({evidence})",
        "use tz.whole({name}, ...), or stage=0, or give the transform trust_optimizer=True if it steps each row alone",
    ),
}

# optimizers that the probe let pass, how they looked then, and the options and attributes that their own steps change
_passed: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[object, ...], frozenset[str]]] = weakref.WeakKeyDictionary()


def refuse_coupling(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step: refuse an optimizer that is not known, or found by the probe, to step each row alone.

    Ranks need not talk about it: they have the same class, options and shapes, and the probe the same random numbers.

    Raises:
        RuntimeError: what it couples, or why it cannot be probed.
    """
    if isinstance(optimizer, StepsWhole):  # its parameters were tried when it was made
        return
    if type(optimizer) in ELEMENTWISE:
        return
    looked, moving = _passed.get(optimizer, ((), frozenset()))
    if looked == look_of(optimizer, moving):
        return
    params = parameters_of(optimizer)
    owners = registry.owners_of(params)
    rows = [owner is not None and _needs_probe(*owner) for owner in owners]
    if any(rows):
        shapes = [
            tuple(param.shape) if owner is None else owner[1].shape for param, owner in zip(params, owners, strict=True)
        ]
        verdict = probe(optimizer, _subjects(optimizer, shapes, rows), params[rows.index(True)].device)
        moving = verdict.moved_options | verdict.moved_attributes
        if verdict.coupling is not Coupling.NOTHING:
            path = next(owner[1].path for owner, has_rows in zip(owners, rows, strict=True) if owner and has_rows)
            raise RuntimeError(_refusal(type(optimizer), verdict, path))
    _passed[optimizer] = look_of(optimizer, moving), moving


def refuse_coupled_parameters(
    optimizer: Optimizer, device: torch.device, ranks: int = 2, copies: int = 1
) -> frozenset[str]:
    """Refuse an optimizer that couples parameters, where ranks step whole parameters apart from each other, and one
    that draws random numbers, where a parameter has an owner in each copy of the model.

    Args:
        optimizer: of the class and options that will step, over parameters of the whole shapes; is not stepped itself.
        device: where they are.
        ranks: that share one copy of the model.
        copies: of the model, each with an owner of every parameter.

    Returns:
        The options of groups that the optimizer's own steps change.

    Raises:
        RuntimeError: what it couples, why it cannot be probed, or that it is random.
    """
    shapes = [tuple(param.shape) for param in parameters_of(optimizer)]
    if type(optimizer) in ELEMENTWISE or (len(shapes) == 1 and copies == 1):
        return frozenset()
    verdict = probe(optimizer, _subjects(optimizer, shapes, [False] * len(shapes)), device)
    if verdict.coupling is Coupling.PARAMETERS and ranks > 1:
        (what, action), kind = SENTENCES[verdict.coupling], type(optimizer)
        words = {"kind": f"{kind.__module__}.{kind.__qualname__}", "evidence": verdict.evidence}
        raise RuntimeError(f"{what.format(**words)}, and each rank steps only some of them; {action}")
    if verdict.coupling is Coupling.RANDOM and copies > 1:
        raise RuntimeError(
            f"{type(optimizer).__name__} draws random numbers ({verdict.evidence}), and the {copies} copies of the "
            f"model would draw other ones and drift apart; use an optimizer that draws none, or a mesh of one copy"
        )
    if verdict.coupling is Coupling.UNKNOWN:
        raise RuntimeError(
            f"{type(optimizer).__name__} may couple parameters, and cannot be probed ({verdict.evidence}), and each "
            f"rank steps only some of them; give the transform trust_optimizer=True if it steps every parameter alone, "
            f"or use it in stage=0 without tz.whole"
        )
    return verdict.moved_options


def moves_parameters_without_gradients(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether an optimizer of whole parameters moves those that have no gradient; False if that cannot be tried."""
    shapes = [tuple(param.shape) for param in parameters_of(optimizer)]
    if type(optimizer) in ELEMENTWISE:
        return False
    return moves_without_gradients(optimizer, _subjects(optimizer, shapes, [False] * len(shapes)), device)


def _subjects(optimizer: Optimizer, shapes: Sequence[tuple[int, ...]], sharded: Sequence[bool]) -> list[Subject]:
    members = [
        (number, name, param)
        for number, group in enumerate(optimizer.param_groups)
        for name, param in zip(names_of(group), group["params"], strict=True)
    ]
    return [
        Subject(number, shape, rows, name, dict(vars(param)))
        for (number, name, param), shape, rows in zip(members, shapes, sharded, strict=True)
    ]


def _needs_probe(state: State, param: Param) -> bool:
    return param.sharded and state.plan.world_size > 1 and not state.plan.policy.trust_optimizer


def look_of(optimizer: Optimizer, moving: Collection[str]) -> tuple[object, ...]:
    """What a verdict of the probe is good for: these parameters, their attributes, these options and attributes of the
    optimizer. Amounts may change, as schedulers change them, but not from or to zero; what steps change (``moving``)
    may."""
    params = parameters_of(optimizer)
    marks = (item for param in params for item in vars(param).items())
    options = (item for group in optimizer.param_groups for item in group.items() if item[0] not in OWN)
    own = {} if isinstance(optimizer, StepsWhole) else attributes_of(optimizer)
    attributes = (item for item in own.items() if isinstance(item[1], MethodType) or is_data(item[1]))
    items = [*marks, *(item for item in (*options, *attributes) if item[0] not in moving)]
    return *map(id, params), *((name, _kind_of(value)) for name, value in items)


def _kind_of(value: object) -> object:
    """What of a value may change what is coupled."""
    if isinstance(value, Mapping):
        return tuple((str(key), _kind_of(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_kind_of, value))
    if isinstance(value, Tensor):
        few = value.numel() <= FEW and value.device.type == "cpu"  # elsewhere the host would wait
        return tuple(map(bool, value.detach().flatten().tolist())) if few else None
    if isinstance(value, (MethodType, *CODE)):
        return described(value.__func__ if isinstance(value, MethodType) else value)
    if isinstance(value, float):
        return bool(value)
    return value if isinstance(value, bool | int | str | NoneType | Enum) else None


def _refusal(kind: type, verdict: Verdict, path: str) -> str:
    what, action = SENTENCES[verdict.coupling]
    words = {"kind": f"{kind.__module__}.{kind.__qualname__}", "name": kind.__name__, "evidence": verdict.evidence}
    return f"{what.format(**words)}, and each rank has only some rows of parameter {path!r}; {action.format(**words)}"
