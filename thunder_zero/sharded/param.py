"""One parameter of a model on one rank: its tensors, and the moves between its states.

``docs/notes.md`` lists the tensors of a parameter. Programs hold the payloads, the full parameters that they free, and
the gradients. All other tensors are attributes of one :class:`ShardedParam`::

    shard    DTensor (5, 8) of the optimizer          placeholder   (5, 8) without values, in the module in forward
    rows     (3, 8), the shard's memory and padding   full          (5, 8) between forwards: ZeRO-1, or accumulating
                                                      deferred      (5, 8), the gradient that no_sync holds

The states are those of the full value. A deferred gradient is there or not, and which tensor the module has is one
choice for all parameters (``State.in_module``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thunder_zero.compat.private import DTensorSpec
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import local_rows, padded, real_rows, rows_in
from thunder_zero.sharded.digests import digests_of
from thunder_zero.sharded.dtensors import as_dtensor, local, of_gradient, parameter, with_attributes_of
from thunder_zero.sharded.placeholders import placeholder_of
from thunder_zero.sharded.wire import is_staged, rest_device

Status = Literal["replicated", "sharded", "gathering", "full"]  # a kept full value is stale in all but the last
Move = Literal["gather", "arrive", "expire"]

# fmt: off
MOVES: Mapping[tuple[Status, Move], Status] = {
    # The full value that a rank keeps between forwards. A replicated parameter has no moves, and a parameter whose full
    # value is only a local of programs stays sharded.
    ("sharded",   "gather"): "gathering",  # of this rank's memory only its rows are up to date
    ("gathering", "gather"): "gathering",  # the forward that gathered it before has failed
    ("gathering", "arrive"): "full",
    ("full",      "arrive"): "full",       # in one bucket with a parameter that was gathered
    ("sharded",   "arrive"): "sharded",    # it expired in flight
    ("full",      "expire"): "sharded",    # a rank changed its rows, or the accumulation ends
    ("gathering", "expire"): "sharded",
    ("sharded",   "expire"): "sharded",
}
# fmt: on


def moved(status: Status, move: Move, path: str) -> Status:
    """Return the status of a parameter after a move. Raise RuntimeError if the table lacks the move."""
    try:
        return MOVES[status, move]
    except KeyError:
        raise RuntimeError(
            f"parameter {path!r} is {status}, and MOVES of sharded/param.py has no move {move!r} from there; this is "
            f"an error of thunder_zero, so please report it"
        ) from None


class ShardedParam:
    """One parameter on this rank, sharded or replicated. The rows of a replicated parameter are all rows."""

    placeholder: nn.Parameter  # what the plain module has while forward runs: the full shape, without memory
    slots: tuple[tuple[MutableMapping[str, Any], str], ...] = ()  # entries of the plain module: a module's dict, a name
    is_compared = False  # True if tensor-parallel ranks have compared their gradients (``unsliced.py``)
    has_own_hook = False  # True if ``outside.py`` has the first hook on the shard's gradient
    given: Tensor | None = None  # the mean that a program has passed to autograd, until this hook gets it

    def __init__(self, param: Param, plan: Plan, device: torch.device, value: Tensor, spec: DTensorSpec | None) -> None:
        """Lay out the memory of ``value``: this rank's rows with padding, or the full value (ZeRO-1, replicated)."""
        self.planned, self.path = param, param.path  # :meth:`LocalState.take_plan` replaces it
        self.spec = spec  # of the shard; None in stage 0 without tensor parallelism
        self._spec_of_gradient = of_gradient(spec, param)
        keeps = param.resident or (param.kept_unsharded and not plan.policy.reshard_after_backward)
        self.keeps = param.sharded and keeps  # between forwards: in ZeRO-1, or in ZeRO-2 over an accumulation
        self.full: Tensor | None = None  # ZeRO-1's padded buffer, or the full parameter that ZeRO-2 keeps
        self.shares_memory = param.resident and not is_staged(param, plan, device)  # True if rows are a view of full
        if param.resident:
            self.full = padded(value.to(param.compute_dtype), param, plan)
            value = rows_in(self.full, param, plan) if self.shares_memory else local_rows(value, param, plan)
        # What programs read: this rank's rows with padding, or the replicated parameter.
        self.rows = value.to(rest_device(param, plan, device))
        if device.type == "cuda" and self.rows.device.type == "cpu":
            self.rows = self.rows.pin_memory()
        unpadded = real_rows(self.rows.detach(), param, plan)
        self._count = len(unpadded) if plan.geometry(param).padding else None
        self.shard = parameter(unpadded, spec, requires_grad=param.requires_grad)
        # The first forward, too, must compute with values that were encoded and decoded.
        is_full = param.resident and not plan.decodes(param)
        self.status: Status = "full" if is_full else "sharded" if param.sharded else "replicated"
        self.deferred: Tensor | None = None  # the full gradient that is not reduced yet
        # The versions of the shard and of its local tensor when they were gathered last. An in-place operator bumps the
        # first, a write to the local tensor the second. Fused optimizers bump neither: ``optimizers.py`` reports steps.
        self.version = self.current_version()
        self.digest: Tensor | None = None  # of ``rows`` at that time, (1,); None if no digest is compared

    def attach(self, module: nn.Module, device: torch.device) -> None:
        """Find the parameter's slots in a plain module, copy its attributes, and build its placeholder."""
        original = module.get_parameter(self.path)
        with_attributes_of(self.shard, original)
        self.placeholder = placeholder_of(self.path, original, self.planned.compute_dtype, device)
        parts = (name.rpartition(".") for name in self.planned.names)
        self.slots = tuple((module.get_submodule(parent)._parameters, name) for parent, _, name in parts)

    def gradient(self, rows: Tensor) -> Tensor:
        """Return the gradient of the shard, from the gradient of its rows with their padding."""
        return as_dtensor(rows if self._count is None else rows[: self._count], self._spec_of_gradient)

    @property
    def is_hooked(self) -> bool:
        """True if the shard has hooks of the user, on its gradient or on its accumulation."""
        hooks = self.shard._backward_hooks or ()
        return len(hooks) > self.has_own_hook or bool(self.shard._post_accumulate_grad_hooks)

    def give(self, mean: Tensor) -> None:
        """Record that a program passes a mean gradient to autograd, so that the hook does not average it again."""
        if self.has_own_hook:
            self.given = mean

    def current_version(self) -> tuple[int, int]:
        return self.shard._version, local(self.shard)._version

    @property
    def is_written(self) -> bool:
        """True if the shard's version has changed since it was recorded."""
        return self.version != self.current_version()

    @property
    def must_gather(self) -> bool:
        """True if a program must gather the parameter, False if it reads :meth:`full_value`."""
        return self.status != "full"

    def full_value(self) -> Tensor:
        """Return an unpadded view of the full value. Its rows of other ranks may be stale."""
        assert self.full is not None, f"no full value of {self.path} is kept"
        return self.full[: self.planned.shape[0]]

    def gather(self) -> None:
        """Record that a gather was launched."""
        self.status = moved(self.status, "gather", self.path)
        self.version = self.current_version()

    def arrive(self, full: Tensor) -> None:
        """Keep the full value that was gathered. ZeRO-1's buffer has it already."""
        self.status = moved(self.status, "arrive", self.path)
        if not self.planned.resident and not self.must_gather:
            self.full = full

    def expire(self) -> None:
        """Record that the full value is stale or no longer needed. Free it, unless it is ZeRO-1's buffer."""
        self.status = moved(self.status, "expire", self.path)
        if not self.planned.resident:
            self.full = None

    def defer(self, grad: Tensor) -> None:
        is_first = self.deferred is None
        total = self.add_deferred(grad)
        # Cloned, since the gradient may be a view, or other code may write to it.
        self.deferred = total.clone() if is_first else total

    def take_deferred(self) -> Tensor:
        deferred, self.deferred = self.deferred, None
        assert deferred is not None, f"no gradient of {self.path} is deferred"
        return deferred

    def add_deferred(self, grad: Tensor) -> Tensor:
        """Remove the deferred gradient, if any, and return its sum with ``grad``, in the dtype of the reduction."""
        if grad.dtype is not self.planned.reduce_dtype:
            grad = grad.to(self.planned.reduce_dtype)
        return grad if self.deferred is None else self.take_deferred().add_(grad)


def changed_digests(params: Sequence[ShardedParam]) -> tuple[Tensor, list[Tensor]]:
    """Return a flag for each parameter, True if its rows have another digest than recorded; and the new digests."""
    digests = digests_of(param.rows for param in params)
    return torch.cat([param.digest for param in params if param.digest is not None]) != torch.cat(digests), digests


def note_digests(params: Sequence[ShardedParam], digests: Iterable[Tensor] | None = None) -> None:
    digests = digests_of(param.rows for param in params) if digests is None else digests
    for param, digest in zip(params, digests, strict=True):
        param.digest = digest
