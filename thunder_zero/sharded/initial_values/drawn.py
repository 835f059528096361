"""Values that ``reset_parameters`` and ``init`` draw for a module on the meta device.

Modules take turns. In its turn a module has its tensors in full, and ``reset_parameters`` or ``init`` writes the
tensors. Then a rank keeps only its rows. Every rank draws all values, so that they do not depend on the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_zero.comm.agree import Failures
from thunder_zero.comm.backends import transport_for
from thunder_zero.comm.small_collectives import full_tensor
from thunder_zero.compat.private import DTensorSpec
from thunder_zero.sharded.dtensors import as_dtensor, contiguous, parameter_like
from thunder_zero.sharded.initial_values.data import CPU, PlainModel, Sharder, fitted, whole_like
from thunder_zero.sharded.initial_values.progress import Progress
from thunder_zero.sharded.wire import decode_frozen

Slot = tuple[MutableMapping[str, Any], str, Tensor]  # a module's dict of tensors, a key in the dict, and its tensor


class Drawn:
    """Drawn values of tensors on the meta device.

    A value is held in full if the tensor has no ``Param``, or if the value will be sent to all ranks. Other values are
    held as this rank's rows. With ``all_draw``, every module with meta tensors has a turn, so that the random generator
    advances as in construction. Otherwise only modules that own some of ``tensors`` have a turn.
    """

    def __init__(
        self, model: PlainModel, tensors: Collection[Tensor], sharder: Sharder, shown: Progress, *, all_draw: bool
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._sharder = sharder
        self._shown = shown
        self._values: dict[str, Tensor] = {}
        self._transport = transport_for(model.ranks.shard_group, model.device)
        self._all_draw = all_draw
        self._written: set[Tensor] = set()
        self._meta_names = {address(tensor): names[0] for tensor, names in model.names.items() if tensor.is_meta}

    def has(self, tensor: Tensor) -> bool:
        return tensor in self._tensors

    def full(self, tensor: Tensor) -> Tensor:
        """Remove and return a full value; an empty tensor if nothing was drawn, since the tensor has no elements."""
        value = self._take(tensor)
        like = whole_like(tensor)
        return torch.empty_like(like, device=self._model.device, requires_grad=False) if value is None else value

    def at_rest(self, tensor: Tensor) -> Tensor | None:
        """Remove and return the rows of a tensor; None if its value is held in full."""
        return self._take(tensor) if self._is_cut(tensor) else None

    def _take(self, tensor: Tensor) -> Tensor | None:
        return self._values.pop(self._model.name_of(tensor), None)

    def _is_cut(self, tensor: Tensor) -> bool:
        return self._model.sender is None and self._model.param_of(tensor) is not None

    def _put(self, tensor: Tensor, full: Tensor) -> None:
        """Store this rank's rows of a value if possible, otherwise the full value."""
        name = self._model.name_of(tensor)
        self._values[name] = self._sharder.shard(full, name) if self._is_cut(tensor) else full
        self._shown.advance(tensor)

    def reset(self) -> None:
        """Call ``reset_parameters`` of each module that has a turn, in the order of construction.

        The first owner of a tied parameter writes its value. Other owners also draw, to advance the generator as in
        construction, but their values are dropped.
        """
        for owner in children_first(self._model.module):
            reset = getattr(type(owner), "reset_parameters", None)
            if callable(reset) and self._has_turn(owner):
                self._reset(owner, reset)

    def _reset(self, owner: nn.Module, reset: Callable[[nn.Module], object]) -> None:
        stand_ins = stand_ins_for(owner, lambda tensor: None if tensor.is_meta else _copied(tensor))
        for tensor, value in find_written(reset, "reset_parameters", owner, stand_ins, self._meta_names).items():
            if self.has(tensor) and tensor not in self._written:
                self._written.add(tensor)
                self._put(tensor, self._fitted(value, tensor, "reset_parameters", owner))

    def initialize(self, init: Callable[[nn.Module], object], failures: Failures) -> None:
        """Call ``init`` as ``module.apply(init)`` does, except for modules whose tensors all have values.

        The second owner of a tied parameter starts from the gathered values of the first. All ranks must join these
        gathers. So exceptions are stored in ``failures``, and gathers do not depend on the results of ``init``.
        """

        def visit(owner: nn.Module) -> None:
            if self._has_turn(owner) or next(direct_tensors(owner), None) is None:
                self._initialize(owner, init, failures)

        if self._tensors:
            self._model.module.apply(visit)

    def _initialize(self, owner: nn.Module, init: Callable[[nn.Module], object], failures: Failures) -> None:
        stand_ins = stand_ins_for(owner, lambda tensor: self._in_full(tensor) if tensor.is_meta else _copied(tensor))
        written: dict[Tensor, Any] = {}
        with failures.capture():
            failures.raise_first()  # if init failed before, do not call init again
            written = find_written(init, "init", owner, stand_ins, self._meta_names)
        for tensor in filter(self.has, stand_ins):
            full = stand_ins[tensor].detach()
            if tensor in written:
                self._written.add(tensor)
                with failures.capture():
                    full = self._fitted(written[tensor], tensor, "init", owner)
            self._put(tensor, full)

    def _in_full(self, tensor: Tensor) -> Tensor | None:
        """Remove a value and return it in full on the CPU; None if it is missing. This is a collective for rows."""
        value, param = self._take(tensor), self._model.param_of(tensor)
        if value is None:
            return None
        if param is not None and self._is_cut(tensor) and param.sharded and not param.resident:
            value = self._transport.all_gather([value.to(self._model.device)], [param.rest_shape]).wait()[0]
            value = value if param.frozen_format is None else decode_frozen(value, param, param.dtype)
        slices = self._model.ranks.tensor
        if param is not None and self._is_cut(tensor) and param.sliced is not None and slices is not None:
            whole = contiguous(self._model.plan.whole_shape(param), value.dtype)
            part: Any = as_dtensor(value.contiguous(), DTensorSpec(slices, (Shard(param.sliced),), whole))
            value = full_tensor(part, slices.get_group())
        return value.to(CPU)

    def _has_turn(self, owner: nn.Module) -> bool:
        """Return whether a module owns meta tensors to draw, or must draw to advance the generator."""
        meta_tensors = [tensor for _, _, tensor in direct_tensors(owner) if tensor.is_meta]
        return bool(self._tensors and meta_tensors) if self._all_draw else any(map(self.has, meta_tensors))

    def _fitted(self, value: object, tensor: Tensor, function_name: str, owner: nn.Module) -> Tensor:
        return fitted(value, tensor, f"{function_name} of {type(owner).__name__} left {self._model.name_of(tensor)!r}")

    def require_written(self) -> None:
        for owner_path, owner in self._model.module.named_modules():
            for _, key, tensor in direct_tensors(owner):
                if self.has(tensor) and tensor not in self._written and tensor.numel():
                    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    path = f"{owner_path}.{key}" if owner_path else key
                    raise ValueError(
                        f"{kind} {path!r} is on the meta device, and neither reset_parameters of "
                        f"{type(owner).__name__} nor init gave it a value; give init, a function that writes it, or "
                        f"weights, or build the module on a real device"
                    )


def _copied(tensor: Tensor) -> Tensor | None:
    return None if isinstance(tensor, DTensor) else tensor.detach().to(CPU, copy=True)


def stand_ins_for(owner: nn.Module, before: Callable[[Tensor], Tensor | None]) -> dict[Tensor, Tensor]:
    """Return temporary stand-ins, which the module may write to, with values of ``before``; NaN for None."""
    tensors = dict.fromkeys(tensor for _, _, tensor in direct_tensors(owner))
    return {tensor: _like(tensor, before(tensor)) for tensor in tensors}


def find_written(
    function: Callable[[nn.Module], object],
    who: str,
    owner: nn.Module,
    stand_ins: Mapping[Tensor, Tensor],
    meta_names: Mapping[int, str],
) -> dict[Tensor, Any]:
    """Call a function on its module ``owner``. Return the new values of the tensors that it wrote to or replaced.

    During the call, ``stand_ins`` replace the module's tensors. A write to a meta tensor of another module raises.
    ``meta_names`` has the names of all tensors on the meta device, by the addresses of their storages.
    """
    slots = list(direct_tensors(owner))
    versions = {tensor: stand_in._version for tensor, stand_in in stand_ins.items()}
    with _replaced(slots, stand_ins):
        with LostWrites() as lost:
            function(owner)
        after = {tensor: holder[key] for holder, key, tensor in slots}
    for name in filter(None, map(meta_names.get, lost.addresses)):
        raise ValueError(
            f"{who} wrote {name!r} when it was called for {type(owner).__name__}, which does not own it; only one "
            f"module's own parameters have values at a time: write each when {who} is called for its owner, or give "
            f"weights"
        )
    return {tensor: value for tensor, value in after.items() if _is_written(value, stand_ins[tensor], versions[tensor])}


def _is_written(value: Any, stand_in: Tensor, version: int) -> bool:
    if value is not stand_in or value._version != version:
        return True
    # Writes through ``.data`` bump no version.
    return stand_in.is_floating_point() and not is_all_nan(stand_in)


def is_all_nan(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() == 0:
        return False
    first = tensor.detach()[(0,) * tensor.ndim]
    return bool(first.isnan()) and bool(tensor.detach().isnan().all())


def direct_tensors(owner: nn.Module) -> Iterator[Slot]:
    """Yield the slots of a module's own parameters and buffers, without its children's slots."""
    for holder in (owner._parameters, owner._buffers):
        yield from ((holder, key, tensor) for key, tensor in holder.items() if tensor is not None)


def children_first(module: nn.Module) -> Iterable[nn.Module]:
    """Return each submodule once, children before parents: usually the order in which constructors end."""
    modules: dict[nn.Module, None] = {}
    module.apply(modules.setdefault)
    return modules


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object, which views share, even on the meta device."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _replaced(slots: Sequence[Slot], by: Mapping[Tensor, Tensor]) -> Iterator[None]:
    try:
        for holder, key, tensor in slots:
            holder[key] = by[tensor]
        yield
    finally:
        for holder, key, tensor in slots:
            holder[key] = tensor


def _like(meta: Tensor, full: Tensor | None) -> Tensor:
    """Return a full CPU parameter or buffer like ``meta``, with the values of ``full``; NaN if ``full`` is None."""
    meta = whole_like(meta)
    if full is None or full.stride() != meta.stride():
        filler = float("nan") if meta.is_floating_point() or meta.is_complex() else 0
        buffer = torch.full_like(meta, filler, device=CPU, requires_grad=False)
        full = buffer if full is None else buffer.copy_(full)
    if not isinstance(meta, nn.Parameter):
        return full
    return parameter_like(meta, full)  # keep attributes, since initialisers read them


class LostWrites(TorchDispatchMode):
    """A mode that records the addresses of meta tensors that are written to, since such writes have no effect."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses: dict[int, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        # Not strict, since the schema has more than the positional arguments.
        args_by_name = {**kwargs, **{argument.name: value for argument, value in zip(arguments, args, strict=False)}}
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args_by_name.get(argument.name)
                tensors = value if isinstance(value, list | tuple) else (value,)
                self.addresses.update((address(t), None) for t in tensors if isinstance(t, Tensor) and t.is_meta)
        return func(*args, **kwargs)
