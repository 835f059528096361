"""Who owns which buffer: the one room with state.

One :class:`State` a model, made when the module is transformed. It holds the shards that the
optimizer sees, ZeRO-1's full buffers and which of their rows are out of date, and the transport.

Two hooks that torch offers for every optimizer tell it what no trace can see: that an optimizer
has stepped (other ranks' rows of a ZeRO-1 buffer are stale from then on), and that an optimizer is
about to step parameters that the transform replaced (its step would be lost).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_zero import layout
from thunder_zero.plan import Param, Plan
from thunder_zero.runtime import agree
from thunder_zero.runtime.transport import Handle, Transport, transport_for

_states: weakref.WeakSet[State] = weakref.WeakSet()
_replaced = WeakTensorKeyDictionary()  # parameters of before a transform -> their paths
_hooked = False


class State:
    """What one rank holds of one model.

    Attributes:
        plan: what each parameter is.
        group: the process group.
        shards: what the optimizer sees, by path: this rank's rows, or the full parameter.
        placeholders: what stands in the plain module instead, by path: the full shape, no memory.
    """

    def __init__(
        self, plan: Plan, group: dist.ProcessGroup, originals: Mapping[str, nn.Parameter], device: torch.device
    ) -> None:
        self.plan = plan
        self.group = group
        self._transport: Transport = transport_for(group, device)
        self._resident: dict[str, Tensor] = {}  # ZeRO-1: padded full parameters, whose own rows are the shards
        self._stale: set[str] = set()
        self._agreed: set[bool] = set()  # halves whose schedules were compared: backward?
        self.shards = {param.path: self._own(param, originals[param.path].detach().to(device)) for param in plan.params}
        self.placeholders = {param.path: placeholder(originals[param.path], device) for param in plan.params}
        for path, original in originals.items():
            _replaced[original] = path
        _watch(self)

    @classmethod
    def take(cls, module: nn.Module, plan: Plan, group: dist.ProcessGroup, device: torch.device | None) -> State:
        """Take over the parameters of a plain module, once all ranks agree that it is the same one.

        The module itself is left as it is; whoever calls puts ``placeholders`` into it.

        Raises:
            ValueError: parameters without memory, or on a device that the group has no backend for;
                ``broadcast_from`` is not a rank of the group.
            RuntimeError: the ranks' modules differ.
        """
        originals = {param.path: module.get_parameter(param.path) for param in plan.params}
        for path, original in originals.items():
            if original.is_meta:
                raise ValueError(
                    f"parameter {path!r} is on the meta device and has no values to shard; materialise the module "
                    f"first (thunder_zero.trace reads it as it is)"
                )
        device = device or next(iter(originals.values())).device
        transport_for(group, device)  # raises before anything is sent
        source = plan.policy.broadcast_from
        if source is not None and source >= group.size():
            raise ValueError(f"broadcast_from is {source}; the process group has ranks 0 to {group.size() - 1}")
        agree.require_agreement(agree.describe(module, plan, weights=source is None), group)
        if source is not None:
            agree.broadcast(module, source, group)
        return cls(plan, group, originals, device)

    @torch.no_grad()
    def _own(self, param: Param, full: Tensor) -> nn.Parameter:
        if not param.sharded:
            return nn.Parameter(full, requires_grad=param.requires_grad)
        if not param.resident:
            return nn.Parameter(self.own_rows(param, full), requires_grad=param.requires_grad)
        buffer = full.new_zeros(layout.padded_shape(param.shape, self.plan.world_size))
        buffer[: param.shape[0]] = full
        self._resident[param.path] = buffer
        shard = buffer.tensor_split(self.plan.world_size)[self.plan.rank]
        return nn.Parameter(shard, requires_grad=param.requires_grad)

    # What the traces call.

    def all_gather(self, shards: Sequence[Tensor], paths: Sequence[str]) -> Handle | Resident:
        """Start gathering. ZeRO-1 sends only what an optimizer has changed since the last time."""
        params = [self.plan.by_name[path] for path in paths]
        if not params[0].resident:
            return self._transport.all_gather(shards, params)
        stale = [at for at, path in enumerate(paths) if path in self._stale]
        buffers = [self._resident[path] for path in paths]
        refresh = None
        if stale:
            self._stale.difference_update(paths)
            refresh = self._transport.all_gather(
                [shards[at] for at in stale], [params[at] for at in stale], into=[buffers[at] for at in stale]
            )
        return Resident(tuple(buffer[: param.shape[0]] for buffer, param in zip(buffers, params, strict=True)), refresh)

    def reduce(self, grads: Sequence[Tensor], paths: Sequence[str]) -> Handle:
        """Start reducing gradients to their mean over ranks."""
        params = [self.plan.by_name[path] for path in paths]
        if params[0].sharded:
            return self._transport.reduce_scatter(grads, params)
        return self._transport.all_reduce(grads, params)

    def check_model(self, model: Any) -> None:
        """Run by every prologue: the model is as planned, and nothing of a failed step is under way.

        Raises:
            RuntimeError: a parameter was replaced, moved or cast after the transform.
        """
        self._transport.drain()
        for path, shard in self.shards.items():
            if model.get_parameter(path) is not shard:
                raise RuntimeError(
                    f"parameter {path!r} was replaced after thunder_zero sharded it; copy new values into it "
                    f"(load_original_state_dict, or in place), or transform the new module"
                )
            stand_in = self.placeholders[path]
            if shard.dtype is not stand_in.dtype or shard.device != stand_in.device:
                found = f"{stand_in.dtype} on {stand_in.device}"
                raise RuntimeError(
                    f"parameter {path!r} was cast or moved to {found} after thunder_zero sharded it as {shard.dtype} "
                    f"on {shard.device}; call .to() on the module before thunder.jit"
                )
            if shard.requires_grad is not stand_in.requires_grad:
                raise RuntimeError(
                    f"requires_grad of parameter {path!r} became {shard.requires_grad} after thunder_zero planned it; "
                    f"set it on the module before thunder.jit"
                )

    def check_finite(self, grads: Sequence[Tensor], paths: Sequence[str]) -> None:
        """Policy ``check_gradients``: all ranks learn of a gradient that is NaN or Inf on any.

        Raises:
            RuntimeError: naming the first such parameter, on every rank.
        """
        bad = torch.stack([~grad.isfinite().all() for grad in grads]).to(torch.int32)
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=self.group)
        if bad.any():
            path = paths[int(bad.argmax())]
            raise RuntimeError(
                f"the gradient of parameter {path!r} is NaN or Inf; lower the learning rate, scale the loss or look at "
                f"this batch (policy check_gradients asked to stop here; no .grad was changed)"
            )

    def agree_on_schedule(self, backward: bool, lines: Sequence[str]) -> None:
        """Before the first step: do all ranks start and end the same collectives in the same order?

        Only the first forward and the first backward are compared. What is compiled later (another
        batch size) may be compiled by one rank alone, and asking the others would wait for ever.

        Raises:
            RuntimeError: naming the first line that differs, and the rank.
        """
        if backward not in self._agreed:
            self._agreed.add(backward)
            agree.require_same_schedule("backward" if backward else "forward", lines, self.group)

    # What happens outside of the traces.

    def mark_stale(self, paths: Iterable[str]) -> None:
        """These parameters changed: the next forward refreshes the other ranks' rows, if they are resident."""
        self._stale.update(self._resident.keys() & set(paths))

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


class Resident:
    """The handle of ZeRO-1's parameters: there already, or being refreshed in place."""

    def __init__(self, full: tuple[Tensor, ...], refresh: Handle | None) -> None:
        self._full = full
        self._refresh = refresh

    def wait(self) -> tuple[Tensor, ...]:
        """The full, unpadded parameters, as views of their buffers."""
        if self._refresh is not None:
            self._refresh.wait()
        return self._full


def placeholder(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape that holds one element: NaN, where the dtype has it.

    Thunder traces shapes and dtypes from the plain module; the values are in the shards. Whoever
    reads a placeholder by mistake gets NaN, not stale weights.
    """
    value = float("nan") if param.is_floating_point() or param.is_complex() else 0
    one = torch.full((), value, dtype=param.dtype, device=device)
    return nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)


def process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group that was given, or the default one.

    Raises:
        RuntimeError: there is neither.
    """
    if group is not None:
        return group
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group; call torch.distributed.init_process_group (under torchrun) before the "
            "transform, or pass process_group"
        )
    return dist.group.WORLD


def is_transformed(param: nn.Parameter) -> bool:
    """Whether the parameter belongs to a module that was transformed before."""
    return any(param is stand_in for state in _states for stand_in in state.placeholders.values())


def _watch(state: State) -> None:
    global _hooked
    _states.add(state)
    if not _hooked:
        register_optimizer_step_pre_hook(_refuse_replaced)
        register_optimizer_step_post_hook(_note_step)
        _hooked = True


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for param in _parameters(optimizer):
        if param in _replaced:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds the parameter {_replaced[param]!r} of before the transform, so its "
                f"step would be lost; build the optimizer on model.parameters() after thunder.jit"
            )


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(param) for param in _parameters(optimizer)}
    for state in _states:
        state.mark_stale(path for path, shard in state.shards.items() if id(shard) in stepped)
