"""Who owns which buffer: the one room with state.

One :class:`State` a model, made when the module is transformed. It holds the shards that the
optimizer sees, ZeRO-1's full buffers and which of their rows are out of date, what a gradient
accumulation has deferred and holds, and the transport.

Two hooks that torch offers for every optimizer tell it what no trace can see: that an optimizer
has stepped (other ranks' rows of a ZeRO-1 buffer are stale from then on; fused optimizers do not
raise a tensor's version), and that an optimizer is about to step parameters that the transform
replaced (its step would be lost).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_zero import layout
from thunder_zero.plan import Param, Plan
from thunder_zero.runtime import agree
from thunder_zero.runtime.clock import Clock, Waitable
from thunder_zero.runtime.intact import Intact
from thunder_zero.runtime.transport import Handle, Transport, transport_for

_states: weakref.WeakSet[State] = weakref.WeakSet()
_replaced = WeakTensorKeyDictionary()  # parameter of before a transform, or placeholder -> (its path, its state)
_placeholders = WeakTensorKeyDictionary()  # all that stand in plain modules -> their paths
_hooked = False


class State:
    """What one rank holds of one model.

    Attributes:
        plan: what each parameter is.
        group: the process group.
        shards: what the optimizer sees, by path: this rank's rows, or the full parameter.
        placeholders: what stands in the plain module instead, by path: the full shape, no memory.
        clock: sees the waits, while somebody measures.
        synced: whether the gradients of a forward that runs now are reduced; otherwise that is deferred (``no_sync``).
    """

    def __init__(
        self, plan: Plan, group: dist.ProcessGroup, originals: Mapping[str, nn.Parameter], device: torch.device
    ) -> None:
        self.plan = plan
        self.group = group
        self.device = device
        self.clock = Clock(device)
        self._transport: Transport = transport_for(group, device)
        self._resident: dict[str, Tensor] = {}  # ZeRO-1: padded full parameters, whose own rows are the shards
        self._stale: set[str] = set()  # resident parameters that changed here, or, once agreed, on any rank
        self._versions: dict[str, int] = {}  # of the shards of what is resident or held, when it was last in date
        self._reduced = False  # gradients were reduced since the ranks last agreed on what is stale
        self._agreed: set[tuple[str, bool]] = set()  # programs that were compared: forward, backward, ...; if synced
        self.synced = True
        self._deferred: dict[str, Tensor] = {}  # sums of full gradients that the next reduction adds, by path
        self._has_deferred = False  # there was a backward under no_sync since they were last looked for
        self._held: dict[str, Tensor] = {}  # ZeRO-2: gathered parameters that an accumulation goes on with, by path
        rows = {param.path: self._own(param, originals[param.path].detach().to(device)) for param in plan.params}
        gathered = [param for param in plan.params if param.sharded and not param.resident]
        for together in self._transport.neighbours(gathered):
            paths = [param.path for param in together]
            rows.update(zip(paths, side_by_side([rows[path] for path in paths]), strict=True))
        self.shards = {
            param.path: nn.Parameter(rows[param.path], requires_grad=param.requires_grad) for param in plan.params
        }
        self.placeholders = {param.path: placeholder(originals[param.path], device) for param in plan.params}
        self._note_versions(self._resident)
        for path, original in originals.items():
            _replaced[original] = _replaced[self.placeholders[path]] = (path, weakref.ref(self))
            _placeholders[self.placeholders[path]] = path
        _watch(self)

    @classmethod
    def take(cls, module: nn.Module, plan: Plan, group: dist.ProcessGroup, device: torch.device) -> State:
        """Take over the parameters of a plain module, once all ranks agree that it is the same one.

        The module itself is left as it is; whoever calls puts ``placeholders`` into it.

        Raises:
            RuntimeError: the ranks' modules differ.
        """
        if group.size() > 1:  # nobody differs from itself, and it takes long to read all weights
            agree.require_same_model(agree.describe(module, plan, device), group)
        if plan.policy.broadcast_from is not None:
            agree.broadcast(module, plan, group, device)
        return cls(plan, group, {param.path: module.get_parameter(param.path) for param in plan.params}, device)

    def pin(self, model: Any) -> None:
        """Remember the jitted model, with shards and placeholders in their places, as it has to stay."""
        self._intact = Intact(model, self.plan, self.shards, self.placeholders, self._resident)

    @torch.no_grad()
    def _own(self, param: Param, full: Tensor) -> Tensor:
        if not param.resident:
            return self.own_rows(param, full)
        buffer = full.new_zeros(layout.padded_shape(param.shape, self.plan.world_size))
        buffer[: param.shape[0]] = full
        self._resident[param.path] = buffer
        return buffer.tensor_split(self.plan.world_size)[self.plan.rank]

    # What the traces call.

    def all_gather(self, shards: Sequence[Tensor], paths: Sequence[str]) -> Waitable:
        """Start gathering. ZeRO-1 sends only what an optimizer has changed since the last time, ZeRO-2 under
        ``policy.hold_gathered`` only what the accumulation has not gathered before."""
        return self.clock.watched(self._gather(shards, paths), paths[0], gather=True)

    def _gather(self, shards: Sequence[Tensor], paths: Sequence[str]) -> Waitable:
        params = [self.plan.by_name[path] for path in paths]
        if self.plan.policy.hold_gathered and params[0].kept and not params[0].resident:
            return self._gather_missing(shards, params)
        if not params[0].resident:
            return self._transport.all_gather(shards, params)
        stale = [at for at, path in enumerate(paths) if path in self._stale]
        buffers = [self._resident[path] for path in paths]
        refresh = None
        if stale:
            refresh = self._transport.all_gather(
                [shards[at] for at in stale], [params[at] for at in stale], into=[buffers[at] for at in stale]
            )
            self._stale.difference_update(paths)  # not before: if the launch fails, the rows are still out of date
        full = tuple(buffer[: param.shape[0]] for buffer, param in zip(buffers, params, strict=True))
        return Resident(full, refresh, lambda: self._note_versions(paths))

    def _gather_missing(self, shards: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Gather what no earlier micro-batch has left; the last one, which reduces, leaves nothing."""
        for path in list(filter(self._changed, self._held)):
            del self._held[path]
        found = {param.path: self._held.get(param.path) for param in params}
        missing = [at for at, param in enumerate(params) if found[param.path] is None]
        handle = None
        if missing:
            handle = self._transport.all_gather([shards[at] for at in missing], [params[at] for at in missing])
        if self.synced:
            for path in found:
                self._held.pop(path, None)
            return Held(found, handle, None)
        self._note_versions(found)
        return Held(found, handle, self._held)

    def reduce(self, grads: Sequence[Tensor], paths: Sequence[str]) -> Waitable:
        """Start reducing gradients, with what was deferred of them, to their mean over ranks."""
        self._reduced = True
        self._held.clear()  # what this micro-batch has not reached, neither will backward
        params = [self.plan.by_name[path] for path in paths]
        sums = [self._sum(grad, param) for grad, param in zip(grads, params, strict=True)]
        return self.clock.watched(self._reduce(sums, params), paths[0], gather=False)

    def _reduce(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Handle:
        start = self._transport.reduce_scatter if params[0].sharded else self._transport.all_reduce
        return start(grads, params)

    def _sum(self, grad: Tensor, param: Param) -> Tensor:
        """A full gradient and what was deferred of it, which is then no longer."""
        # Thunder takes a 0-dim CPU tensor for a number, and leaves it to autograd to sum its gradient.
        grad = grad.sum_to_size(param.shape)
        deferred = self._deferred.pop(param.path, None)
        return grad if deferred is None else deferred.add_(grad)

    def defer(self, grad: Tensor, path: str) -> None:
        """Keep a full gradient until the next reduction of its parameter, added to what is there already."""
        self._has_deferred = True
        is_first = path not in self._deferred
        total = self._sum(grad, self.plan.by_name[path])
        self._deferred[path] = total.clone() if is_first else total  # it may be a view, or somebody else's

    def reduce_deferred(self, paths: Sequence[str]) -> None:
        """Reduce what was deferred of parameters that this backward does not reach, and add it to their ``.grad``.

        Nothing travels unless there was a backward under ``no_sync``. Then ranks agree, by one small collective, on
        what any of them has deferred; who has not, has zeros. One parameter travels at a time.

        Raises:
            RuntimeError: policy ``check_gradients`` finds NaN or Inf.
        """
        if not self._has_deferred:
            return
        self._has_deferred, self._reduced = False, True
        means = {}
        for path in self._on_any_rank(paths, self._deferred):
            param = self.plan.by_name[path]
            total = self._deferred.pop(path, None)
            full = self.shards[path].new_zeros(param.shape) if total is None else total
            (means[path],) = self._reduce([full], [param]).wait()
        if means and self.plan.policy.check_gradients:
            self.check_finite(list(means.values()), list(means))
        for path, mean in means.items():
            shard = self.shards[path]
            shard.grad = mean if shard.grad is None else shard.grad.add_(mean)

    def _on_any_rank(self, paths: Sequence[str], here: Container[str]) -> list[str]:
        """Those of ``paths`` that are in ``here`` on any rank; one small collective."""
        flags = torch.tensor([path in here for path in paths], dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return [path for path, flag in zip(paths, flags.tolist(), strict=True) if flag]

    def drop_deferred(self) -> None:
        """Forget what an accumulation has deferred so far."""
        self._deferred.clear()
        self._held.clear()
        self._has_deferred = False

    @property
    def deferred_bytes(self) -> int:
        """Bytes of the full gradients that wait for a reduction."""
        return sum(grad.nbytes for grad in self._deferred.values())

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Forwards inside of the block have the reduction of their gradients deferred."""
        before, self.synced = self.synced, False
        try:
            yield
        finally:
            self.synced = before

    def check_synced(self, synced: bool) -> None:
        """Part of each prologue: Thunder takes another program, or compiles one, where this raises.

        Raises:
            RuntimeError: the program reduces gradients and this forward is under ``no_sync``, or the other way round.
        """
        if synced is not self.synced:
            raise RuntimeError(f"compiled with synced={synced}, and {self.synced} is asked for")

    def check_model(self) -> None:
        """Run before every forward: the model is as planned, and nothing of a failed step is under way.

        Raises:
            RuntimeError: a parameter was replaced, moved, cast, frozen or thawed after the transform.
        """
        self._transport.drain()
        self._intact.require()
        self._agree_on_stale()

    def _agree_on_stale(self) -> None:
        """Let all ranks refresh what changed on any.

        Asked after each backward, since then an optimizer may have stepped on some ranks and not on
        others (a scaler that found an Inf), and when something changed here by other means: loaded,
        initialised or updated in place. One small collective; none while nothing can have changed.
        What is changed by other means has to be changed on all ranks, as with any replicated
        parameter: a rank that did not would not know that it is asked.
        """
        self._stale.update(filter(self._changed, self._resident))
        if self.plan.world_size == 1 or not self._resident or not (self._reduced or self._stale):
            return
        self._stale = set(self._on_any_rank(list(self._resident), self._stale))
        self._reduced = False

    def _changed(self, path: str) -> bool:
        """Whether something has written to this shard since its version was noted."""
        return self.shards[path]._version != self._versions[path]

    def _note_versions(self, paths: Iterable[str]) -> None:
        self._versions.update((path, self.shards[path]._version) for path in paths)

    def check_finite(self, grads: Sequence[Tensor], paths: Sequence[str]) -> None:
        """Policy ``check_gradients``: all ranks learn of a gradient that is NaN or Inf on any.

        Raises:
            RuntimeError: naming the first such parameter, on every rank.
        """
        bad = torch.stack([~grad.isfinite().all() for grad in grads]).to(torch.int32)
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=self.group)
        if bad.any():
            path = paths[int(bad.argmax())]
            self.drop_deferred()
            raise RuntimeError(
                f"the gradient of parameter {path!r} is NaN or Inf; lower the learning rate, scale the loss or look at "
                f"this batch (policy check_gradients asked to stop here; no .grad was changed, what no_sync deferred "
                f"is dropped)"
            )

    def agree_on_schedule(self, program: str, lines: Sequence[str]) -> None:
        """Before the first step: do all ranks start and end the same collectives in the same order?

        Only the first forward, the first backward and the first forward without backward are compared. What is
        compiled later (another batch size) may be compiled by one rank alone, and asking the others would wait for
        ever; so it is with a forward of DDP, which has no collective.

        Raises:
            RuntimeError: naming the first line that differs, and the rank.
        """
        reduces = program == "backward" and self.synced
        silent = not reduces and not any(param.sharded for param in self.plan.params)
        if (program, self.synced) not in self._agreed and not silent:
            self._agreed.add((program, self.synced))
            agree.require_same_schedule(program + " under no_sync" * (not self.synced), lines, self.group)

    # What happens outside of the traces.

    def open_accumulation(self, shards: Iterable[Tensor]) -> str | None:
        """The first parameter of which a gradient is deferred, among those that have these shards."""
        if not self._deferred:
            return None
        among = set(map(id, shards))
        return next((path for path in self._deferred if id(self.shards[path]) in among), None)

    def mark_stale(self, paths: Iterable[str]) -> None:
        """These parameters changed: the next forward refreshes the other ranks' rows, if they are resident."""
        changed = set(paths)
        self._stale.update(self._resident.keys() & changed)
        for path in self._held.keys() & changed:
            del self._held[path]

    def own_rows(self, param: Param, full: Tensor) -> Tensor:
        """This rank's rows of a full parameter, padded with zeros: what its shard should hold."""
        if not param.sharded:
            return full
        start, stop = layout.row_range(param.shape[0], self.plan.world_size, self.plan.rank)
        shard = full.new_zeros(self.plan.shard_shape(param))
        shard[: stop - start] = full[start:stop]
        return shard

    def gather_now(self, param: Param) -> Tensor:
        """The full, unpadded parameter from the shards as they are now; a collective."""
        shard = self.shards[param.path].detach()
        if not param.sharded:
            return shard.clone()
        return self._transport.all_gather([shard], [param]).wait()[0].clone()

    def add_over_ranks(self, *numbers: int) -> list[int]:
        """The sum of all ranks' numbers, one by one; a small collective."""
        totals = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(totals, group=self.group)
        return [int(total) for total in totals]

    def seconds_alone(self, paths: Sequence[str]) -> float:
        """Seconds in which these sharded parameters are gathered while nothing else travels; a collective."""
        params, shards = [self.plan.by_name[path] for path in paths], [self.shards[path].detach() for path in paths]
        dist.barrier(group=self.group)
        start = self.clock.now()
        self._transport.all_gather(shards, params).wait()
        return start.until(self.clock.now())


class Resident:
    """The handle of ZeRO-1's parameters: there already, or being refreshed in place."""

    def __init__(self, full: tuple[Tensor, ...], refresh: Handle | None, refreshed: Callable[[], None]) -> None:
        self._full = full
        self._refresh = refresh
        self._refreshed = refreshed

    def wait(self) -> tuple[Tensor, ...]:
        """The full, unpadded parameters, as views of their buffers."""
        if self._refresh is not None:
            self._refresh.wait()
            self._refreshed()
        return self._full


class Held:
    """The handle of parameters of which some are held already: those that arrive are held, too, where ``hold`` is."""

    def __init__(self, found: dict[str, Tensor | None], handle: Handle | None, hold: dict[str, Tensor] | None) -> None:
        self._found, self._handle, self._hold = found, handle, hold

    def wait(self) -> tuple[Tensor, ...]:
        """The full, unpadded parameters."""
        arrived = iter(() if self._handle is None else self._handle.wait())
        full = {path: next(arrived) if found is None else found for path, found in self._found.items()}
        if self._hold is not None:
            self._hold.update(full)
        return tuple(full.values())


def side_by_side(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors of one dtype that share one memory, one after the other.

    Each is a tensor by itself and no view, with a version of its own: autograd keeps shards for backward, and a
    step of another shard must not seem to have changed them.
    """
    memory = torch.cat([tensor.flatten() for tensor in tensors])
    starts = accumulate((tensor.numel() for tensor in tensors), initial=0)
    return [
        torch.empty(0, dtype=memory.dtype, device=memory.device).set_(
            memory.untyped_storage(), start, tensor.shape, tensor.stride()
        )
        for start, tensor in zip(starts, tensors, strict=False)
    ]


def placeholder(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape that holds one element: NaN, where the dtype has it.

    Thunder traces shapes and dtypes from the plain module; the values are in the shards. Whoever
    reads a placeholder by mistake gets NaN, not stale weights.
    """
    value = float("nan") if param.is_floating_point() or param.is_complex() else 0
    one = torch.full((), value, dtype=param.dtype, device=device)
    return nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)


def process_group(group: object) -> dist.ProcessGroup:
    """The group that was given, or the default one.

    Raises:
        RuntimeError: there is neither.
        ValueError: this rank is not in the group.
        TypeError: not a process group.
    """
    if group is not None:
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # an int, which new_group returns on the other ranks
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process_group that it was given; transform the module only on "
                f"the ranks that torch.distributed.new_group was given"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group is {group!r}, a {type(group).__name__}; give a torch.distributed.ProcessGroup "
                f"(of a DeviceMesh: mesh.get_group()), or None for the default group"
            )
        return group
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group; call torch.distributed.init_process_group (under torchrun) before the "
            "transform, or pass process_group"
        )
    default = dist.group.WORLD
    assert default is not None, "it is initialised"
    return default


def device_for(module: nn.Module, plan: Plan, group: dist.ProcessGroup, device: torch.device | None) -> torch.device:
    """Where the shards will live: ``device``, or where the first parameter is.

    Raises:
        ValueError: parameters that cannot be sharded, a device that is not there or that the group has no backend
            for, ``broadcast_from`` that is not a rank of the group.
    """
    for param in plan.params:
        original = module.get_parameter(param.path)
        if original.is_meta:
            raise ValueError(
                f"parameter {param.path!r} is on the meta device and has no values to shard; materialise the module "
                f"first (thunder_zero.trace reads it as it is)"
            )
        if isinstance(original, DTensor):
            raise ValueError(
                f"parameter {param.path!r} is a DTensor, so torch shards it already (fully_shard, tensor parallelism); "
                f"give a module of plain tensors"
            )
    source = plan.policy.broadcast_from
    if source is not None and source >= group.size():
        raise ValueError(f"broadcast_from is {source}; the process group has ranks 0 to {group.size() - 1}")
    device = device or module.get_parameter(plan.params[0].path).device
    transport_for(group, device)
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device is '{device}', which cannot be used here ({reason}); give one that is there"
        ) from None


def is_transformed(param: nn.Parameter) -> bool:
    """Whether the parameter is a placeholder, in a module that was transformed before."""
    return param in _placeholders


def is_hollow(param: nn.Parameter) -> bool:
    """Whether a parameter is NaN all over, as a copy of a placeholder is."""
    if not param.is_floating_point() or param.is_meta or param.numel() == 0:
        return False
    first = param.detach()[(0,) * param.ndim]
    return bool(first.isnan()) and bool(param.detach().isnan().all())


def _watch(state: State) -> None:
    global _hooked
    _states.add(state)
    if not _hooked:
        register_optimizer_step_pre_hook(_refuse_replaced)
        register_optimizer_step_pre_hook(_refuse_open)
        register_optimizer_step_post_hook(_note_step)
        _hooked = True


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for param in _parameters(optimizer):
        path, state = _replaced.get(param, (None, None))
        if state is not None and state() is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds the plain module's parameter {path!r}, which is not trained since "
                f"the transform, so its step would be lost; build the optimizer on model.parameters() of the model "
                f"that thunder.jit or thunder_zero.zero returned"
            )


def _refuse_open(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for state in _states:
        if path := state.open_accumulation(_parameters(optimizer)):
            raise RuntimeError(
                f"{type(optimizer).__name__} is about to step while gradients of parameter {path!r} that no_sync "
                f"deferred were not reduced yet; run the last micro-batch, forward and backward, outside of no_sync, "
                f"or drop them with model.zero_grad()"
            )


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(param) for param in _parameters(optimizer)}
    for state in _states:
        state.mark_stale(path for path, shard in state.shards.items() if id(shard) in stepped)
