"""A sharded model as loops, checkpoints and state dicts see it; finds the model of a shard.

A front end, such as ``thunder.jit`` with ZeroTransform, makes models of this class. Code that uses them does not know
which front end made them. The tables that find a model, by a shard or by the parameter that it replaced, keep nothing
alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import destroy_groups_after_error, has_groups, tell_launcher
from thunder_zero.compat.torch.groups import at_exit
from thunder_zero.plan.params import Param
from thunder_zero.sharded.printed import format_model
from thunder_zero.sharded.state import State

Function = TypeVar("Function", bound=Callable[..., Any])


class ShardedModel(nn.Module):
    """A model whose parameters are shards.

    ``named_parameters`` gives the shards and ``named_buffers`` the buffers, under the plain module's names.
    """

    _state: State
    _model: nn.Module

    @property
    def state(self) -> State:
        """Return this rank's state of the model."""
        return self._state

    @property
    def plain(self) -> nn.Module:
        """Return the module that was sharded; its parameters are the shards."""
        return self._model

    def __repr__(self) -> str:
        """Return stage, ranks, units and bytes at rest; then the plain module with the shapes of rows."""
        return format_model(type(self).__name__, self.plain, self.state)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep full gradients instead of reducing them; the next backward outside reduces the sum.

        As in PyTorch the forward decides: a backward defers its gradients if its forward ran inside the block.

        Deferred gradients are not in ``.grad``. ``zero_grad`` of the model drops them. An optimizer's ``zero_grad``, as
        in FSDP2, and ``param.grad = None`` do not. Drop those that the end of an epoch leaves, or they are added to the
        next gradients.

        >>> with model.no_sync():
        ...     for x in micro_batches[:-1]:
        ...         loss(model(x)).backward()
        >>> loss(model(micro_batches[-1])).backward()
        """
        with self.state.accumulation.unsynced():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do as ``nn.Module.zero_grad``; also drop the gradients that ``no_sync`` has deferred."""
        super().zero_grad(set_to_none)
        self.state.drop_deferred()


def tagged(what: str) -> Callable[[Function], Function]:
    """Return a decorator that tags a public function which is a collective: errors about ranks that differ call it
    ``what``."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            models = [value for value in (*args, *kwargs.values()) if isinstance(value, ShardedModel)]
            with doing(" of ".join([what, *(model.state.name for model in models)])):
                return function(*args, **kwargs)

        return cast(Function, wrapper)

    return decorate


def sharded_model(model: object) -> ShardedModel:
    """Return the model, if it is sharded.

    Raises:
        TypeError: it is not.
    """
    if isinstance(model, ShardedModel):
        return model
    raise TypeError(
        f"expected a sharded model, got {type(model).__name__}; pass the model itself, which thunder_zero.compile (or "
        f"thunder.jit with ZeroTransform) returned"
    )


class ShardEntry(NamedTuple):
    """The model and the path of a shard, or of a parameter that a plain module had before the transform."""

    state: weakref.ref[State]
    path: str
    is_shard: bool


_states: weakref.WeakSet[State] = weakref.WeakSet()
_entries = WeakTensorKeyDictionary()
_replaced_ids: set[int] = set()  # ids of replaced parameters; another tensor may have the id of one that is gone


def register(state: State, module: nn.Module) -> None:
    """Enter a model's tensors into the tables; the plain module still has its own parameters."""
    _states.add(state)
    for path, shard in state.shards.items():
        original = module.get_parameter(path)
        _entries[original] = ShardEntry(weakref.ref(state), path, is_shard=False)
        _replaced_ids.add(id(original))
        _entries[shard] = ShardEntry(weakref.ref(state), path, is_shard=True)


def _leave_groups() -> None:
    """Let torch join gloo's threads, as it does when the last reference to a destroyed group goes; called at exit.

    A thread that drops tensors once the interpreter ends aborts the process. Groups that were not destroyed stay:
    another handler at exit may still save a model, unless an error ended the script.
    """
    tell_launcher()
    destroy_groups_after_error()
    if not has_groups():
        for state in states():
            state.leave_group()


at_exit(_leave_groups)


def states() -> list[State]:
    """Return the states of all models that are alive."""
    return list(_states)


def is_transformed(param: nn.Parameter) -> bool:
    """Return whether the parameter is a shard: its module was transformed before, by a model that may be gone."""
    return param in _entries and _entries[param].is_shard


def owner_of(param: Tensor, *, is_shard: bool = True) -> tuple[State, Param] | None:
    """Return the model and the parameter that a tensor is the shard of; None for any other tensor."""
    entry: ShardEntry | None = _entries.get(param)
    state = None if entry is None or entry.is_shard is not is_shard else entry.state()
    return None if entry is None or state is None else (state, state.plan.by_name[entry.path])


def owners_of(params: Iterable[Tensor]) -> list[tuple[State, Param] | None]:
    """Return :func:`owner_of` each tensor."""
    return list(map(owner_of, params))


def has_replaced(params: Iterable[Tensor]) -> bool:
    """Return whether :func:`owner_of_replaced` may find any of these; a quick look, before every step of an
    optimizer."""
    return not _replaced_ids.isdisjoint(map(id, params))


def owner_of_replaced(param: Tensor) -> tuple[State, Param] | None:
    """Return the model and the parameter that a tensor was before the transform; None for any other tensor."""
    return owner_of(param, is_shard=False)
