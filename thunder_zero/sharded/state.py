"""One model on one rank: parameters, process groups, and objects with the lifetime of the model.

Training code steps the shards. Compiled traces reach this state through ``runtime.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thunder_zero.comm.agree import Claim, require_same
from thunder_zero.comm.backends import model_transport
from thunder_zero.comm.collective_tags import CollectiveTag, current_activity, doing
from thunder_zero.comm.group import Ranks
from thunder_zero.comm.small_collectives import all_reduce_max, next_number, to_device
from thunder_zero.compat.private import DTensorSpec
from thunder_zero.plan.outer import Outer
from thunder_zero.plan.params import Param, Plan
from thunder_zero.sharded.dtensors import specs_of
from thunder_zero.sharded.outside import OutsideGradients
from thunder_zero.sharded.param import ShardedParam, note_digests
from thunder_zero.sharded.same_batch import SameBatch
from thunder_zero.sharded.waits import Clock, Labels
from thunder_zero.sharded.wire import Wire


def unreduced(action: str, where: str) -> RuntimeError:
    return RuntimeError(
        f"cannot {action}: no_sync still holds unreduced gradients {where}; run forward and backward of the last "
        f"micro-batch outside of no_sync, or drop them with model.zero_grad()"
    )


class LocalState:
    """What a program reads and writes of one model: a forecast runs programs where no module and no peer exists.

    ``at_rest`` has full values (ZeRO-1, replicated parameters) or this rank's rows, by path, and is emptied.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        name: str,
        wire: Wire,
        at_rest: dict[str, Tensor],
        specs: Mapping[str, DTensorSpec],
    ) -> None:
        self.plan, self.wire = plan, wire
        self.device = device  # the device that computes
        self.name = name  # in errors, equal on all ranks: ``"model 0 (Net)"``
        self.transport, self.copies = wire.transport, wire.copies
        self.synced = True  # False under ``no_sync``: the gradients of the current forward will be deferred
        self.grew = False  # True if a backward under ``no_sync`` ran since the deferred gradients were last reduced
        self.must_agree = False  # True if an optimizer may have stepped since ranks last agreed on stale parameters
        self.holds_gathered = False  # True if a parameter that ZeRO-2 gathered may be kept for the next micro-batch
        self.training_forwards = 0  # that have ended in training mode with gradients enabled
        self.clock, self.labels = Clock(device), Labels(plan)
        self._first_frozen = plan.frozen
        self.refrozen = ""  # names parameters that were frozen or unfrozen since the model was sharded, for tags
        self.params = {
            param.path: ShardedParam(param, plan, device, at_rest.pop(param.path), specs.get(param.path))
            for param in plan.params
        }
        self.resident = [param for param in self.params.values() if param.planned.resident]
        self._outside = OutsideGradients(plan, wire, name, device, self.params)  # to which hooks refer weakly
        is_copied = plan.mesh.shard.size > 1 or not all(param.shares_memory for param in self.resident)
        self.compares_digests = is_copied and device.type != "meta"  # to find writes that bump no version
        if self.compares_digests:
            note_digests(self.resident)

    @property
    def deferred(self) -> list[ShardedParam]:
        return [param for param in self.params.values() if param.deferred is not None]

    def take_plan(self, plan: Plan) -> None:
        """Replace the plan by a plan in which other parameters are trained (:meth:`Plan.training`)."""
        self.labels.end()
        self.plan, self.labels = plan, Labels(plan)
        for param in plan.params:
            self.params[param.path].planned = param
        first, *others = sorted(self._first_frozen ^ plan.frozen) or [""]
        count = f" and {len(others)} more" * bool(others)
        self.refrozen = f", with requires_grad of {first!r}{count} changed" if first else ""

    def on_any_rank(self, paths: Sequence[str], changed: Container[str] = (), flags: Tensor | None = None) -> list[str]:
        """Return the paths that are in ``changed``. Only a subclass with process groups uses ``flags``."""
        return [path for path in paths if path in changed]

    def require_same_launches(self, phase: str, launches: Sequence[str]) -> None:
        """Do nothing. Only a subclass with process groups compares launches."""

    def expire(self, params: Iterable[ShardedParam]) -> None:
        """Record that kept full values are stale, so that the next forward gathers these parameters again."""
        for param in params:
            if param.keeps:
                param.expire()

    def release_gathered(self) -> None:
        if self.holds_gathered:
            self.holds_gathered = False
            self.expire(param for param in self.params.values() if not param.planned.resident)

    def drop_deferred(self) -> None:
        """Drop all deferred gradients, and the unsharded parameters kept for the next micro-batch."""
        for param in self.deferred:
            param.take_deferred()
        self.grew = False
        self.release_gathered()


class State(LocalState):
    """This rank's state of one model, and the process groups that train it."""

    def __init__(
        self, module: nn.Module, plan: Plan, ranks: Ranks, device: torch.device, at_rest: dict[str, Tensor]
    ) -> None:
        """Build the parameters of a plain module. The module is not changed until :meth:`place`."""
        self.ranks, self.group = ranks, ranks.world
        self.in_module: Literal["shards", "placeholders", "full parameters"] = "shards"
        self.averaged: frozenset[Tensor] = frozenset()  # parameters that hold their averages (``EMA.applied``)
        self.outer: Outer | None = None  # the outer step between sites, for forecasts (``outer/diloco.py``)
        self.before_first_step: Callable[[], None] | None = None  # called before an optimizer's first step
        self.saves: Any = None  # the thread of asynchronous saves (``checkpoint/save.py``)
        self.class_name = type(module).__name__
        name = f"model {next_number(self.group)} ({self.class_name})"
        self.same_batch = SameBatch(plan, ranks, device, name)
        wire = Wire(model_transport(ranks, device, name, plan.policy.transport), plan, device)
        super().__init__(plan, device, name, wire, at_rest, specs_of(plan, ranks, device))
        for param in self.params.values():
            param.attach(module, device)
        self._recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]

    def place(self) -> None:
        self._put(param.shard for param in self.params.values())

    def _put(self, tensors: Iterable[Tensor]) -> None:
        for param, tensor in zip(self.params.values(), tensors, strict=True):
            for holder, name in param.slots:
                holder[name] = tensor
        for part in self._recurrent:  # recurrent layers also have a list of their parameters
            part._flat_weights = [part._parameters.get(name) for name in part._flat_weights_names]

    @contextmanager
    def holding(self, full: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Temporarily replace the module's shards by full parameters, and all shards without one by placeholders.

        Forward has placeholders in each call, also when nothing is captured, since dynamo guards the identity of the
        module's parameters.
        """
        before, self.in_module = self.in_module, "placeholders" if full is None else "full parameters"
        stand_ins: dict[str, Tensor] = {path: param.placeholder for path, param in self.params.items()}
        try:
            self._put((stand_ins | dict(full or {})).values())
            yield
        finally:
            self.place()
            self.in_module = before

    def require_at_rest(self) -> None:
        if self.in_module == "placeholders":
            raise RuntimeError(
                f"{self.class_name} was called inside of its own forward, or from a second thread, after thunder_zero "
                f"sharded it; call the sharded model once at a time"
            )
        self.require_sharded()

    def require_sharded(self) -> None:
        if self.in_module == "full parameters":
            raise RuntimeError(
                f"{self.name} is inside full_parameters; leave that block first, or call the module that it gives"
            )

    def require_own_values(self, action: str) -> None:
        """Raise RuntimeError if parameters hold their averages. The error begins with "cannot" and ``action``."""
        if self.averaged:
            raise RuntimeError(
                f"cannot {action}: the parameters of {self.name} are averages inside of EMA.applied; leave that block "
                f"first"
            )

    def leave_group(self) -> None:
        """Drop all references to the process groups. Afterwards the model cannot be called."""
        vars(self.transport).clear()  # cleared, since compiled programs also refer to the transport
        specs = [param.spec for param in self.params.values() if param.spec is not None]
        for mesh in {spec.mesh for spec in specs}:  # since shards also refer to the meshes
            mesh._pg_registry.clear()
        del self.ranks, self.group, self.transport, self.same_batch

    def on_any_rank(self, paths: Sequence[str], changed: Container[str] = (), flags: Tensor | None = None) -> list[str]:
        """Return the paths that are in ``changed`` or set in ``flags`` on any rank, by at most one small collective."""
        if self.plan.ranks == 1 and flags is None:
            return [path for path in paths if path in changed]
        counts = to_device([path in changed for path in paths], torch.int32, self.device)
        if flags is not None:
            counts += flags.to(self.device)
        if self.plan.ranks > 1:
            with doing("the comparison of changed parameters", self.name):
                all_reduce_max(counts, self.group)
        return [path for path, count in zip(paths, counts.tolist(), strict=True) if count]

    def require_same_launches(self, phase: str, launches: Sequence[str]) -> None:
        """Compare the launches of a phase between ranks. Raise RuntimeError on all ranks if they differ."""
        calls = "call the model the same way on every rank: with or without gradients, inside or outside no_sync"
        inputs = "give every rank inputs that take the same path through the module"
        claims = [
            Claim(f"launch {number} of {phase}", repr(launch), inputs) for number, launch in enumerate(launches, 1)
        ]
        with doing(phase, self.name):
            require_same([Claim("the program to run", phase, calls), *claims], self.group)

    def require_reduced(self, action: str, params: Iterable[ShardedParam] | None = None) -> None:
        """Raise RuntimeError if ``no_sync`` holds gradients of these parameters, or by default of any."""
        for param in self.params.values() if params is None else params:
            if param.deferred is not None:
                raise unreduced(action, f"of parameter {param.path!r}")

    def gather_now(self, param: Param, shard: Tensor | None = None) -> Tensor:
        """Gather a parameter, or the tensor of which ``shard`` is the rows, in full and unpadded; a collective."""
        encoding = param.frozen_format if shard is None else None
        shard = self.params[param.path].rows if shard is None else shard.contiguous()
        if not param.sharded:
            return shard.clone()
        dtype = param.dtype if encoding else shard.dtype
        exact_param = replace(param, compute_dtype=dtype, gather_format=None, frozen_format=encoding)
        activity = current_activity() or f"a gather of {self.name}"
        self.transport.enter(CollectiveTag(activity, f"{param.path} {exact_param.compute_dtype}"))
        full = self.wire.gather_now([shard], [exact_param])[0].clone()
        self.copies.wait()
        return full

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Temporarily send parameters and gradients without lossy formats. All ranks must enter the block."""
        formatted = [param for param in self.params.values() if param.planned.gather_format]
        self.expire(formatted)
        try:
            with self.wire.exact():
                yield
        finally:
            self.expire(formatted)
