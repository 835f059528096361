"""This rank's state of one model: shards, placeholders, and all objects with the model's lifetime.

Training code steps the shards. Compiled traces reach this state through ``runtime.py``::

    shards['w']          DTensor (5, 8) of the optimizer              placeholders['w']    (5, 8) without values
    rows['w']            (3, 8), the shard's memory and padding       transport            gathers and reduces
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from thunder_zero.comm.agree import Fact, require_same
from thunder_zero.comm.backends import model_transport
from thunder_zero.comm.collective_tags import CollectiveTag, current_activity, doing
from thunder_zero.comm.group import Ranks
from thunder_zero.comm.small_collectives import all_reduce_max, barrier, next_number, to_device
from thunder_zero.compat.private import DTensorSpec
from thunder_zero.compat.torch.groups import let_go_of_groups
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import real_rows
from thunder_zero.sharded.accumulation import Accumulation, unreduced
from thunder_zero.sharded.attributes import with_attributes_of
from thunder_zero.sharded.dtensors import as_dtensor, parameter, specs_of
from thunder_zero.sharded.outside import OutsideGradients
from thunder_zero.sharded.resident import KeptUnsharded, ResidentParameters, lay_out
from thunder_zero.sharded.same_batch import SameBatch
from thunder_zero.sharded.slices import placeholder_of
from thunder_zero.sharded.waits import Clock, Labels
from thunder_zero.sharded.wire import Wire
from thunder_zero.sharded.writes import Versions


class LocalState:
    """The state of one model on one rank, without process groups: only the transport communicates with peers.

    Args:
        at_rest: full values (ZeRO-1, replicated parameters) or this rank's rows, by path. The dict is emptied.
        digests: True also detects writes that bump no version, for resident parameters.

    Attributes:
        device: the device that computes.
        name: the model's name in errors, equal on all ranks: ``"model 0 (Net)"``.
        copies: asynchronous copies of shards between host memory and the device.
        rows: the tensors that programs read, by path: this rank's rows with padding, or the full parameter.
        specs: the DTensor spec of each parameter, by path. The mapping is empty in stage 0 without tensor parallelism.
        frozen: paths of the parameters that do not train.
        refrozen: names parameters that were frozen or unfrozen since the model was sharded, for tags; "" if none.
        single_rows: paths of the sharded parameters with one row.
        shards: the optimizer's parameters by path: aliases of ``rows``, as DTensors if there are specs.
        accumulation: gradients whose reduction is deferred.
        outside: gradients of full parameters that programs do not reduce.
        resident: ZeRO-1's full parameters.
        kept_unsharded: gathered parameters that the next micro-batch reads again.
        clock: the recorder of waits while ``measure_times`` runs.
        labels: the labels of waits and units while a profiler runs.
        training_forwards: the number of forwards that have ended in training mode with gradients enabled.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        name: str,
        wire: Wire,
        at_rest: dict[str, Tensor],
        specs: Mapping[str, DTensorSpec],
        *,
        digests: bool = True,
    ) -> None:
        self.plan, self.device, self.name, self.wire = plan, device, name, wire
        self.transport, self.copies = wire.transport, wire.copies
        self.accumulation = Accumulation()
        self.training_forwards = 0
        self.clock = Clock(device)
        self.labels = Labels(plan)
        memory = lay_out(plan, device, at_rest)
        self.rows, self.specs = memory.rows, specs
        self.frozen = self._first_frozen = plan.frozen
        self.refrozen = ""
        self.single_rows = frozenset(param.path for param in plan.params if param.sharded and param.shape[0] == 1)
        self.shards: dict[str, nn.Parameter] = {}
        self._layouts: dict[str, tuple[int | None, DTensorSpec | None]] = {}  # number of rows (if padded), spec
        for param in plan.params:
            rows, spec = real_rows(memory.rows[param.path].detach(), param, plan), specs.get(param.path)
            self.shards[param.path] = parameter(rows, spec, requires_grad=param.requires_grad)
            self._layouts[param.path] = len(rows) if param in plan.padded else None, spec
        self.outside = OutsideGradients(plan, wire, name, device, self.shards)
        versions = Versions(self.shards)
        is_copied = plan.mesh.shard.size > 1 or len(memory.shared) < len(memory.buffers)
        digested = {path: self.rows[path] for path in memory.buffers} if digests and is_copied else {}
        self.resident = ResidentParameters(memory.buffers, memory.shared, versions, digested)
        self.kept_unsharded = KeptUnsharded(self.rows, versions)
        # The first forward, too, must compute with values that were encoded and decoded.
        formatted = (param.path for param in plan.params if plan.decodes(param))
        self.resident.mark_stale(formatted)

    def take_plan(self, plan: Plan) -> None:
        """Replace the plan by a plan in which other parameters are trained (:meth:`Plan.training`)."""
        self.labels.end()
        self.plan, self.frozen, self.labels = plan, plan.frozen, Labels(plan)
        first, *others = sorted(self._first_frozen ^ plan.frozen) or [""]
        count = f" and {len(others)} more" * bool(others)
        self.refrozen = f", with requires_grad of {first!r}{count} changed" if first else ""

    def gradient(self, rows: Tensor, path: str) -> Tensor:
        """Return the gradient of a shard, from the gradient of its rows with their padding."""
        count, spec = self._layouts[path]
        return as_dtensor(rows if count is None else rows[:count], spec)

    def on_any_rank(self, paths: Sequence[str], changed: Container[str], flags: Tensor | None = None) -> list[str]:
        """Return the paths that are in ``changed``. Only a subclass with process groups uses ``flags``."""
        return [path for path in paths if path in changed]

    def first_on_any_rank(self, flags: Tensor) -> int | None:
        """Return None. Only a subclass with process groups compares ``flags``."""
        return None

    def require_same_launches(self, phase: str, launches: Sequence[str]) -> None:
        """Do nothing. Only a subclass with process groups compares launches."""

    def drop_deferred(self) -> None:
        """Drop all deferred gradients, and the unsharded parameters kept for the next micro-batch."""
        self.accumulation.drop()
        self.kept_unsharded.clear()


class State(LocalState):
    """This rank's state of one model, and the process groups that train it.

    Attributes:
        ranks: the process groups that train the model.
        group: the process group of all ranks.
        placeholders: the parameters of the plain module while forward runs, by path, with full shapes and no memory.
        unsharded: True inside ``full_parameters``, where the model cannot be called.
        same_batch: the comparison of inputs between tensor-parallel ranks.
        averaged: the ids of the parameters that currently hold their averages (``EMA.applied``).
        same_gradients: paths whose gradients tensor-parallel ranks have compared (``unsliced.py``).
        saves: the thread of asynchronous saves (``checkpoint/background.py``); None before the first.
        replaced: weak references to the parameters that the shards replace, with their paths, by id.
    """

    def __init__(
        self, module: nn.Module, plan: Plan, ranks: Ranks, device: torch.device, at_rest: dict[str, Tensor]
    ) -> None:
        """Build the shards and placeholders of a plain module. The module is not changed."""
        self.ranks, self.group = ranks, ranks.world
        self.unsharded = False
        self.averaged: frozenset[int] = frozenset()
        self.same_gradients: set[str] = set()
        self.saves: Any = None
        name = f"model {next_number(self.group)} ({type(module).__name__})"
        self.same_batch = SameBatch(plan, ranks, device, name)
        wire = Wire(model_transport(ranks, device, name, plan.policy.transport), plan, device)
        super().__init__(plan, device, name, wire, at_rest, specs_of(plan, ranks, device))
        plain = {param.path: module.get_parameter(param.path) for param in plan.params}
        self.replaced = {id(original): (ref(original), path) for path, original in plain.items()}
        for path, original in plain.items():
            with_attributes_of(self.shards[path], original)
        self.placeholders = {
            param.path: placeholder_of(param.path, plain[param.path], param.compute_dtype, device)
            for param in plan.params
        }

    def require_sharded(self) -> None:
        """Raise RuntimeError inside ``full_parameters``."""
        if self.unsharded:
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
        for mesh in {spec.mesh for spec in self.specs.values()}:  # since shards also refer to the meshes
            let_go_of_groups(mesh)
        del self.ranks, self.group, self.transport, self.same_batch

    def agree_on_stale(self) -> None:
        """Let ranks agree on the parameters that the next forward must gather.

        Call :meth:`thunder_zero.sharded.resident.ResidentParameters.agree_on_stale` and
        :meth:`thunder_zero.sharded.resident.KeptUnsharded.require_unwritten`.
        """
        self.kept_unsharded.require_unwritten()
        self.resident.agree_on_stale(self.on_any_rank)

    def on_any_rank(self, paths: Sequence[str], changed: Container[str], flags: Tensor | None = None) -> list[str]:
        """Return the paths that are in ``changed`` or set in ``flags`` on any rank. ``flags`` has a bool for each path.

        This is one small collective if there are several ranks.
        """
        if self.plan.ranks == 1 and flags is None:
            return [path for path in paths if path in changed]
        counts = to_device([path in changed for path in paths], torch.int32, self.device)
        if flags is not None:
            counts += flags.to(self.device)
        if self.plan.ranks > 1:
            with doing("the comparison of changed parameters", self.name):
                all_reduce_max(counts, self.group)
        return [path for path, count in zip(paths, counts.tolist(), strict=True) if count]

    def first_on_any_rank(self, flags: Tensor) -> int | None:
        """Return the index of the first flag that is set on any rank, or None. This is one small collective."""
        flags = flags.to(torch.int32)
        all_reduce_max(flags, self.group)
        return int(flags.argmax()) if flags.any() else None

    def require_same_launches(self, phase: str, launches: Sequence[str]) -> None:
        """Compare the launches of a phase between ranks. Raise RuntimeError on all ranks if they differ."""
        calls = "call the model the same way on every rank: with or without gradients, inside or outside no_sync"
        inputs = "give every rank inputs that take the same path through the module"
        facts = [Fact(f"launch {number} of {phase}", repr(launch), inputs) for number, launch in enumerate(launches, 1)]
        with doing(phase, self.name):
            require_same([Fact("the program to run", phase, calls), *facts], self.group)

    def require_reduced(self, action: str, shards: Iterable[Tensor] | None = None) -> None:
        """Raise RuntimeError if ``no_sync`` holds gradients of these shards, or by default of any shard."""
        ids = None if shards is None or not self.accumulation.paths else set(map(id, shards))
        for path in self.accumulation.paths:
            if ids is None or id(self.shards[path]) in ids:
                raise unreduced(action, f"of parameter {path!r}")

    def mark_stale(self, paths: Iterable[str]) -> None:
        """Record that these parameters changed, so that the next forward gathers them again."""
        changed = tuple(paths)
        self.resident.mark_stale(changed)
        self.kept_unsharded.drop(changed)

    def gather_now(self, param: Param, shard: Tensor | None = None) -> Tensor:
        """Gather a full, unpadded parameter from the current shards. This is a collective.

        If ``shard`` is given, gather this tensor instead: this rank's rows of a tensor with the parameter's shape.
        """
        encoding = param.frozen_format if shard is None else None
        shard = self.rows[param.path] if shard is None else shard.contiguous()
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
        formatted = [param.path for param in self.plan.params if param.gather_format]
        self.mark_stale(formatted)
        try:
            with self.wire.exact():
                yield
        finally:
            self.mark_stale(formatted)

    def seconds_alone(self, paths: Sequence[str]) -> float:
        """Return the seconds that a gather of these sharded parameters takes without overlap (a collective)."""
        params, shards = [self.plan.by_name[path] for path in paths], [self.rows[path] for path in paths]
        barrier(self.group)
        self.transport.enter(CollectiveTag(f"measure_times of {self.name}", repr(paths)))
        start = self.clock.now()
        self.wire.gather_now(shards, params)
        self.copies.wait()
        return start.until(self.clock.now())
