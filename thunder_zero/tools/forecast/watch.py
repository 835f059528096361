"""Watches torch's operators on meta tensors: storages that are allocated and freed, and work done.

A storage counts once, for any number of views. Its address identifies it, and a weak reference reports when it is
freed. The watched code may name any device, and may use materialized tensors. New tensors are on the meta device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from thunder_zero.compat.private import run_with_rng_state
from thunder_zero.compat.slice_generators import GENERATOR_OF_SLICE
from thunder_zero.plan.amounts import name_of
from thunder_zero.schedule.ops import Compute
from thunder_zero.schedule.timeline import Value
from thunder_zero.traces.operators import work_of_operator

META = torch.device("meta")
Event = tuple[int, int]  # (slot, bytes): an allocation, or FREED in place of its bytes
FREED = -1
# The slot of a value's storage, and the layout of a tensor, or another value as it is, such as a number. Slots below 0
# are storages at rest; None is not counted.
Placed = tuple[int | None, Any]
ALLOCATORS = ("empty", "new_empty")  # prefixes of operators that do not touch memory
STATE_BYTES = len(torch.Generator().get_state())


class NoForecast(RuntimeError):
    """Raised if code does not run on meta tensors. The message names the code."""


@contextmanager
def needs_no_values(subject: Callable[[], str], action: str) -> Iterator[None]:
    """Convert torch's errors on meta tensors inside the block to ``NoForecast``.

    The message begins with ``subject()``, such as "the loss: it", and ends with ``action``.
    """
    try:
        yield
    except NoForecast:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise NoForecast(
            f"cannot forecast {subject()} does not run on tensors without values ({reason}); {action}"
        ) from error


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in its storage of ``nbytes``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        nbytes = tensor.untyped_storage().nbytes()
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, nbytes)

    def fresh(self) -> Tensor:
        storage = torch.UntypedStorage(self.nbytes, device=META)
        return torch.empty(0, dtype=self.dtype, device=META).set_(storage, self.offset, self.shape, self.stride)


class Watch(TorchDispatchMode):
    """Records the storages that are allocated and freed inside the block. All new tensors are on the meta device.

    Storages from outside the block are counted only if they have a slot. A slot is the number of a storage.
    """

    supports_higher_order_operators = True

    def __init__(self, at_rest: Mapping[int, int], entered: Sequence[Any] = ()) -> None:
        """Give slots to the storages of ``entered``, in their order. ``at_rest`` has slots, keyed by address."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._events: list[Event] = []
        self._slots = dict(at_rest)
        self._next_slot = len(entered)
        self._uncounted: Any = WeakIdKeyDictionary()  # storages from outside the block, and their META substitutes
        for slot, tensor in enumerate(entered):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage(), slot)

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

    def record(self, tensor: Tensor) -> int | None:
        """Return the slot of a tensor's storage. A new storage counts from now until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._slots and storage not in self._uncounted:
            self._events.append((self._next_slot, storage.nbytes()))
            self._follow(storage, self._next_slot)
            self._next_slot += 1
        return self._slots.get(storage._cdata)

    def placed(self, value: Any) -> Placed:
        return (self.record(value), Layout.of(value)) if isinstance(value, Tensor) else (None, value)

    def taken(self) -> tuple[Event, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events

    def alive(self) -> dict[int, int]:
        """Return the slots of storages that are not at rest and not freed, keyed by address."""
        return {address: slot for address, slot in self._slots.items() if slot >= 0}

    def _follow(self, storage: Any, slot: int) -> None:
        if storage._cdata not in self._slots:
            self._slots[storage._cdata] = slot
            weakref.finalize(storage, self._free, storage._cdata).atexit = False

    def _free(self, key: int) -> None:
        self._events.append((self._slots.pop(key), FREED))

    def _substitute(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor. Turn views of one storage into views of one substitute."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._slots:
            self._uncounted.setdefault(storage, None)
        if tensor.is_meta or not tensor.ndim:
            return tensor
        substitute = self._uncounted.get(storage)
        if substitute is None:
            self._uncounted[storage] = substitute = torch.UntypedStorage(storage.nbytes(), device=META)
            self._uncounted[substitute] = None
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return torch.empty(0, dtype=tensor.dtype, device=META).set_(substitute, *layout)


class Operators(TorchDispatchMode):
    """Records each operator of torch that runs inside the block, such as of a loss, as an operation of a timeline."""

    def __init__(self, name: str, *, backward: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Compute] = []
        self.values: dict[str, Value] = {}  # every read and every write of a value has a new name
        self._name, self._backward = name, backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator. Record it, unless it only allocates or makes views."""
        result = func(*args, **(kwargs or {}))
        inputs = [item for item in tree_iter((args, kwargs)) if isinstance(item, Tensor)]
        outputs = [item for item in tree_iter(result) if isinstance(item, Tensor)]
        name, is_mutable = func.overloadpacket.__name__, func._schema.is_mutable
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        are_views = bool(outputs) and all(tensor.untyped_storage()._cdata in storages for tensor in outputs)
        if name.startswith(ALLOCATORS) or (are_views and not is_mutable):
            return result
        if is_mutable and not outputs:  # foreach and fused operators, which scale gradients only on request
            named = (
                (item.name, value) for item, value in zip(func._schema.arguments, args, strict=False) if item.is_write
            )
            outputs = [item for name, value in named if name != "grads" for item in value]
        packet = getattr(torch.ops.aten, name.removeprefix("_foreach").strip("_"), func.overloadpacket)
        work = work_of_operator(getattr(packet, packet.overloads()[0]))
        flops = flop_registry.get(func.overloadpacket)
        op = Compute(self._names(inputs), self._names(outputs), backward=self._backward, work=work)
        self.ops.append(replace(op, flops=flops(*args, **(kwargs or {}), out_val=result)) if flops else op)
        return result

    def _names(self, tensors: list[Tensor]) -> tuple[str, ...]:
        names = tuple(f"{self._name} {len(self.values) + index}" for index in range(len(tensors)))
        for name, tensor in zip(names, tensors, strict=True):
            nbytes = min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
            self.values[name] = Value(nbytes, name_of(tensor.dtype))
        return names


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
