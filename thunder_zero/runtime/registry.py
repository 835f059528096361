"""Finds the sharded model of a shard, or of an original parameter.

Weak tables: they keep no model and no tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_zero.comm.group import has_groups
from thunder_zero.compat.exit import at_exit
from thunder_zero.plan import Param
from thunder_zero.runtime.state import State

_states: weakref.WeakSet[State] = weakref.WeakSet()
# a plain module's parameter before the transform -> (path, state)
_replaced = WeakTensorKeyDictionary()
# shard -> its path
_shards = WeakTensorKeyDictionary()


def register(state: State, module: nn.Module) -> None:
    """Enter a model's tensors.

    Args:
        state: the model's.
        module: the plain module, which still has its own parameters.
    """
    _states.add(state)
    for path, shard in state.shards.items():
        _replaced[module.get_parameter(path)] = (path, weakref.ref(state))
        _shards[shard] = path


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


def is_transformed(param: nn.Parameter) -> bool:
    """Whether the parameter is a shard: its module was transformed before, by a model that may be gone."""
    return param in _shards


def shard_instead_of(param: Tensor) -> nn.Parameter | None:
    """The shard of a plain module's parameter, given the parameter as it was before the transform; None for any other
    tensor."""
    path, state = _replaced.get(param, (None, None))
    owner = None if state is None else state()
    return None if owner is None else owner.shards[path]


def owners_of(params: Iterable[Tensor]) -> list[tuple[State, Param] | None]:
    """The model and the parameter that each of these is the shard of; None for any other tensor."""
    owned = {id(shard): (state, path) for state in _states for path, shard in state.shards.items()}
    found = [owned.get(id(param)) for param in params]
    return [None if owner is None else (owner[0], owner[0].plan.by_name[owner[1]]) for owner in found]
