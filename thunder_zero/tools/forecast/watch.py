"""Records when the storages of meta tensors are allocated and freed.

A storage counts once, for any number of views. Its address identifies it, and a weak reference reports when it is
freed. The watched code may name any device, and may use materialized tensors. New tensors are on the meta device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from thunder_zero.compat.private import run_with_rng_state
from thunder_zero.compat.slice_generators import GENERATOR_OF_SLICE
from thunder_zero.tools.forecast.figures import Holds

META = torch.device("meta")
STATE_BYTES = len(torch.Generator().get_state())


class NoForecast(RuntimeError):
    """Raised if code does not run on meta tensors. The message names the code."""


@contextmanager
def needs_no_values(subject: str, action: str) -> Iterator[None]:
    """Convert torch's errors on meta tensors inside the block to ``NoForecast``.

    The message begins with ``subject``, such as "the loss: it", and ends with ``action``.
    """
    try:
        yield
    except NoForecast:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise NoForecast(
            f"cannot forecast {subject} does not run on tensors without values ({reason}); {action}"
        ) from error


@dataclass(slots=True)
class Allocation:
    """The life of a storage, from allocation to free."""

    nbytes: int  # the size of the storage
    line: int  # the number of the line that allocated the storage; 0 before the first line
    born: int  # the number of allocations and frees before the storage was allocated
    kind: Holds  # the kind of data in the storage. The kind is final when the allocating line has run.
    freed: int | None = None  # the number of allocations and frees before the storage was freed; None while it is alive
    name: str = ""  # as in :class:`thunder_zero.tools.forecast.figures.Storage`; "" until the name is known

    def is_alive_after(self, events: int) -> bool:
        """Return whether the storage is alive after this number of allocations and frees."""
        return self.born < events and (self.freed is None or self.freed >= events)


class Watch(TorchDispatchMode):
    """Records the storages that are allocated inside the block. Storages from outside the block are not counted.

    Attributes:
        kind: the initial kind of new storages.
        line: the number of the line that runs.
        now: bytes alive.
        highest_in_line: the most bytes alive since the line began.
        highest: the most bytes alive so far.
        events: the number of allocations and frees so far.
        events_at_highest: the number of allocations and frees when the most bytes were alive.
        allocations: all storages, in the order of their allocation.
    """

    supports_higher_order_operators = True

    def __init__(self, kind: Holds) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind
        self.line = self.now = self.highest_in_line = self.highest = self.events = self.events_at_highest = 0
        self.allocations: list[Allocation] = []
        self._alive: dict[int, Allocation] = {}
        self._uncounted: Any = WeakIdKeyDictionary()  # storages from outside the block, and their META substitutes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on meta tensors. Random operators leave their generator unchanged."""
        if func is run_with_rng_state:
            _, func, *args = args
        args, kwargs = on_meta(func, args, kwargs, self._substitute)
        out = (
            torch.empty(STATE_BYTES, dtype=torch.uint8, device=META)
            if func is GENERATOR_OF_SLICE
            else func(*args, **kwargs)
        )
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self.record(tensor)
        return out

    def record(self, tensor: Tensor) -> Allocation:
        """Return the allocation of a tensor's storage. A new storage counts from now until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            if storage in self._uncounted:
                return Allocation(storage.nbytes(), self.line, self.events, self.kind, freed=self.events)
            self._alive[key] = allocation = Allocation(storage.nbytes(), self.line, self.events, self.kind)
            self.allocations.append(allocation)
            self._count(allocation.nbytes)
            weakref.finalize(storage, self._free, key).atexit = False
        return self._alive[key]

    def stop_counting(self, tensor: Tensor) -> None:
        """Record the tensor's storage as freed, since the tensor moves to unwatched memory."""
        self._end(self.record(tensor))

    def _substitute(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor. Turn views of one storage into views of one substitute.

        A storage that the watch has not recorded is from outside the block. Its substitute is not counted either.
        """
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            self._uncounted.setdefault(storage, None)
        if tensor.is_meta or not tensor.ndim:
            return tensor
        substitute = self._uncounted.get(storage)
        if substitute is None:
            self._uncounted[storage] = substitute = torch.UntypedStorage(storage.nbytes(), device=META)
            self._uncounted[substitute] = None
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return torch.empty(0, dtype=tensor.dtype, device=META).set_(substitute, *layout)

    def name_new(self, name: str) -> None:
        """Name the unnamed storages of kind ``self.kind`` that this line has allocated."""
        for allocation in reversed(self.allocations):
            if allocation.line != self.line:
                return
            if allocation.kind is self.kind:
                allocation.name = allocation.name or name

    def begin_line(self) -> None:
        """Begin the next line: assign later allocations to it."""
        self.line += 1
        self.highest_in_line = self.now

    def begin_step(self) -> None:
        """Forget the freed storages, and reset the highest bytes to the bytes alive."""
        self.allocations = [allocation for allocation in self.allocations if allocation.freed is None]
        self.highest, self.events_at_highest = self.now, self.events

    def _free(self, key: int) -> None:
        self._end(self._alive.pop(key))

    def _end(self, allocation: Allocation) -> None:
        if allocation.freed is None:
            allocation.freed = self.events
            self._count(-allocation.nbytes)

    def _count(self, nbytes: int) -> None:
        self.events += 1
        self.now += nbytes
        self.highest_in_line = max(self.highest_in_line, self.now)
        if self.now > self.highest:
            self.highest, self.events_at_highest = self.now, self.events


class WithoutValues(TorchDispatchMode):
    """Runs the block's operators on meta tensors, and records nothing.

    Every number read from a tensor is 1, since no shape of a trace depends on the numbers in tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()
        args, kwargs = on_meta(func, args, kwargs, to_meta)
        return func(*args, **kwargs)


def on_meta(func: Any, args: Any, kwargs: Any, substitute: Callable[[Tensor], Tensor]) -> tuple[Any, dict[str, Any]]:
    """Move the arguments of an operator to the meta device, and replace the device that the code names."""
    is_new = func is torch.ops.aten.lift_fresh.default  # torch.tensor() has just made the argument
    args, kwargs = tree_map_only(Tensor, to_meta if is_new else substitute, (args, dict(kwargs or {})))
    if kwargs.get("device") is not None:
        kwargs["device"] = META
    return args, kwargs


def to_meta(tensor: Tensor) -> Tensor:
    """Move a tensor to the meta device. Leave 0-d tensors in place, since operators on any device accept them."""
    if tensor.is_meta or not tensor.ndim:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
