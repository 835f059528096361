"""A sharded model as loops, checkpoints and state dicts see it; finds the model of a shard.

A front end, such as ``thunder.jit`` with ZeroTransform, makes models of this class; code that uses them does not know
which front end made them. What is found, by a shard or by the parameter that it replaced, is not kept alive.
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
from thunder_zero.sharded.printed import printed
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
        """This rank's share of the model."""
        return self._state

    @property
    def plain(self) -> nn.Module:
        """The module that was sharded; it has the shards."""
        return self._model

    def __repr__(self) -> str:
        """Stage, ranks, units and bytes at rest; then the plain module with the shapes of rows."""
        return printed(type(self).__name__, self.plain, self.state)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep full gradients instead of reducing them; the next backward outside reduces the sum.

        As in PyTorch the forward decides: a backward defers its gradients if its forward ran inside of the block.

        Deferred gradients are not in ``.grad``. ``zero_grad`` of the model drops them; an optimizer's, as in FSDP2, and
        ``param.grad = None`` do not. Drop those that the end of an epoch leaves, or they are added to the next
        gradients.

        >>> with model.no_sync():
        ...     for x in micro_batches[:-1]:
        ...         loss(model(x)).backward()
        >>> loss(model(micro_batches[-1])).backward()
        """
        with self.state.accumulation.unsynced():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``; also drops the gradients that ``no_sync`` has deferred."""
        super().zero_grad(set_to_none)
        self.state.drop_deferred()


def tagged(what: str) -> Callable[[Function], Function]:
    """Gives a public function that is a collective its tag: errors about ranks that differ call it ``what``."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            models = [given for given in (*args, *kwargs.values()) if isinstance(given, ShardedModel)]
            with doing(" of ".join([what, *(model.state.name for model in models)])):
                return function(*args, **kwargs)

        return cast(Function, named)

    return decorate


def sharded_model(model: object) -> ShardedModel:
    """The model, if it is sharded."""
    if isinstance(model, ShardedModel):
        return model
    raise TypeError(
        f"expected a sharded model, got {type(model).__name__}; pass the model itself, which thunder_zero.compile (or "
        f"thunder.jit with ZeroTransform) returned"
    )


class ShardEntry(NamedTuple):
    """A shard, or a parameter that a plain module had before the transform: its model, its path there."""

    state: weakref.ref[State]
    path: str
    is_shard: bool


_states: weakref.WeakSet[State] = weakref.WeakSet()
_entries = WeakTensorKeyDictionary()
_replaced_ids: set[int] = set()  # of the plain modules' parameters in it; where one is gone, another tensor may have it


def register(state: State, module: nn.Module) -> None:
    """Enter a model's tensors; the plain module still has its own parameters."""
    _states.add(state)
    for path, shard in state.shards.items():
        original = module.get_parameter(path)
        _entries[original] = ShardEntry(weakref.ref(state), path, is_shard=False)
        _replaced_ids.add(id(original))
        _entries[shard] = ShardEntry(weakref.ref(state), path, is_shard=True)


def _leave_groups() -> None:
    """At exit: let torch join gloo's threads, as it does when the last reference to a destroyed group goes; one that
    drops tensors once the interpreter ends aborts the process. Groups that were not destroyed stay: another handler at
    exit may still save a model, unless an error ended the script."""
    tell_launcher()
    destroy_groups_after_error()
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


def owner_of(param: Tensor, *, is_shard: bool = True) -> tuple[State, Param] | None:
    """The model and the parameter that this is the shard of; None for any other tensor."""
    entry: ShardEntry | None = _entries.get(param)
    state = None if entry is None or entry.is_shard is not is_shard else entry.state()
    return None if entry is None or state is None else (state, state.plan.by_name[entry.path])


def owners_of(params: Iterable[Tensor]) -> list[tuple[State, Param] | None]:
    """:func:`owner_of` each of these."""
    return list(map(owner_of, params))


def may_be_replaced(params: Iterable[Tensor]) -> bool:
    """Whether :func:`replaced` may find any of these; a quick look, before every step of an optimizer."""
    return not _replaced_ids.isdisjoint(map(id, params))


def replaced(param: Tensor) -> tuple[State, Param] | None:
    """The model, and the parameter that this was before the transform; None for any other tensor."""
    return owner_of(param, is_shard=False)
