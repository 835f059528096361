"""Values that ``reset_parameters`` and ``init`` draw for a module on the meta device.

In its turn a module has its own tensors in full, ``reset_parameters`` or ``init`` writes them, and they are cut to this
rank's rows before the next module's turn. Every rank draws everything and keeps its rows, so that the number of ranks
does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_zero.comm.backends import transport_for
from thunder_zero.comm.small_collectives import all_gather_tensor
from thunder_zero.sharded.attributes import parameter_like
from thunder_zero.sharded.initial_values.data import CPU, Failures, PlainModel, Sharder, fitted, whole_like
from thunder_zero.sharded.wire import decode_frozen

Slot = tuple[MutableMapping[str, Any], str, Tensor]  # a module's dict of tensors, the key and the tensor


class Drawn:
    """Tensors on the meta device that nothing else gives values, held as they are at rest; in full, if in no plan or to
    be broadcast. If ``all_draw``, every module with tensors on the meta device has its turn, so that the random
    generator moves as in construction; otherwise only those that own some of ``tensors``."""

    def __init__(self, model: PlainModel, tensors: Collection[Tensor], sharder: Sharder, *, all_draw: bool) -> None:
        self._model = model
        self._tensors = tensors
        self._sharder = sharder
        self._values: dict[str, Tensor] = {}
        self._transport = transport_for(model.ranks.shard_group, model.device)
        self._all_draw = all_draw
        self._written: set[Tensor] = set()
        self._meta_names = {address(tensor): names[0] for tensor, names in model.names.items() if tensor.is_meta}

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor is drawn here."""
        return tensor in self._tensors

    def full(self, tensor: Tensor) -> Tensor:
        """The value of a tensor that is held in full, and then no longer; one without elements may have none."""
        value = self._taken(tensor)
        like = whole_like(tensor)
        return torch.empty_like(like, device=self._model.device, requires_grad=False) if value is None else value

    def at_rest(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor that is held as it is at rest, and then no longer; None if it is not."""
        return self._taken(tensor) if self._is_cut(tensor) else None

    def _taken(self, tensor: Tensor) -> Tensor | None:
        return self._values.pop(self._model.name_of(tensor), None)

    def _is_cut(self, tensor: Tensor) -> bool:
        return self._model.sender is None and self._model.param_of(tensor) is not None

    def _put(self, tensor: Tensor, full: Tensor) -> None:
        name = self._model.name_of(tensor)
        self._values[name] = self._sharder.shard(full, name) if self._is_cut(tensor) else full

    def reset(self) -> None:
        """Call ``reset_parameters`` of each module that has a turn, in the order of construction. The first owner of
        a tied parameter writes it; what others draw is thrown away, so that the generator moves as in construction."""
        for owner in children_first(self._model.module):
            reset = getattr(type(owner), "reset_parameters", None)
            if callable(reset) and self._has_turn(owner):
                self._reset(owner, reset)

    def _reset(self, owner: nn.Module, reset: Callable[[nn.Module], object]) -> None:
        given = given_to(owner, lambda tensor: None if tensor.is_meta else _copied(tensor))
        for tensor, value in written_by(reset, "reset_parameters", owner, given, self._meta_names).items():
            if self.has(tensor) and tensor not in self._written:
                self._written.add(tensor)
                self._put(tensor, self._fitted(value, tensor, "reset_parameters", owner))

    def initialize(self, init: Callable[[nn.Module], object], failures: Failures) -> None:
        """Call ``init`` as ``module.apply(init)`` does, but not for modules whose tensors all have values. Each owner
        of a tied parameter writes to the values that the owners before it left. These are gathered, so nothing is
        raised here, and whether something is gathered must not depend on what ``init`` did."""

        def visit(owner: nn.Module) -> None:
            if self._has_turn(owner) or next(own_tensors(owner), None) is None:
                self._initialize(owner, init, failures)

        if self._tensors:
            self._model.module.apply(visit)

    def _initialize(self, owner: nn.Module, init: Callable[[nn.Module], object], failures: Failures) -> None:
        given = given_to(owner, lambda tensor: self._in_full(tensor) if tensor.is_meta else _copied(tensor))
        written: dict[Tensor, Any] = {}
        with failures.remembered():
            failures.raise_first()  # init is not called again after it failed
            written = written_by(init, "init", owner, given, self._meta_names)
        for tensor in filter(self.has, given):
            full = given[tensor].detach()
            if tensor in written:
                self._written.add(tensor)
                with failures.remembered():
                    full = self._fitted(written[tensor], tensor, "init", owner)
            self._put(tensor, full)

    def _in_full(self, tensor: Tensor) -> Tensor | None:
        """The value in full, on the CPU, to be put again; None if there is none. A collective, if it has to be
        gathered."""
        value, param = self._taken(tensor), self._model.param_of(tensor)
        if value is None:
            return None
        if param is not None and self._is_cut(tensor) and param.sharded and not param.resident:
            value = self._transport.all_gather([value.to(self._model.device)], [param.rest_shape]).wait()[0]
            value = value if param.frozen_format is None else decode_frozen(value, param, param.dtype)
        slices = self._model.ranks.tensor
        if param is not None and self._is_cut(tensor) and param.sliced is not None and slices is not None:
            value = torch.cat(all_gather_tensor(value.contiguous(), slices.get_group()), param.sliced)
        return value.to(CPU)

    def _has_turn(self, owner: nn.Module) -> bool:
        """Whether the module owns tensors on the meta device, as far as these matter."""
        own = [tensor for _, _, tensor in own_tensors(owner) if tensor.is_meta]
        return bool(self._tensors and own) if self._all_draw else any(map(self.has, own))

    def _fitted(self, value: object, tensor: Tensor, who: str, owner: nn.Module) -> Tensor:
        return fitted(value, tensor, f"{who} of {type(owner).__name__} left {self._model.name_of(tensor)!r}")

    def require_written(self) -> None:
        """Refuse a tensor that was given no value."""
        for owner_path, owner in self._model.module.named_modules():
            for _, key, tensor in own_tensors(owner):
                if self.has(tensor) and tensor not in self._written and tensor.numel():
                    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    path = f"{owner_path}.{key}" if owner_path else key
                    raise ValueError(
                        f"{kind} {path!r} is on the meta device, and neither reset_parameters of "
                        f"{type(owner).__name__} nor init gave it a value; give init, a function that writes it, or "
                        f"weights, or build the module on a real device"
                    )


def _copied(tensor: Tensor) -> Tensor | None:
    """A copy on the CPU of a tensor that keeps its own values; None of one that is in slices."""
    return None if isinstance(tensor, DTensor) else tensor.detach().to(CPU, copy=True)


def given_to(owner: nn.Module, before: Callable[[Tensor], Tensor | None]) -> dict[Tensor, Tensor]:
    """What a module gets in the place of its own tensors to write to: their values in full by ``before``, or NaN where
    there are none yet."""
    own = dict.fromkeys(tensor for _, _, tensor in own_tensors(owner))
    return {tensor: _like(tensor, before(tensor)) for tensor in own}


def written_by(
    function: Callable[[nn.Module], object],
    who: str,
    owner: nn.Module,
    given: Mapping[Tensor, Tensor],
    elsewhere: Mapping[int, str],
) -> dict[Tensor, Any]:
    """What a module holds in the place of each tensor that the function, called ``who`` in a sentence, wrote to, or
    replaced; meanwhile it has what it was given. Tensors of other modules have no memory, so a write to them raises:
    ``elsewhere`` has the names of all tensors on the meta device by the addresses of their storages."""
    slots = list(own_tensors(owner))
    versions = {tensor: room._version for tensor, room in given.items()}
    with _replaced(slots, given):
        with LostWrites() as lost:
            function(owner)
        after = {tensor: holder[key] for holder, key, tensor in slots}
    for name in filter(None, map(elsewhere.get, lost.addresses)):
        raise ValueError(
            f"{who} wrote {name!r} when it was called for {type(owner).__name__}, which does not own it; only one "
            f"module's own parameters have values at a time: write each when {who} is called for its owner, or give "
            f"weights"
        )
    return {of: value for of, value in after.items() if _is_written(value, given[of], versions[of])}


def _is_written(value: Any, given: Tensor, version: int) -> bool:
    """Whether a call wrote to what it was given, or replaced it; writes through ``.data`` raise no version."""
    if value is not given or value._version != version:
        return True
    return given.is_floating_point() and not is_all_nan(given)


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


def children_first(module: nn.Module) -> Iterable[nn.Module]:
    """Each submodule once, in the order in which constructors end, if they make their parts in order."""
    found: dict[nn.Module, None] = {}
    module.apply(found.setdefault)
    return found


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
    """A parameter or buffer like the module's, with its strides and these values; NaN, if there are none. Of a DTensor
    one with the slices of all ranks."""
    meta = whole_like(meta)
    if full is None or full.stride() != meta.stride():
        nothing = float("nan") if meta.is_floating_point() or meta.is_complex() else 0
        room = torch.full_like(meta, nothing, device=CPU, requires_grad=False)
        full = room if full is None else room.copy_(full)
    if not isinstance(meta, nn.Parameter):
        return full
    return parameter_like(meta, full)  # initialisers ask for attributes


class LostWrites(TorchDispatchMode):
    """Sees writes to meta tensors, which are lost: ``addresses`` are those of the storages written to, in order."""

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
