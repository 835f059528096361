"""Finds the sharded model of a shard, or of a plain module's parameter that a shard took the place of.

Weak tables: they keep no model and no tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_zero.comm.group import has_groups
from thunder_zero.compat.exit import at_exit
from thunder_zero.plan import Param
from thunder_zero.runtime.dtensors import local
from thunder_zero.runtime.state import State

_states: weakref.WeakSet[State] = weakref.WeakSet()
_replaced = WeakTensorKeyDictionary()  # a plain module's parameter of before the transform -> (path, state)


def register(state: State, module: nn.Module) -> None:
    """Enter a model; its plain module still has its own parameters."""
    _states.add(state)
    for path in state.shards:
        _replaced[module.get_parameter(path)] = (path, weakref.ref(state))


def _leave_groups() -> None:
    """At exit: let torch join gloo's threads, which it does when the last reference to a destroyed group goes.

    Such a thread may still have to drop the tensors of the last collective; once the interpreter ends, that aborts the
    process. Groups that were not destroyed are torch's: another handler at exit may still save a model.
    """
    if not has_groups():
        for state in states():
            state.leave_group()


at_exit(_leave_groups)


def states() -> list[State]:
    """The states of all models that are alive."""
    return list(_states)


def replaced_path(param: Tensor) -> str | None:
    """The path of a plain module's parameter that a shard took the place of; None of any other tensor."""
    path, state = _replaced.get(param, (None, None))
    return None if state is None or state() is None else path


def shard_instead_of(param: Tensor) -> nn.Parameter | None:
    """The shard in the place of a plain module's parameter of before the transform; None for any other tensor."""
    path, state = _replaced.get(param, (None, None))
    owner = None if state is None else state()
    return None if owner is None else owner.shards[path]


def are_transformed(params: Sequence[nn.Parameter]) -> bool:
    """Whether any of these is a shard already, perhaps of a model that is gone, or another DTensor."""
    return any(local(param) is not param for param in params) or any(owners_of(params))


def owners_of(params: Iterable[Tensor]) -> list[tuple[State, Param] | None]:
    """The model and the parameter that each of these is the shard of; None for any other tensor."""
    owned = {id(shard): (state, path) for state in _states for path, shard in state.shards.items()}
    found = [owned.get(id(param)) for param in params]
    return [None if owner is None else (owner[0], owner[0].plan.by_name[owner[1]]) for owner in found]
