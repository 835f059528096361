"""Where do the initial values come from? From the module, or, where it is on the meta device, from what is done here.

A module on the meta device has shapes and no values. They are made as ordinary construction makes them, one module's
own parameters at a time: in full, for the moment that ``reset_parameters`` or ``init`` writes them, and cut to this
rank's rows before the next module's turn. Every rank draws everything and keeps its rows, so that W does not matter.
Or they are read, one at a time, from a state dict (``weights``), or come from another rank, one at a time.

The module stays as it is until all went well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_zero.comm import agree
from thunder_zero.comm.backends import transport_for
from thunder_zero.comm.group import Ranks
from thunder_zero.plan import Param, Plan
from thunder_zero.rows import at_rest_of
from thunder_zero.runtime.shards import is_hollow

CPU = torch.device("cpu")  # where values are drawn, whatever the device: a seed means the same on all machines


@dataclass(frozen=True, slots=True)
class Sources:
    """What the user gives for values to come from.

    Attributes:
        init: called as ``module.apply(init)`` calls it, after ``reset_parameters``.
        weights: full tensors by their names in the plain module's state dict.
    """

    init: Callable[[nn.Module], object] | None = None
    weights: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Other:
    """A value for what the plan does not have: a buffer, or a parameter that the policy ignores.

    Attributes:
        names: all its names in the module.
        tensor: what is in the module now.
        value: what it shall be.
    """

    names: Sequence[str]
    tensor: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Values:
    """Initial values.

    Attributes:
        at_rest: of each planned parameter, by path: what is there of it at rest.
        others: of what was on the meta device, or is read from a state dict, and is in no plan.
    """

    at_rest: dict[str, Tensor]
    others: list[Other]


def initial_values(module: nn.Module, plan: Plan, ranks: Ranks, device: torch.device, sources: Sources) -> Values:
    """The values of a plain module, once all ranks agree that it is the same one; a collective.

    Raises:
        RuntimeError: the ranks' modules or values differ, or another rank refused.
        ValueError: nothing gives a parameter or buffer a value, or what gives it cannot be done in parts; a state dict
            with other names or shapes.
    """
    group = ranks.everyone
    if group.size() > 1:
        agree.require_same([*agree.module_facts(module, plan, device), *_given(plan, sources)], group)
    maker = _Maker(module, plan, ranks, device, sources)
    with agree.all_or_none(group):
        maker.require_names()
        maker.reset()
        maker.raise_failure()
    if sources.init is not None:
        maker.compare()  # before the next collective: what is gathered of ranks that differ would hide it
        maker.initialize(sources.init)
    with agree.all_or_none(group):
        maker.raise_failure()
        maker.require_written()
    values = maker.settle()
    with agree.all_or_none(group):
        maker.raise_failure()
    maker.compare()
    return values


def _given(plan: Plan, sources: Sources) -> list[agree.Fact]:
    """What is given decides what ranks do together, unless one of them gives the values to all."""
    if plan.policy.broadcast_from is not None:
        return []
    return [
        agree.Fact(f"the argument {name}", "something" if there else "None", f"give {name} on every rank, or on none")
        for name, there in (("init", sources.init is not None), ("weights", sources.weights is not None))
    ]


class _Maker:
    """One call's work. ``held`` has, by first name, what was made of a meta tensor: what is there of it at rest; all
    of it, if it is in no plan or will be broadcast."""

    def __init__(self, module: nn.Module, plan: Plan, ranks: Ranks, device: torch.device, sources: Sources) -> None:
        self.module, self.plan, self.device, self.weights = module, plan, device, sources.weights
        self.group = ranks.everyone
        self.source = plan.policy.broadcast_from
        self.names = _names(module)
        self.params = {param.path: param for param in plan.params}
        self.saved = frozenset() if sources.weights is None else frozenset(module.state_dict())
        self.mine = {tensor for tensor in self.names if self._is_mine(tensor)}
        self.held: dict[str, Tensor] = {}
        self.digests: dict[str, str] = {}
        self._storages = {_address(tensor): names[0] for tensor, names in self.names.items() if tensor.is_meta}
        self.failure: Exception | None = None  # raised once all ranks are where they can hear of it
        self._transport = transport_for(ranks.inside, device)

    # Who gives which value.

    def _is_mine(self, tensor: Tensor) -> bool:
        """Whether this rank has to make the values."""
        return tensor.is_meta and not self._arrives(tensor) and not self._is_read(tensor)

    def _arrives(self, tensor: Tensor) -> bool:
        """Whether the values come from another rank."""
        ignored = isinstance(tensor, nn.Parameter) and self._param(tensor) is None
        return self.source is not None and self.source != self.group.rank() and not ignored

    def _is_read(self, tensor: Tensor) -> bool:
        """Whether the values are in ``weights``; buffers that are not persistent never are."""
        return self.weights is not None and any(name in self.saved for name in self.names[tensor])

    def _param(self, tensor: Tensor) -> Param | None:
        return self.params.get(self.names[tensor][0])

    def require_names(self) -> None:
        """Refuse a state dict that lacks a name, or has others."""
        if self.weights is None:
            return
        for tensor, names in self.names.items():
            if self._is_read(tensor) and not any(name in self.weights for name in names):
                raise ValueError(
                    f"weights has no {names[0]!r}; give the state dict of a {type(self.module).__name__} like this one"
                )
        for name in self.weights:
            if name not in self.saved:
                raise ValueError(
                    f"weights has {name!r}, and {type(self.module).__name__} has not; leave it out of the state dict, "
                    f"or build the module that it belongs to"
                )

    # Making values.

    def reset(self) -> None:
        """Call ``reset_parameters`` of each module whose turn it is, in the order of construction."""
        for owner in _children_first(self.module):
            reset = getattr(type(owner), "reset_parameters", None)
            if callable(reset) and self._has_turn(owner):
                self._let_write(owner, reset, "reset_parameters", again=False)

    def initialize(self, init: Callable[[nn.Module], object]) -> None:
        """Call ``init`` as ``module.apply(init)`` does, but not for modules whose tensors all have values."""

        def visit(owner: nn.Module) -> None:
            if self._has_turn(owner) or next(_own(owner), None) is None:
                self._let_write(owner, init, "init", again=True)

        if self.mine:
            self.module.apply(visit)

    def _has_turn(self, owner: nn.Module) -> bool:
        """Whether the module owns meta tensors: all such draw, as in construction; one of mine, if the rest is read."""
        own = [tensor for _, _, tensor in _own(owner) if tensor.is_meta]
        return any(tensor in self.mine for tensor in own) if self.weights is not None else bool(self.mine and own)

    def _let_write(self, owner: nn.Module, call: Callable[[nn.Module], object], who: str, *, again: bool) -> None:
        """Call with the owner's own tensors in full, and keep what is at rest of those that are mine.

        The first of several owners of a tied parameter writes it; what the others draw is thrown away, so that the
        random generator moves as in construction. ``again``: each writes, to the values that are there.
        """
        places = list(_own(owner))
        made = {tensor: self._full(tensor) if again or not tensor.is_meta else None for _, _, tensor in places}
        fulls = {tensor: _as(tensor, value) for tensor, value in made.items()}
        versions = {tensor: full._version for tensor, full in fulls.items()}
        with _replaced(places, fulls):
            with self._remember_failure():
                self.raise_failure()  # nothing is called after one
                _call(call, owner, who, self._storages)
            after = {tensor: holder[key] for holder, key, tensor in places}
        for tensor, full in fulls.items():
            name = self.names[tensor][0]
            is_there = made[tensor] is not None or _is_written(after[tensor], full, versions[tensor])
            if is_there and tensor in self.mine and (again or name not in self.held):
                with self._remember_failure():
                    full = _fitting(after[tensor], tensor, f"{who} of {type(owner).__name__} left {name!r}")
                self._hold(tensor, full.detach())

    def _full(self, tensor: Tensor) -> Tensor | None:
        """What there is so far, in full and on the CPU; a collective. Of what is real, and stays as it is: a copy."""
        name, param = self.names[tensor][0], self._param(tensor)
        if not tensor.is_meta:
            return tensor.detach().to(CPU, copy=True)
        value = self.held.get(name)
        if value is None or param is None or self.source is not None or not param.sharded or param.resident:
            return None if value is None else value.to(CPU)
        full = self._transport.all_gather([value], [param]).wait()[0].to(CPU)
        del self.held[name]  # other rows will be held
        return full

    def _hold(self, tensor: Tensor, full: Tensor) -> None:
        name, param = self.names[tensor][0], self._param(tensor)
        if param is None or self.source is not None:
            self.held[name] = full
        else:
            self.held[name] = self._at_rest(full, param)

    def _at_rest(self, full: Tensor, param: Param) -> Tensor:
        if self.source is None and self.group.size() > 1:
            self.digests[param.path] = agree.digest(full)
        return at_rest_of(full.to(self.device), param, self.plan)

    def require_written(self) -> None:
        """Refuse what nothing gave a value."""
        for owner_path, owner in self.module.named_modules():
            for _, key, tensor in _own(owner):
                if tensor in self.mine and self.names[tensor][0] not in self.held and tensor.numel():
                    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    path = f"{owner_path}.{key}" if owner_path else key
                    raise ValueError(
                        f"{kind} {path!r} is on the meta device, and neither reset_parameters of "
                        f"{type(owner).__name__} nor init gave it a value; give init, a function that writes it, or "
                        f"weights, or build the module on a real device"
                    )

    # Handing them out.

    def settle(self) -> Values:
        """What is at rest of everything; what is broadcast, or read, takes its turn alone."""
        at_rest, others = {}, []
        for tensor, names in self.names.items():
            param = self._param(tensor)
            if param is not None and self.source is None and names[0] in self.held:
                at_rest[param.path] = self.held.pop(names[0])
                continue
            full = self._whole(tensor)
            if self.source is not None and (param is not None or not isinstance(tensor, nn.Parameter)):
                agree.broadcast(full, self.source, self.group, self.device)
            if param is not None:
                at_rest[param.path] = self._at_rest(full, param)
            elif full is not tensor:
                others.append(Other(names, tensor, full.to(self.device if tensor.is_meta else tensor.device)))
        return Values({param.path: at_rest[param.path] for param in self.plan.params}, others)

    def _whole(self, tensor: Tensor) -> Tensor:
        """The values in full: made, read, or those of the module; room for them, if they arrive."""
        name = self.names[tensor][0]
        if name in self.held:
            return self.held.pop(name)
        if self._is_read(tensor) and not self._arrives(tensor):
            room = torch.empty_like(tensor, device=CPU, requires_grad=False)
            with self._remember_failure():
                room.copy_(self._read(tensor))
            return room
        if tensor.is_meta:
            return torch.empty_like(tensor, device=self.device, requires_grad=False)
        return tensor.detach() if isinstance(tensor, nn.Parameter) and self._param(tensor) else tensor

    def _read(self, tensor: Tensor) -> Tensor:
        assert self.weights is not None, "it is read"
        name = next(name for name in self.names[tensor] if name in self.weights)
        return _fitting(self.weights[name], tensor, f"weights has {name!r}")

    # Failures, and what ranks have to agree on.

    @contextmanager
    def _remember_failure(self) -> Iterator[None]:
        """Go on after a failure, since the other ranks wait for this one in what follows."""
        try:
            yield
        except Exception as failure:
            self.failure = self.failure or failure

    def raise_failure(self) -> None:
        """The first one."""
        if self.failure is not None:
            raise self.failure

    def compare(self) -> None:
        """Do all ranks have the same values?"""
        if self.source is None:
            agree.require_same([self._line(path, digest) for path, digest in self.digests.items()], self.group)

    def _line(self, path: str, digest: str) -> agree.Fact:
        when = "before it builds the module"
        if self.module.get_parameter(path).is_meta:
            when = "before the transform, which draws them"
        remedy = f"seed every rank alike {when}, or pass broadcast_from=0"
        if self.weights is not None:
            remedy = "give every rank the same weights, or pass broadcast_from=0"
        return agree.Fact(f"the initial value of parameter {path!r}", f"weights with SHA-256 {digest}", remedy)


def _names(module: nn.Module) -> dict[Tensor, list[str]]:
    """All names of each parameter and buffer."""
    names: dict[Tensor, list[str]] = {}
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    for name, tensor in chain[tuple[str, Tensor]](parameters, buffers):
        names.setdefault(tensor, []).append(name)
    return names


Place = tuple[MutableMapping[str, Any], str, Tensor]  # where a module keeps a tensor of its own, and under which key


def _own(owner: nn.Module) -> Iterator[Place]:
    """The parameters and buffers of the module itself, without its children's."""
    for holder in (owner._parameters, owner._buffers):
        yield from ((holder, key, tensor) for key, tensor in holder.items() if tensor is not None)


def _children_first(module: nn.Module) -> list[nn.Module]:
    """Each submodule once, in the order in which constructors end, if they make their parts in order."""
    found: dict[nn.Module, None] = {}

    def visit(parent: nn.Module) -> None:
        for child in parent.children():
            if child not in found:
                visit(child)
        found.setdefault(parent)

    visit(module)
    return list(found)


@contextmanager
def _replaced(places: Sequence[Place], by: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Meanwhile other tensors stand in these places."""
    try:
        for holder, key, tensor in places:
            holder[key] = by[tensor]
        yield
    finally:
        for holder, key, tensor in places:
            holder[key] = tensor


def _as(meta: Tensor, full: Tensor | None) -> Tensor:
    """A parameter or buffer like that on the meta device, with these values and its strides; NaN, if there are none."""
    if full is None or full.stride() != meta.stride():
        nothing = float("nan") if meta.is_floating_point() or meta.is_complex() else 0
        room = torch.full_like(meta, nothing, device=CPU, requires_grad=False)
        full = room if full is None else room.copy_(full)
    if not isinstance(meta, nn.Parameter):
        return full
    param = nn.Parameter(full, requires_grad=meta.requires_grad)
    vars(param).update(vars(meta))  # marks that initialisers ask for
    return param


def _is_written(value: Tensor | None, fresh: Tensor, version: int) -> bool:
    """Whether what was NaN, of this version, was written to or replaced; writes through ``.data`` raise no version."""
    if value is None or value is not fresh or value._version != version:
        return True
    return value.is_floating_point() and not is_hollow(value)


def _fitting(value: object, like: Tensor, what: str) -> Tensor:
    """The value, in the dtype that is planned.

    Raises:
        ValueError: it has another shape, or is no tensor with values.
    """
    if not isinstance(value, Tensor) or value.is_meta:
        raise ValueError(f"{what} as {type(value).__name__} without values; a tensor of {tuple(like.shape)} is needed")
    if value.shape != like.shape:
        raise ValueError(
            f"{what} with shape {tuple(value.shape)}, and in the module it is {tuple(like.shape)}; build the module "
            f"that the values belong to"
        )
    return value.detach().to(like.dtype)


def _call(call: Callable[[nn.Module], object], owner: nn.Module, who: str, storages: Mapping[int, str]) -> None:
    """Call with the owner, and refuse writes to what is still on the meta device: to these storages, of these names.

    Raises:
        ValueError: naming what was written.
    """
    with _LostWrites() as lost:
        call(owner)
    for name in filter(None, map(storages.get, lost.found)):
        raise ValueError(
            f"{who} wrote {name!r} when its turn was {type(owner).__name__}, which does not own it, and only one "
            f"module's own parameters are there in full; write each in its owner's turn, or give weights"
        )


def _address(tensor: Tensor) -> int:
    """Of a storage; a tensor on the meta device has one, without memory, which its views share."""
    return int(tensor.untyped_storage()._cdata)


class _LostWrites(TorchDispatchMode):
    """Sees writes to meta tensors: they have no memory, so what is written there is lost."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[int, None] = {}  # their storages, in order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = {argument.name: argument for argument in func._schema.arguments}
        given = [*zip(named.values(), args, strict=False), *((named[name], value) for name, value in kwargs.items())]
        for argument, value in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensors = value if isinstance(value, list | tuple) else (value,)
                self.found.update((_address(t), None) for t in tensors if isinstance(t, Tensor) and t.is_meta)
        return func(*args, **kwargs)
