"""One entry of a checkpoint: rows of a tensor, or a pickled value, and its path."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KeyPath = tuple[str | int, ...]  # into the nested state dict, such as ("model", "embed.weight")


@dataclass(frozen=True, slots=True)
class Item:
    """Rows of a tensor, or a value.

    Attributes:
        path: in the nested state dict, such as ``("model", "embed.weight")``.
        value: the rows, without padding; or a pickled value.
        start: index of the first of the rows.
        shape: of the whole tensor.
        also: further paths of the same value (tied weights); it is written once.
    """

    path: KeyPath
    value: Tensor | bytes
    start: int = 0
    shape: tuple[int, ...] = ()
    also: tuple[KeyPath, ...] = ()

    @property
    def key(self) -> str:
        """The item's name in the files."""
        return key_of(self.path)


ValueOf = Callable[[Item], Tensor | bytes]


def key_of(path: KeyPath) -> str:
    """A path's name in the files, as DCP joins it."""
    return ".".join(map(str, path))


def item_of_tensor(path: KeyPath, tensor: Tensor) -> Item:
    """All rows of a tensor as an item: a view."""
    return Item(path, tensor.detach(), 0, tuple(tensor.shape))


def pickle_value(value: Any) -> bytes:
    """A value as ``torch.save`` writes it.

    Raises:
        ValueError: ``torch.load(weights_only=True)`` does not read it.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(
            f"torch.load(weights_only=True) cannot read an object of type {type(value).__name__}; pass numbers, "
            f"strings, tensors, or dicts and lists of them"
        ) from error
    return stream.getvalue()
