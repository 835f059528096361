"""Writes lines while operators run: numbers storages, counts writes, and follows sizes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from thunder_zero.spmd.lines import RecordedLine, Ref


class Tape:
    """Lines that ran, whose values are parts of numbered storages."""

    def __init__(self) -> None:
        self.lines: list[RecordedLine] = []
        self.storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # living ones, and their numbers
        self.sizes: list[tuple[int, int, int]] = []  # changes of storages, as in a ``StepRecord``
        self._writes: list[int] = []  # of each storage
        self._nbytes: dict[int, int] = {}  # of living storages, by number

    def ref(self, item: Tensor) -> Ref:
        """Return what a tensor is now. A freed storage's number is not used again."""
        storage = item.untyped_storage()
        weak, number = self.storages.get(storage._cdata, (None, -1))
        if weak is None or weak() is None:
            number = len(self._writes)
            self._writes.append(0)
            self.storages[storage._cdata] = weakref.ref(storage), number
        shape, stride = tuple(item.shape), tuple(item.stride())
        return Ref(number, int(item.storage_offset()), shape, stride, item.dtype, self._writes[number])

    def write(
        self,
        operator: Any,
        arguments: tuple[Any, Any],
        tensors: Sequence[Tensor],
        changed: Sequence[Tensor],
        results: Sequence[Tensor],
        **facts: Any,
    ) -> RecordedLine:
        """Append a line that has run. ``arguments`` have refs, as of before the line, in place of ``tensors``."""
        inputs = tuple(item for item in tree_leaves(arguments) if isinstance(item, Ref))
        read = {item.storage for item in inputs}
        for item in (*changed, *(item for item in results if self.ref(item).storage not in read)):
            self._writes[self.ref(item).storage] += 1
        changes = tuple(index for index, item in enumerate(tensors) if any(item is other for other in changed))
        written, new = tuple(map(self.ref, changed)), tuple(map(self.ref, results))
        self.lines.append(RecordedLine(operator, *arguments, inputs, changes, written, new, **facts))
        return self.lines[-1]

    def poll(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Note which storages have another size (default: of all). FSDP2 and Python free them without an operator."""
        keys = [*self.storages] if tensors is None else [item.untyped_storage()._cdata for item in tensors]
        for key in keys:
            weak, number = self.storages[key]
            storage = weak()
            nbytes = 0 if storage is None else storage.nbytes()
            if self._nbytes.get(number, 0) != nbytes:
                self._nbytes[number] = nbytes
                self.sizes.append((len(self.lines), number, nbytes))
            if storage is None:
                del self.storages[key]


def changed_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator changes in place."""
    written = (item.name for item in func._schema.arguments if item.alias_info and item.alias_info.is_write)
    return tensors_of([argument_of(func, args, kwargs, name) for name in written])


def argument_of(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return an argument of an operator by its name, or its default, or None."""
    for index, item in enumerate(func._schema.arguments):
        if item.name == name:
            return args[index] if index < len(args) else kwargs.get(name, item.default_value)
    return None


def tensors_of(tree: Any) -> list[Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, Tensor)]
