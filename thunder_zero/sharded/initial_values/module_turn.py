"""One module's turn: its own tensors have values, in full, while a function writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_zero.sharded.attributes import parameter_like
from thunder_zero.sharded.initial_values.data import CPU

Slot = tuple[MutableMapping[str, Any], str, Tensor]  # a module's dict of tensors, the key and the tensor


class Turn:
    """One call of a function that writes a module's own tensors.

    Args:
        owner: the module.
        before: the values in full of each of its tensors; None where there are none yet, which reads as NaN.
    """

    def __init__(self, owner: nn.Module, before: Callable[[Tensor], Tensor | None]) -> None:
        self._owner = owner
        self._slots = list(own_tensors(owner))
        own = dict.fromkeys(tensor for _, _, tensor in self._slots)
        self._unsharded = {tensor: _like(tensor, before(tensor)) for tensor in own}
        self._versions = {tensor: unsharded._version for tensor, unsharded in self._unsharded.items()}
        self._after: dict[Tensor, Any] = dict(self._unsharded)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The module's own tensors, each once."""
        return tuple(self._unsharded)

    def call(self, function: Callable[[nn.Module], object], who: str, elsewhere: Mapping[int, str]) -> None:
        """Call the function with the module.

        Args:
            function: what writes.
            who: the function, as a sentence calls it.
            elsewhere: names of all tensors on the meta device by the addresses of their storages.

        Raises:
            ValueError: the function wrote to a tensor that another module owns, which has no memory now.
            Exception: the function raised.
        """
        with _replaced(self._slots, self._unsharded):
            with LostWrites() as lost:
                function(self._owner)
            self._after = {tensor: holder[key] for holder, key, tensor in self._slots}
        for name in filter(None, map(elsewhere.get, lost.addresses)):
            raise ValueError(
                f"{who} wrote {name!r} when it was called for {type(self._owner).__name__}, which does not own it; "
                f"only one module's own parameters have values at a time: write each when {who} is called for its "
                f"owner, or give weights"
            )

    def unsharded(self, tensor: Tensor) -> Tensor:
        """What the call was given to write to in the tensor's place."""
        return self._unsharded[tensor]

    def value(self, tensor: Tensor) -> object:
        """What the module holds in the tensor's place after the call."""
        return self._after[tensor]

    def wrote(self, tensor: Tensor) -> bool:
        """Whether the call wrote to the tensor or replaced it; writes through ``.data`` raise no version."""
        value, unsharded = self._after[tensor], self._unsharded[tensor]
        if value is None or value is not unsharded or value._version != self._versions[tensor]:
            return True
        return unsharded.is_floating_point() and not is_all_nan(unsharded)


def is_all_nan(tensor: Tensor) -> bool:
    """Whether every element is NaN."""
    if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() == 0:
        return False
    first = tensor.detach()[(0,) * tensor.ndim]
    return bool(first.isnan()) and bool(tensor.detach().isnan().all())


def own_tensors(owner: nn.Module) -> Iterator[Slot]:
    """The parameters and buffers of the module itself, without its children's."""
    for holder in (owner._parameters, owner._buffers):
        yield from ((holder, key, tensor) for key, tensor in holder.items() if tensor is not None)


def children_first(module: nn.Module) -> list[nn.Module]:
    """Each submodule once, in the order in which constructors end, if they make their parts in order."""
    found: dict[nn.Module, None] = {}

    def visit(parent: nn.Module) -> None:
        for child in parent.children():
            if child not in found:
                visit(child)
        found.setdefault(parent)

    visit(module)
    return list(found)


def address(tensor: Tensor) -> int:
    """The address of the tensor's storage, which views share; on the meta device it has one, too, without memory."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _replaced(slots: Sequence[Slot], by: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Inside of the block the module holds other tensors in these slots."""
    try:
        for holder, key, tensor in slots:
            holder[key] = by[tensor]
        yield
    finally:
        for holder, key, tensor in slots:
            holder[key] = tensor


def _like(meta: Tensor, full: Tensor | None) -> Tensor:
    """A parameter or buffer like the module's, with its strides and these values; NaN, if there are none."""
    if full is None or full.stride() != meta.stride():
        nothing = float("nan") if meta.is_floating_point() or meta.is_complex() else 0
        room = torch.full_like(meta, nothing, device=CPU, requires_grad=False)
        full = room if full is None else room.copy_(full)
    if not isinstance(meta, nn.Parameter):
        return full
    return parameter_like(meta, full)  # initialisers ask for attributes


class LostWrites(TorchDispatchMode):
    """Sees writes to meta tensors, which are lost: they have no memory.

    Attributes:
        addresses: of the storages that were written to, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses: dict[int, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the storages that the operation's schema says it writes to, and run it."""
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        # Not strict: args has the positional arguments only, the schema all.
        given = {**kwargs, **{argument.name: value for argument, value in zip(arguments, args, strict=False)}}
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = given.get(argument.name)
                tensors = value if isinstance(value, list | tuple) else (value,)
                self.addresses.update((address(t), None) for t in tensors if isinstance(t, Tensor) and t.is_meta)
        return func(*args, **kwargs)
