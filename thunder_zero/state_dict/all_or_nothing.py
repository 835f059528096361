"""Writes what was read for a model and its optimizers: all of it on all ranks, or nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_zero.comm.agree import all_or_none


@dataclass(frozen=True, slots=True)
class Pending:
    """What was read for this rank, and is nowhere written yet.

    Attributes:
        tensors: pairs of what is in the model and what shall be in it, of one shape.
        states: what takes a state, and may refuse it, each with the call that gives it one.
    """

    tensors: Sequence[tuple[Tensor, Tensor]]
    states: Sequence[tuple[Any, Callable[[], object]]]


@dataclass(frozen=True, slots=True)
class OwnState:
    """What a module adds to a state dict itself, as something that is given a state and gives it back."""

    module: nn.Module

    def state_dict(self) -> Any:
        """What ``get_extra_state`` returns."""
        return self.module.get_extra_state()

    def load_state_dict(self, state: Any) -> None:
        """Hand it to ``set_extra_state``."""
        self.module.set_extra_state(state)


@torch.no_grad()
def write_all_or_none(parts: Sequence[Pending], group: dist.ProcessGroup) -> None:
    """Write all of it, or nothing, if what takes a state refuses it on any rank; a collective.

    Raises:
        Exception: what it refused with here.
        RuntimeError: another rank refused.
    """
    states = [pair for part in parts for pair in part.states]
    with all_or_none(group, "to load"):
        before = restored([thing for thing, _ in states])
    with before:
        with all_or_none(group, "to load"):
            for _, give in states:
                give()
        before.pop_all()
    for target, value in (pair for part in parts for pair in part.tensors):
        target.copy_(value)  # which ZeRO-1 sees by the shard's version


def restored(things: Sequence[Any]) -> ExitStack:
    """A context that gives things with ``state_dict`` what they have now back, unless its ``pop_all`` was called.

    One that does not take it is left as it is: it refused what it was given, too. Of optimizers no copies are made:
    loading gives them other tensors, and leaves these.
    """
    stack = ExitStack()
    for thing in things:
        if isinstance(thing, Optimizer):
            stack.callback(_restore_optimizer, thing, thing.state, thing.param_groups)
        else:
            stack.callback(_restore, thing, copy.deepcopy(thing.state_dict()))
    return stack


def _restore_optimizer(optimizer: Optimizer, state: Any, groups: list[dict[str, Any]]) -> None:
    optimizer.state, optimizer.param_groups = state, groups


def _restore(thing: Any, before: Any) -> None:
    with suppress(Exception):
        thing.load_state_dict(before)
