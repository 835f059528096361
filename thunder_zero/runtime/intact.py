"""Checks before every forward, quickly, that a sharded model is still as it was planned.

Otherwise a change by ``.to()``, ``module.weight = ...``, ``load_state_dict(assign=True)``, ``requires_grad_`` or
``.data = ...``, or a hook of a submodule, would be ignored silently, or would train something other than the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from thunder_zero.runtime.state import State


@dataclass(frozen=True, slots=True)
class Held:
    """What one dict of a module holds, and nothing else.

    Attributes:
        holder: the dict.
        expected: what it held.
        kind: of its values, as a sentence calls one: "parameter".
        path: of the module.
    """

    holder: Mapping[str, Any]
    expected: Mapping[str, object]
    kind: str
    path: str

    def is_intact(self) -> bool:
        """Whether it holds the same objects in the same order; in every forward."""
        return len(self.holder) == len(self.expected) and all(map(is_, self.holder.values(), self.expected.values()))

    def refuse(self) -> None:
        """Raise for the first object that was replaced, or that is new.

        Raises:
            RuntimeError: naming it.
        """
        for name, expected in self.expected.items():
            found = self.holder.get(name)
            if found is not expected:
                path = f"{self.path}.{name}" if self.path else name
                raise RuntimeError(_replaced(f"{self.kind} {path!r}", expected, found))
        for name in sorted(self.holder.keys() - self.expected.keys()):
            raise RuntimeError(
                f"{f'submodule {self.path!r}' if self.path else 'the module'} got the {self.kind} {name!r} after "
                f"thunder_zero sharded the module, so no plan covers it; add it before thunder.jit"
            )


@dataclass(frozen=True, slots=True)
class Hiding:
    """The names of the plain module, none of which a dict of the jitted one may have: the traces would not see it."""

    holder: Mapping[str, Any]
    names: Mapping[str, str]  # with the kind of each, as a sentence calls it


@dataclass(frozen=True, slots=True)
class Pair:
    """Two places, of the plain module and of the jitted one, that must have the same buffer."""

    holder: Mapping[str, Any]
    key: str
    jitted: Mapping[str, Any]
    name: str


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

    def refuse(self) -> NoReturn:
        """Raise for what has changed.

        Raises:
            RuntimeError: saying what.
        """
        tensor, what = self.tensor, f"parameter {self.path!r}"
        if tensor.dtype is not self.dtype or tensor.device != self.device:
            raise RuntimeError(_moved(what, tensor, self.dtype, self.device))
        if tensor.shape != self.shape:
            raise RuntimeError(
                f"the memory of {what} was replaced (.data = ...): its shape is now {tuple(tensor.shape)}, the shard's "
                f"is {tuple(self.shape)}; copy new values into it in place"
            )
        if tensor.requires_grad is not self.requires_grad:
            raise RuntimeError(
                f"requires_grad of {what} became {tensor.requires_grad}, and thunder_zero planned it as "
                f"{self.requires_grad}; set it on the module before thunder.jit"
            )
        raise RuntimeError(
            f"the memory of {what} was replaced (.data = ...), and programs read what it had before; copy new values "
            f"into it in place"
        )


class Intact:
    """The jitted model, its plain module and all their parameters, as the transform left them."""

    def __init__(
        self,
        state: State,
        held: Iterable[Held],
        hiding: Iterable[Hiding],
        pairs: Iterable[Pair],
        hooks: Iterable[Hooks],
    ) -> None:
        self._held, self._hiding, self._pairs, self._hooks = tuple(held), tuple(hiding), tuple(pairs), tuple(hooks)
        self._made = tuple(
            Made(path, shard, shard.shape, shard.dtype, shard.device, shard.requires_grad, _memory_of(shard))
            for path, shard in state.shards.items()
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
        for held in self._held:
            if not held.is_intact():
                held.refuse()
        for hiding in self._hiding:
            for name in hiding.names.keys() & hiding.holder:
                raise RuntimeError(_replaced(f"{hiding.names[name]} {name!r}", None, hiding.holder[name]))
        for pair in self._pairs:
            if pair.holder.get(pair.key) is not pair.jitted.get(pair.name):
                raise RuntimeError(
                    f"buffer {pair.name!r} was replaced after thunder_zero sharded the module, in one of the plain and "
                    f"the sharded module only; copy new values into it in place"
                )
        for made in self._made:
            tensor = made.tensor
            same = tensor.requires_grad is made.requires_grad and tensor.shape == made.shape
            if not same or _memory_of(tensor) != made.memory:
                made.refuse()


def _memory_of(tensor: Tensor) -> Any:
    """Identifies what holds a tensor's memory. A DTensor has such an object without memory, which ``.data = ...``
    replaces, though it leaves the local tensor as it is."""
    return tensor.untyped_storage()._cdata


def _replaced(name: str, expected: object, found: object) -> str:
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.dtype is not expected.dtype or found.device != expected.device:
            return _moved(name, found, expected.dtype, expected.device)
        if isinstance(expected, nn.Parameter) and not isinstance(found, nn.Parameter):
            return (
                f"{name} was replaced by a tensor that is no parameter, as torch.func.functional_call does, after "
                f"thunder_zero sharded it; call the model itself, with new values copied into its parameters"
            )
        return (
            f"{name} was replaced after thunder_zero sharded it; copy new values into it "
            f"(load_original_state_dict, or in place), or transform the new module"
        )
    return f"{name} was replaced after thunder_zero sharded the module; change the module before thunder.jit"


def _moved(name: str, found: Tensor, dtype: torch.dtype, device: torch.device) -> str:
    return (
        f"{name} was moved or cast: it is {found.dtype} on {found.device}, and thunder_zero sharded it as {dtype} on "
        f"{device}; call .to() on the module before thunder.jit"
    )
