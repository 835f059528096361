"""Who owns which buffer: the one room with state.

One :class:`State` a model, made when the module is transformed. It holds the shards that the
optimizer sees, and has what else lives as long as the model in rooms of their own: ZeRO-1's buffers
and what an accumulation holds (``resident.py``), what it has deferred (``accumulation.py``), and the
transport. What the traces call is here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_zero.comm import agree
from thunder_zero.comm.group import Ranks
from thunder_zero.comm.handle import Waitable
from thunder_zero.comm.hybrid import Hybrid
from thunder_zero.comm.peers import answered
from thunder_zero.comm.staging import Staging, is_staged, needs_staging, rest_device
from thunder_zero.comm.transport import Transport, transport_for
from thunder_zero.plan import Param, Plan
from thunder_zero.runtime import optimizer_hooks
from thunder_zero.runtime.accumulation import Accumulation
from thunder_zero.runtime.clock import Clock
from thunder_zero.runtime.intact import Intact
from thunder_zero.runtime.resident import Buffers, HeldOver, Versions, padded, rows_in
from thunder_zero.runtime.shards import own_rows, placeholder, side_by_side


class State:
    """What one rank holds of one model.

    Attributes:
        plan: what each parameter is.
        ranks: who trains the model, and among whom it is sharded.
        group: all of these ranks.
        shards: what the optimizer sees, by path: this rank's rows, or the full parameter.
        device: where compute is.
        placeholders: what stands in the plain module instead, by path: the full shape, no memory.
        accumulation: gradients whose reduction is deferred.
        clock: sees the waits, while somebody measures.
    """

    def __init__(
        self, module: nn.Module, plan: Plan, ranks: Ranks, device: torch.device, at_rest: dict[str, Tensor]
    ) -> None:
        """Take over a plain module's parameters, whose values are ``at_rest``, which becomes the state's own.

        The module itself is left as it is; whoever calls puts ``placeholders`` into it.
        """
        self.plan = plan
        self.ranks = ranks
        self.group = ranks.everyone
        self.device = device
        self.accumulation = Accumulation()
        self.clock = Clock(device)
        self._transport = _transport(plan, ranks, device)
        self._reduced = False  # gradients were reduced since the ranks last agreed on what is stale
        self._agreed: set[tuple[str, bool]] = set()  # programs that were compared: forward, backward, ...; if synced
        rows = at_rest  # and not a copy: what was there before it is padded or packed must not live on in another dict
        buffers: dict[str, Tensor] = {}
        for param in plan.params:
            if param.resident:
                full = rows.pop(param.path)
                buffers[param.path] = buffer = padded(full.to(param.compute_dtype), param, plan)
                apart = is_staged(param, plan, device)
                rows[param.path] = own_rows(full, param, plan) if apart else rows_in(buffer, plan)
                del full
            rows[param.path] = _at(rest_device(param, plan, device), rows[param.path])
        gathered = [param for param in plan.params if param.sharded and not param.resident]
        for together in self._transport.neighbours(gathered):
            paths = [param.path for param in together]
            rows.update(zip(paths, side_by_side([rows[path] for path in paths]), strict=True))
        self.shards = {
            param.path: nn.Parameter(rows[param.path], requires_grad=param.requires_grad) for param in plan.params
        }
        originals = {param.path: module.get_parameter(param.path) for param in plan.params}
        self.placeholders = {
            param.path: placeholder(originals[param.path], param.compute_dtype, device) for param in plan.params
        }
        versions = Versions(self.shards)
        shared = tuple(path for path in buffers if not is_staged(plan.by_name[path], plan, device))
        self._resident = Buffers(buffers, shared, versions)
        self._held = HeldOver(versions)
        for path, original in originals.items():
            optimizer_hooks.replace(original, self.placeholders[path], path, self)
        optimizer_hooks.watch(self)

    def pin(self, model: Any) -> None:
        """Remember the jitted model, with shards and placeholders in their places, as it has to stay, and the
        parameters that the policy ignores, which may have been made since."""
        self._ignored = [param for name, param in model.named_parameters() if name not in self.plan.by_name]
        self._intact = Intact(model, self.plan, self.shards, self.placeholders, self._resident.shared)

    # What the traces call.

    @property
    def synced(self) -> bool:
        """Whether the gradients of a forward that runs now are reduced."""
        return self.accumulation.synced

    def check_synced(self, synced: bool) -> None:
        """Part of each prologue: Thunder takes another program, or compiles one, where this raises.

        Raises:
            RuntimeError: the program reduces gradients and this forward is under ``no_sync``, or the other way round.
        """
        if synced is not self.synced:
            raise RuntimeError(f"compiled with synced={synced}, and {self.synced} is asked for")

    def all_gather(self, shards: Sequence[Tensor], paths: Sequence[str]) -> Waitable:
        """Start gathering. ZeRO-1 sends only what an optimizer has changed since the last time, ZeRO-2 under
        ``policy.gather_once_per_accumulation`` only what the accumulation has not gathered before."""
        return self.clock.watched(self._gather(shards, paths), paths[0], gather=True)

    def _gather(self, shards: Sequence[Tensor], paths: Sequence[str]) -> Waitable:
        params = [self.plan.by_name[path] for path in paths]
        if params[0].resident:
            return self._resident.gather(shards, params, self._transport.all_gather)
        if self.plan.policy.gather_once_per_accumulation and params[0].gathered_once:
            return self._held.gather(shards, params, self._transport.all_gather, last=self.synced)
        return self._transport.all_gather(shards, params)

    def reduce(self, grads: Sequence[Tensor], paths: Sequence[str]) -> Waitable:
        """Start reducing gradients, with what was deferred of them, to their mean over ranks."""
        self._reduced = True
        self._held.drop()  # what this micro-batch has not reached, neither will backward
        params = [self.plan.by_name[path] for path in paths]
        sums = [self._with_deferred(grad, param) for grad, param in zip(grads, params, strict=True)]
        return self.clock.watched(self._reduce(sums, params), paths[0], gather=False)

    def _reduce(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        start = self._transport.reduce_scatter if params[0].sharded else self._transport.all_reduce
        return start(grads, params)

    def _with_deferred(self, grad: Tensor, param: Param) -> Tensor:
        deferred = self.accumulation.take(param.path)
        grad = as_of(param, grad)
        return grad if deferred is None else deferred.add_(grad)

    def defer(self, grad: Tensor, path: str) -> None:
        """Keep a full gradient until the next reduction of its parameter."""
        self.accumulation.defer(as_of(self.plan.by_name[path], grad), path)

    def reduce_deferred(self, paths: Sequence[str]) -> None:
        """Reduce what was deferred of parameters that this backward does not reach, and add it to their ``.grad``.

        Nothing travels unless there was a backward under ``no_sync``. Then ranks agree, by one small collective, on
        what any of them has deferred; who has not, has zeros. One parameter travels at a time.

        Raises:
            RuntimeError: policy ``check_gradients`` finds NaN or Inf.
        """
        if not self.accumulation.take_news():
            return
        self._reduced = True
        means = {}
        for path in self._on_any_rank(paths, self.accumulation.paths):
            param = self.plan.by_name[path]
            total = self.accumulation.take(path)
            nothing = torch.zeros((), dtype=param.reduce_dtype, device=self.device).expand(param.shape)
            full = nothing if total is None else total
            (means[path],) = self._reduce([full], [param]).wait()
        self.land(list(means.values()))
        if means and self.plan.policy.check_gradients:
            self.check_finite(list(means.values()), list(means))
        for path, mean in means.items():
            shard = self.shards[path]
            shard.grad = mean if shard.grad is None else shard.grad.add_(mean)

    def check_finite(self, grads: Sequence[Tensor], paths: Sequence[str]) -> None:
        """Policy ``check_gradients``: all ranks learn of a gradient that is NaN or Inf on any.

        Raises:
            RuntimeError: naming the first such parameter, on every rank.
        """
        bad = torch.stack([(~grad.isfinite().all()).to(self.device) for grad in grads]).to(torch.int32)
        self._largest(bad)
        if bad.any():
            path = paths[int(bad.argmax())]
            self.drop_deferred()
            raise RuntimeError(
                f"the gradient of parameter {path!r} is NaN or Inf; lower the learning rate, scale the loss or look at "
                f"this batch (policy check_gradients asked to stop here; no .grad was changed, what no_sync deferred "
                f"is dropped)"
            )

    def land(self, grads: Sequence[Tensor]) -> None:
        """Policy ``cpu_offload``: the copies of these reduced gradients to host memory have ended."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @torch.no_grad()
    def share_overflow(self, grads: Sequence[Tensor], apart: Sequence[Tensor], others: Sequence[str]) -> None:
        """Put Inf into a gradient of every rank where any rank's has NaN or Inf, for the gradient scaler to find.

        Args:
            grads: what backward returns of the plan's parameters, own rows of it. One of them is written to.
            apart: what it returns of those that are ignored; their ``.grad`` is looked at, too.
            others: parameters that this backward does not reach, whose ``.grad`` may have been added to.
        """
        if self.plan.ranks == 1:
            return
        seen = (*(self.shards[path] for path in others), *self._ignored)
        also = [*apart, *(param.grad for param in seen if param.grad is not None)]
        overflows = torch.stack([(~grad.isfinite().all()).to(self.device) for grad in (*grads, *also)])
        overflows = overflows.any().to(torch.int32)
        self._largest(overflows)
        if overflows:
            next(grad for grad in grads if grad.numel()).view(-1)[:1].fill_(torch.inf)

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
        resident = self._resident
        resident.note_changed()
        if self.plan.ranks == 1 or not resident.paths or not (self._reduced or resident.stale):
            return
        resident.stale = set(self._on_any_rank(resident.paths, resident.stale))
        self._reduced = False

    def _on_any_rank(self, paths: Sequence[str], here: Container[str]) -> list[str]:
        """Those of ``paths`` that are in ``here`` on any rank; one small collective."""
        flags = torch.tensor([path in here for path in paths], dtype=torch.int32, device=self.device)
        self._largest(flags)
        return [path for path, flag in zip(paths, flags.tolist(), strict=True) if flag]

    def _largest(self, flags: Tensor) -> None:
        """Each the largest that any rank has, in place; one small collective."""
        with answered(self.group):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)

    def drop_deferred(self) -> None:
        """Forget what an accumulation has deferred so far, and let go of what it holds."""
        self.accumulation.drop()
        self._held.drop()

    def open_accumulation(self, shards: Iterable[Tensor]) -> str | None:
        """The first parameter of which a gradient is deferred, among those that have these shards."""
        if not self.accumulation.paths:
            return None
        among = set(map(id, shards))
        return next((path for path in self.accumulation.paths if id(self.shards[path]) in among), None)

    def mark_stale(self, paths: Iterable[str]) -> None:
        """These parameters changed: the next forward refreshes the other ranks' rows, if they are resident."""
        changed = tuple(paths)
        self._resident.mark_stale(changed)
        self._held.drop(changed)

    def gather_now(self, param: Param, shard: Tensor | None = None) -> Tensor:
        """The full, unpadded parameter from the shards as they are now, or what ``shard``, of the same shape and any
        dtype, is this rank's rows of; a collective."""
        shard = self.shards[param.path].detach() if shard is None else shard.contiguous()
        if not param.sharded:
            return shard.clone()
        exact = replace(param, compute_dtype=shard.dtype)
        return self._transport.all_gather([shard], [exact]).wait()[0].clone()

    def add_over_ranks(self, *numbers: int) -> list[int]:
        """The sum of all ranks' numbers, one by one; a small collective."""
        totals = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        with answered(self.group):
            dist.all_reduce(totals, group=self.group)
        return [int(total) for total in totals]

    def seconds_alone(self, paths: Sequence[str]) -> float:
        """Seconds in which these sharded parameters are gathered while nothing else travels; a collective."""
        params, shards = [self.plan.by_name[path] for path in paths], [self.shards[path].detach() for path in paths]
        with answered(self.group):
            dist.barrier(group=self.group)
        start = self.clock.now()
        self._transport.all_gather(shards, params).wait()
        return start.until(self.clock.now())


def _transport(plan: Plan, ranks: Ranks, device: torch.device) -> Transport:
    """What carries the model's collectives: over one group or several, with casts in front where there are any."""
    transport = transport_for(ranks.inside, device)
    if ranks.across is not None:
        across, everyone = transport_for(ranks.across, device, role=1), transport_for(ranks.everyone, device, role=2)
        transport = Hybrid(transport, across, everyone, plan)
    return Staging(transport, plan, device) if needs_staging(plan, device) else transport


def _at(device: torch.device, rows: Tensor) -> Tensor:
    """The rows on this device; what leaves a GPU for host memory is pinned."""
    return rows.to(device).pin_memory() if rows.is_cuda and device.type == "cpu" else rows.to(device)


def as_of(param: Param, grad: Tensor) -> Tensor:
    """A full gradient in the dtype in which it is reduced, and of the parameter's shape: Thunder takes a 0-dim CPU
    tensor for a number, and leaves it to autograd to sum its gradient."""
    return grad.sum_to_size(param.shape).to(param.reduce_dtype)
