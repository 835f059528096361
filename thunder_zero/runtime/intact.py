"""Checks before every forward, quickly, that a sharded model is still as it was planned.

Otherwise a change by ``.to()``, ``module.weight = ...``, ``load_state_dict(assign=True)``, ``requires_grad_`` or
``.data = ...``, or a hook of a submodule, would be ignored silently, or would train something other than the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thunder_zero.runtime.state import State


@dataclass(frozen=True, slots=True)
class Link:
    """A place in a module tree, and the object that must be there (None: nothing)."""

    holder: Mapping[str, Any]
    key: str
    expected: object
    name: str  # as a sentence calls it


@dataclass(frozen=True, slots=True)
class Pair:
    """Two places, of the plain module and of the jitted one, that must have the same buffer."""

    holder: Mapping[str, Any]
    key: str
    jitted: Mapping[str, Any]
    name: str


@dataclass(frozen=True, slots=True)
class Members:
    """The parameters or submodules of one module, and their names."""

    holder: Mapping[str, Any]
    names: frozenset[str]
    got: str  # how a sentence begins that another name ends


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of one kind of a submodule, and how many the traces have."""

    hooks: Mapping[int, object]
    number: int
    name: str  # as a sentence calls the submodule


@dataclass(frozen=True, slots=True)
class Made:
    """A parameter as it was made."""

    path: str
    tensor: Tensor
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    memory: int  # identifies the object that holds its memory


class Intact:
    """The jitted model, its plain module and all their parameters, as the transform left them."""

    def __init__(
        self,
        state: State,
        links: Iterable[Link],
        pairs: Iterable[Pair],
        members: Iterable[Members],
        hooks: Iterable[Hooks],
    ) -> None:
        self._links, self._hooks = tuple(links), tuple(hooks)
        self._pairs, self._members = tuple(pairs), tuple(members)
        self._made = tuple(
            Made(
                param.path,
                tensor,
                tensor.shape,
                tensor.dtype,
                tensor.device,
                param.requires_grad,
                _memory_of(tensor),
            )
            for param, tensor in ((param, state.shards[param.path]) for param in state.plan.params)
        )

    def require(self) -> None:
        """Raise if anything was changed.

        Raises:
            RuntimeError: naming the first parameter or submodule that was replaced, moved, cast, frozen, thawed or
                hooked.
        """
        for hooked in self._hooks:
            if len(hooked.hooks) != hooked.number:
                raise RuntimeError(
                    f"a hook was registered on {hooked.name}, or removed, after thunder_zero sharded the module, whose "
                    f"traces would not call it; do this before thunder.jit, or hook the sharded model itself"
                )
        for link in self._links:
            found = link.holder.get(link.key)
            if found is not link.expected:
                raise RuntimeError(_replaced(link, found))
        for pair in self._pairs:
            if pair.holder.get(pair.key) is not pair.jitted.get(pair.name):
                raise RuntimeError(
                    f"buffer {pair.name!r} was replaced after thunder_zero sharded the module, in one of the plain and "
                    f"the sharded module only; copy new values into it in place"
                )
        for member in self._members:
            if member.holder.keys() != member.names:
                name = min(set(member.holder) - member.names)
                raise RuntimeError(
                    f"{member.got} {name!r} after thunder_zero sharded the module, so no plan covers it; add it before "
                    f"thunder.jit"
                )
        for made in self._made:
            tensor = made.tensor
            if tensor.dtype is not made.dtype or tensor.device != made.device:
                raise RuntimeError(_moved(f"parameter {made.path!r}", tensor, made.dtype, made.device))
            if tensor.shape != made.shape:
                raise RuntimeError(
                    f"the memory of parameter {made.path!r} was replaced (.data = ...): its shape is now "
                    f"{tuple(tensor.shape)}, the shard's is {tuple(made.shape)}; copy new values into it in place"
                )
            if tensor.requires_grad is not made.requires_grad:
                raise RuntimeError(
                    f"requires_grad of parameter {made.path!r} became {tensor.requires_grad}, and thunder_zero "
                    f"planned it as {made.requires_grad}; set it on the module before thunder.jit"
                )
            if _memory_of(tensor) != made.memory:
                raise RuntimeError(
                    f"the memory of parameter {made.path!r} was replaced (.data = ...), and programs read what it had "
                    f"before; copy new values into it in place"
                )


def _memory_of(tensor: Tensor) -> int:
    """Identifies what holds a tensor's memory. A DTensor has such an object without memory, which ``.data = ...``
    replaces, though it leaves the local tensor as it is."""
    return int(tensor.untyped_storage()._cdata)


def _replaced(link: Link, found: object) -> str:
    expected = link.expected
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.dtype is not expected.dtype or found.device != expected.device:
            return _moved(link.name, found, expected.dtype, expected.device)
        if isinstance(expected, nn.Parameter) and not isinstance(found, nn.Parameter):
            return (
                f"{link.name} was replaced by a tensor that is no parameter, as torch.func.functional_call does, after "
                f"thunder_zero sharded it; call the model itself, with new values copied into its parameters"
            )
        return (
            f"{link.name} was replaced after thunder_zero sharded it; copy new values into it "
            f"(load_original_state_dict, or in place), or transform the new module"
        )
    return f"{link.name} was replaced after thunder_zero sharded the module; change the module before thunder.jit"


def _moved(name: str, found: Tensor, dtype: torch.dtype, device: torch.device) -> str:
    return (
        f"{name} was moved or cast: it is {found.dtype} on {found.device}, and thunder_zero sharded it as {dtype} on "
        f"{device}; call .to() on the module before thunder.jit"
    )
