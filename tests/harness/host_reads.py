"""Counts the places where the host reads a tensor's value. On a GPU the host waits there for all earlier work.

The profiler sees operators of compiled programs, too. ``tolist`` and its like read a value but call no operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from torch import Tensor
from torch.autograd.profiler import profile

READS = frozenset(f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"))
METHODS = ("tolist", "numpy", "cpu")


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Yield a list that has, after the block, the names of the methods and then of the operators that read."""
    seen: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        @wraps(method)
        def read(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return method(*args, **kwargs)

        return read

    with ExitStack() as patches, profile() as profiled:
        for name in METHODS:
            patches.enter_context(mock.patch.object(Tensor, name, noted(name)))
        yield seen
    seen += [event.name.removeprefix("aten::") for event in profiled.function_events if event.name in READS]
