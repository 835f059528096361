"""Values that ``reset_parameters`` and ``init`` draw for a module on the meta device.

In its turn a module has its own tensors in full, ``reset_parameters`` or ``init`` writes them, and they are cut to this
rank's rows before the next module's turn. Every rank draws everything and keeps its rows, so that the number of ranks
does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from thunder_zero.comm.backends import transport_for
from thunder_zero.sharded.initial_values.data import CPU, Cuts, Failures, PlainModel, fitted
from thunder_zero.sharded.initial_values.module_turn import Turn, address, children_first, own_tensors


class Drawn:
    """Tensors on the meta device that nothing else gives values.

    Args:
        model: the module.
        tensors: those that are drawn here, and held as they are at rest; in full, if in no plan or to be broadcast.
        cuts: cuts them.
        all_draw: every module with tensors on the meta device has its turn, so that the random generator moves as in
            construction; otherwise only those that own some of ``tensors``.
    """

    def __init__(self, model: PlainModel, tensors: Collection[Tensor], cuts: Cuts, *, all_draw: bool) -> None:
        self._model = model
        self._tensors = tensors
        self._cuts = cuts
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
        return torch.empty_like(tensor, device=self._model.device, requires_grad=False) if value is None else value

    def at_rest(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor that is held as it is at rest, and then no longer; None if it is not."""
        return self._taken(tensor) if self._is_cut(tensor) else None

    def _taken(self, tensor: Tensor) -> Tensor | None:
        return self._values.pop(self._model.name_of(tensor), None)

    def _is_cut(self, tensor: Tensor) -> bool:
        return self._model.sender is None and self._model.param_of(tensor) is not None

    def _put(self, tensor: Tensor, full: Tensor) -> None:
        name = self._model.name_of(tensor)
        self._values[name] = self._cuts.cut(full, name) if self._is_cut(tensor) else full

    def reset(self) -> None:
        """Call ``reset_parameters`` of each module that has a turn, in the order of construction.

        The first of several owners of a tied parameter writes it; what the others draw is thrown away, so that the
        random generator moves as in construction.
        """
        for owner in children_first(self._model.module):
            reset = getattr(type(owner), "reset_parameters", None)
            if callable(reset) and self._has_turn(owner):
                self._reset(owner, reset)

    def _reset(self, owner: nn.Module, reset: Callable[[nn.Module], object]) -> None:
        turn = Turn(owner, lambda tensor: None if tensor.is_meta else _copied(tensor))
        turn.call(reset, "reset_parameters", self._meta_names)
        for tensor in turn.tensors:
            if self.has(tensor) and turn.wrote(tensor) and tensor not in self._written:
                self._written.add(tensor)
                self._put(tensor, self._fitted(turn, tensor, "reset_parameters", owner))

    def initialize(self, init: Callable[[nn.Module], object], failures: Failures) -> None:
        """Call ``init`` as ``module.apply(init)`` does, but not for modules whose tensors all have values.

        Each owner of a tied parameter writes to the values that the owners before it left. These are gathered, so
        nothing is raised here, and whether something is gathered must not depend on what ``init`` did.
        """

        def visit(owner: nn.Module) -> None:
            if self._has_turn(owner) or next(own_tensors(owner), None) is None:
                self._initialize(owner, init, failures)

        if self._tensors:
            self._model.module.apply(visit)

    def _initialize(self, owner: nn.Module, init: Callable[[nn.Module], object], failures: Failures) -> None:
        turn = Turn(owner, lambda tensor: self._in_full(tensor) if tensor.is_meta else _copied(tensor))
        with failures.remembered():
            failures.raise_first()  # init is not called again after it failed
            turn.call(init, "init", self._meta_names)
        for tensor in filter(self.has, turn.tensors):
            full = turn.unsharded(tensor).detach()
            if turn.wrote(tensor) or tensor in self._written:
                self._written.add(tensor)
                with failures.remembered():
                    full = self._fitted(turn, tensor, "init", owner)
            self._put(tensor, full)

    def _in_full(self, tensor: Tensor) -> Tensor | None:
        """The value in full, on the CPU, to be put again; None if there is none. A collective, if it has to be
        gathered."""
        value, param = self._taken(tensor), self._model.param_of(tensor)
        if value is None:
            return None
        if param is not None and self._is_cut(tensor) and param.sharded and not param.resident:
            value = self._transport.all_gather([value.to(self._model.device)], [param]).wait()[0]
        return value.to(CPU)

    def _has_turn(self, owner: nn.Module) -> bool:
        """Whether the module owns tensors on the meta device, as far as these matter."""
        own = [tensor for _, _, tensor in own_tensors(owner) if tensor.is_meta]
        return bool(self._tensors and own) if self._all_draw else any(map(self.has, own))

    def _fitted(self, turn: Turn, tensor: Tensor, who: str, owner: nn.Module) -> Tensor:
        name = self._model.name_of(tensor)
        return fitted(turn.value(tensor), tensor, f"{who} of {type(owner).__name__} left {name!r}")

    def require_written(self) -> None:
        """Refuse a tensor that was given no value.

        Raises:
            ValueError: naming the first such tensor.
        """
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


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU of a tensor that keeps its own values."""
    return tensor.detach().to(CPU, copy=True)
