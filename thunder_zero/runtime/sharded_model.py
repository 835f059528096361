"""The interface of a sharded model for training loops, checkpoints and state dicts.

A front end, such as ``thunder.jit`` with ZeroTransform, makes models that implement it; code that uses them does not
know which front end made them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from torch import nn

from thunder_zero.comm.places import doing
from thunder_zero.runtime.state import State

Function = TypeVar("Function", bound=Callable[..., Any])


class ShardedModel(nn.Module):
    """A model whose parameters are shards.

    ``named_parameters`` gives the shards and ``named_buffers`` the buffers, under the plain module's names.
    """

    @property
    @abstractmethod
    def state(self) -> State:
        """This rank's share of the model."""

    @property
    @abstractmethod
    def plain(self) -> nn.Module:
        """The module that was sharded; it has the shards."""

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


def is_place(what: str) -> Callable[[Function], Function]:
    """Makes a public function that is a collective a place: errors about ranks that differ call it ``what``."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            models = [given for given in (*args, *kwargs.values()) if isinstance(given, ShardedModel)]
            with doing(" of ".join([what, *(model.state.name for model in models)])):
                return function(*args, **kwargs)

        return cast(Function, named)

    return decorate


def sharded_model(model: object) -> ShardedModel:
    """The model, if it is sharded.

    Raises:
        TypeError: it is not.
    """
    if isinstance(model, ShardedModel):
        return model
    raise TypeError(
        f"expected a module jitted with ZeroTransform, got {type(model).__name__}; make one with "
        f"thunder.jit(module, transforms=[thunder_zero.ZeroTransform(...)])"
    )
