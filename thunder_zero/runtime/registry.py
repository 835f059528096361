"""Finds the sharded model of a shard, or of the parameter that it replaced; keeps none alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_zero.comm.group import has_groups
from thunder_zero.compat.exit import at_exit
from thunder_zero.plan import Param
from thunder_zero.runtime.state import State


class Entry(NamedTuple):
    """A shard, or a parameter that a plain module had before the transform: its model, its path there."""

    state: weakref.ref[State]
    path: str
    is_shard: bool


_states: weakref.WeakSet[State] = weakref.WeakSet()
_entries = WeakTensorKeyDictionary()


def register(state: State, module: nn.Module) -> None:
    """Enter a model's tensors; the plain module still has its own parameters."""
    _states.add(state)
    for path, shard in state.shards.items():
        _entries[module.get_parameter(path)] = Entry(weakref.ref(state), path, is_shard=False)
        _entries[shard] = Entry(weakref.ref(state), path, is_shard=True)


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


def is_transformed(param: nn.Parameter) -> bool:
    """Whether the parameter is a shard: its module was transformed before, by a model that may be gone."""
    return param in _entries and _entries[param].is_shard


def owner_of(param: Tensor) -> tuple[State, Param] | None:
    """The model and the parameter that this is the shard of; None for any other tensor."""
    return _found(param, is_shard=True)


def owners_of(params: Iterable[Tensor]) -> list[tuple[State, Param] | None]:
    """:func:`owner_of` each of these."""
    return list(map(owner_of, params))


def replaced(param: Tensor) -> tuple[State, Param] | None:
    """The model, and the parameter that this was before the transform; None for any other tensor."""
    return _found(param, is_shard=False)


def _found(param: Tensor, *, is_shard: bool) -> tuple[State, Param] | None:
    entry: Entry | None = _entries.get(param)
    state = None if entry is None or entry.is_shard is not is_shard else entry.state()
    return None if entry is None or state is None else (state, state.plan.by_name[entry.path])
