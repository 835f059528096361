"""Writes loaded values into a model and its optimizers: all of them on all ranks, or none."""

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

Pairs = Sequence[tuple[Tensor, Tensor]]  # this rank's part of a tensor, and its new values, which were read
States = Sequence[tuple[Any, Callable[[], object]]]  # what has a state, and the call that loads it, which may raise


@dataclass(frozen=True, slots=True)
class OwnState:
    """A module's extra state, behind ``state_dict`` and ``load_state_dict``."""

    module: nn.Module

    def state_dict(self) -> Any:
        """Call ``get_extra_state``."""
        return self.module.get_extra_state()

    def load_state_dict(self, state: Any) -> None:
        """Call ``set_extra_state``."""
        self.module.set_extra_state(state)


@torch.no_grad()
def write_all_or_none(tensors: Pairs, states: States, group: dist.ProcessGroup) -> None:
    """Write all values, or none, if loading a state raises on any rank; a collective.

    Raises:
        Exception: the error on this rank.
        RuntimeError: the error is another rank's.
    """
    with all_or_none(group, "to load"):
        before = restored([thing for thing, _ in states])
    with before:
        with all_or_none(group, "to load"):
            for _, give in states:
                give()
        before.pop_all()
    for target, value in tensors:
        target.copy_(value)


def restored(things: Sequence[Any]) -> ExitStack:
    """A context that restores the present states of objects at its end, unless its ``pop_all`` was called.

    An object that refuses its old state keeps the one that it has. Optimizers' states are not copied: loading replaces
    their tensors, and leaves the old ones unchanged.
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
