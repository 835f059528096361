"""Watches when the storages of tensors without values are allocated and freed.

A storage counts once, whatever views it: it is known by its own identity, and a weak reference tells when the last view
of it is gone. The code may name any device, and may bring tensors with values; what it makes has none (meta device).
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

from thunder_zero.compat.aot import RUN_WITH_STATE
from thunder_zero.compat.slice_generators import GENERATOR_OF_SLICE
from thunder_zero.tools.forecast.figures import Holds
from thunder_zero.tools.forecast.workspaces import hidden_bytes

META = torch.device("meta")
STATE_BYTES = len(torch.Generator().get_state())


class NoForecast(RuntimeError):
    """Something does not run on tensors without values. The message says what."""


@contextmanager
def needs_no_values(what: str, action: str) -> Iterator[None]:
    """Inside the block torch's errors are refusals: that ``what`` does not run without values, and what to do."""
    try:
        yield
    except NoForecast:
        raise
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise NoForecast(
            f"cannot forecast {what} does not run on tensors without values ({first}); {action}"
        ) from error


@dataclass(slots=True)
class Allocation:
    """A storage from its allocation to its end.

    Attributes:
        nbytes: its size.
        line: the number of the line that allocated it; 0 before the first.
        born: the number of allocations and frees before it.
        freed: the same when it was freed; None while it is alive.
        kind: what it holds; known when the line that takes it has run.
        name: as of :class:`thunder_zero.tools.forecast.figures.Storage`; "" until it is known.
    """

    nbytes: int
    line: int
    born: int
    kind: Holds
    freed: int | None = None
    name: str = ""

    def alive_after(self, events: int) -> bool:
        """Whether it is alive after this number of allocations and frees."""
        return self.born < events and (self.freed is None or self.freed >= events)


class Watch(TorchDispatchMode):
    """Records the storages that are allocated inside the block. Those that the code brings along are not counted.

    Attributes:
        kind: what new storages hold, until somebody knows better.
        on_cpu: the operators are those for CPUs, whose workspaces count.
        line: the number of the line that runs.
        now: bytes alive.
        highest_in_line: the most bytes alive since the line began.
        highest: the most bytes alive so far.
        events: allocations and frees so far.
        events_at_highest: their number when the most bytes were alive.
        allocations: all storages, in the order of their allocation.
    """

    supports_higher_order_operators = True

    def __init__(self, kind: Holds, *, on_cpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind
        self.on_cpu = on_cpu
        self.line = self.now = self.highest_in_line = self.highest = self.events = self.events_at_highest = 0
        self.allocations: list[Allocation] = []
        self._alive: dict[int, Allocation] = {}
        self._brought: Any = WeakIdKeyDictionary()  # storages that do not count: what stands in for each on META

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on tensors without values; what draws with a given generator draws nothing."""
        if func is RUN_WITH_STATE:
            _, func, *args = args
        args, kwargs = on_meta(func, args, kwargs, self._stand_in)
        out = (
            torch.empty(STATE_BYTES, dtype=torch.uint8, device=META)
            if func is GENERATOR_OF_SLICE
            else func(*args, **kwargs)
        )
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        if self.on_cpu and (nbytes := hidden_bytes(func, args, out)):
            self._passing(nbytes, f"of {func.overloadpacket.__name__}")
        return out

    def see(self, tensor: Tensor) -> Allocation:
        """The storage of a tensor; a new one counts from now on, as long as it is alive."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            if storage in self._brought:
                return Allocation(storage.nbytes(), self.line, self.events, self.kind, freed=self.events)
            self._alive[key] = made = Allocation(storage.nbytes(), self.line, self.events, self.kind)
            self.allocations.append(made)
            self._count(made.nbytes)
            weakref.finalize(storage, self._free, key).atexit = False
        return self._alive[key]

    def leaves(self, tensor: Tensor) -> None:
        """The storage moves to other memory, which is not watched."""
        self._end(self.see(tensor))

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """As ``without_values``, but views of a storage are views of what stands in for it. It does not count, nor
        does a storage that the watch has not seen: the code brought it along."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            self._brought.setdefault(storage, None)
        if tensor.is_meta or not tensor.ndim:
            return tensor
        stands_in = self._brought.get(storage)
        if stands_in is None:
            self._brought[storage] = stands_in = torch.UntypedStorage(storage.nbytes(), device=META)
            self._brought[stands_in] = None
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return torch.empty(0, dtype=tensor.dtype, device=META).set_(stands_in, *place)

    def _passing(self, nbytes: int, name: str) -> None:
        """An operator allocates these in addition to its results, and frees them."""
        self.allocations.append(
            Allocation(nbytes, self.line, self.events, Holds.WORKSPACE, freed=self.events + 1, name=name)
        )
        self._count(nbytes)
        self._count(-nbytes)

    def name_new(self, name: str) -> None:
        """Name what this line has allocated of the kind that was expected, unless it has a name."""
        for one in reversed(self.allocations):
            if one.line != self.line:
                return
            if one.kind is self.kind:
                one.name = one.name or name

    def next_line(self) -> None:
        """Another line begins."""
        self.line += 1
        self.highest_in_line = self.now

    def begin(self) -> None:
        """Forget what is freed by now, and the highest so far: what follows is what counts."""
        self.allocations = [one for one in self.allocations if one.freed is None]
        self.highest, self.events_at_highest = self.now, self.events

    def _free(self, key: int) -> None:
        self._end(self._alive.pop(key))

    def _end(self, gone: Allocation) -> None:
        if gone.freed is None:
            gone.freed = self.events
            self._count(-gone.nbytes)

    def _count(self, nbytes: int) -> None:
        self.events += 1
        self.now += nbytes
        self.highest_in_line = max(self.highest_in_line, self.now)
        if self.now > self.highest:
            self.highest, self.events_at_highest = self.now, self.events


class Unwatched(TorchDispatchMode):
    """Runs operators inside the block as :class:`Watch` does, and records nothing. Each number that is read is 1: no
    shape of a trace depends on it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on tensors without values."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()
        args, kwargs = on_meta(func, args, kwargs, without_values)
        return func(*args, **kwargs)


def on_meta(func: Any, args: Any, kwargs: Any, stand_in: Callable[[Tensor], Tensor]) -> tuple[Any, dict[str, Any]]:
    """The arguments of an operator on the meta device, whatever device the code names."""
    is_new = func is torch.ops.aten.lift_fresh.default  # the argument is what torch.tensor() made
    args, kwargs = tree_map_only(Tensor, without_values if is_new else stand_in, (args, dict(kwargs or {})))
    if kwargs.get("device") is not None:
        kwargs["device"] = META
    return args, kwargs


def without_values(tensor: Tensor) -> Tensor:
    """The tensor on the meta device; itself if it is there, or is a number (0-dim), which any device may read."""
    if tensor.is_meta or not tensor.ndim:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
