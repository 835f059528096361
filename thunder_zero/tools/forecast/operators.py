"""Records the operators of torch that run in a block, such as a loss, as operations of a timeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from thunder_zero.plan.amounts import name_of
from thunder_zero.schedule.ops import Compute, Work
from thunder_zero.schedule.timeline import Value
from thunder_zero.traces.operators import work_of_operator

ALLOCATORS = ("empty", "new_empty")  # prefixes of operators that do not touch memory


class Operators(TorchDispatchMode):
    """Records each operator of torch that runs inside the block as an operation.

    Attributes:
        ops: the operations. Every read and every write of a value gets a new name.
        values: the sizes and dtypes of values.
    """

    def __init__(self, name: str, *, backward: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Compute] = []
        self.values: dict[str, Value] = {}
        self._name, self._backward = name, backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [item for item in tree_iter((args, kwargs)) if isinstance(item, Tensor)]
        outputs = [item for item in tree_iter(result) if isinstance(item, Tensor)]
        outputs += [
            item for item in inputs if not outputs and func._schema.is_mutable
        ]  # foreach operators return nothing
        if not func._schema.is_mutable and _are_views(outputs, inputs):
            return result
        name = func.overloadpacket.__name__
        if name.startswith(ALLOCATORS):
            return result
        flops = flop_registry.get(func.overloadpacket)
        op = Compute(self._names(inputs), self._names(outputs), backward=self._backward, work=_work_of(func))
        self.ops.append(replace(op, flops=flops(*args, **kwargs, out_val=result)) if flops else op)
        return result

    def _names(self, tensors: list[Tensor]) -> tuple[str, ...]:
        names = tuple(f"{self._name} {len(self.values) + index}" for index in range(len(tensors)))
        for name, tensor in zip(names, tensors, strict=True):
            nbytes = min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
            self.values[name] = Value(nbytes, name_of(tensor.dtype))
        return names


def _are_views(outputs: list[Tensor], inputs: list[Tensor]) -> bool:
    """Return whether all results of an operator are views of its inputs."""
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return bool(outputs) and all(tensor.untyped_storage()._cdata in storages for tensor in outputs)


def _work_of(operator: Any) -> Work:
    """Return the class of work of a torch operator. ``_foreach_mul_`` counts as ``mul``."""
    name = operator.overloadpacket.__name__.removeprefix("_foreach").strip("_")
    packet = getattr(torch.ops.aten, name, operator.overloadpacket)
    return work_of_operator(getattr(packet, packet.overloads()[0]))
