"""Drops deferred gradients where ``zero_grad`` of an optimizer drops all others.

``no_sync`` keeps them outside of ``.grad``, where ``zero_grad`` does not look. torch has no hook for it, but it opens a
range of the profiler, by an operator, before it looks at gradients, and closes it after. So at the first we give the
parameters in question a gradient to drop, if they have none, and at the second see what became of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thunder_zero.compat.in_front import put_in_front
from thunder_zero.runtime import registry
from thunder_zero.runtime.state import State

RANGE = "Optimizer.zero_grad#"  # and the optimizer's class; see torch.optim.Optimizer


@dataclass(frozen=True, eq=False)
class Mark:
    """What the shard of one deferred gradient has in ``.grad`` while an optimizer drops gradients."""

    state: State
    path: str
    grad: Tensor
    version: int
    is_ours: bool

    @property
    def shard(self) -> nn.Parameter:
        """The parameter's rows."""
        return self.state.shards[self.path]

    @property
    def was_dropped(self) -> bool:
        """Whether the optimizer has removed or overwritten it."""
        return self.shard.grad is not self.grad or self.grad._version != self.version


class Open(threading.local):
    """The marks of the ``zero_grad`` that runs in this thread."""

    marks: tuple[Mark, ...] = ()


_open = Open()


def watch() -> None:
    """From now on drop what any optimizer drops."""
    put_in_front(torch.ops.profiler._record_function_enter_new.default, _enter)
    put_in_front(torch.ops.profiler._record_function_exit._RecordFunction, _exit)


def _enter(enter: Callable[..., Any], name: str, args: str | None = None) -> Any:
    if name.startswith(RANGE):
        _open.marks = tuple(_mark(state, path) for state in registry.states() for path in state.accumulation.paths)
    return enter(name, args)


def _exit(leave: Callable[..., Any], record: Any) -> None:
    marks, _open.marks = _open.marks, ()
    for mark in marks:
        if mark.was_dropped:
            mark.state.drop_deferred_of(mark.path)
        elif mark.is_ours:
            mark.shard.grad = None
    leave(record)


def _mark(state: State, path: str) -> Mark:
    shard = state.shards[path]
    is_ours = shard.grad is None
    if shard.grad is None:
        shard.grad = torch.empty_like(shard)
    return Mark(state, path, shard.grad, shard.grad._version, is_ours)
