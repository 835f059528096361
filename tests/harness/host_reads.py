"""Counts the places where the host reads a tensor's value. On a GPU the host waits there for all earlier work.

It needs two modes. ``tolist`` reads a value but calls no operator. Some operators read a value although no Python
function asks for it (``nonzero``, a mask as an index).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = frozenset(
    f"aten.{name}" for name in ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique2")
)
METHODS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.cpu: "cpu"}


class _Operators(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        masks = [index for index in args[1] if index is not None] if name == "aten.index" else []
        if name in READS or any(mask.dtype is torch.bool for mask in masks):
            self._seen.append(name.removeprefix("aten."))
        return func(*args, **(kwargs or {}))


class HostReads(TorchFunctionMode):
    """A mode that records each read of a value inside the block, also in ``backward``.

    Attributes:
        seen: names of the operators or methods that read, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._operators = _Operators(self.seen)

    def __enter__(self) -> HostReads:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._operators.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        self._operators.__exit__(*exc)  # type: ignore[no-untyped-call]
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            self.seen.append(METHODS[func])
        return func(*args, **(kwargs or {}))
