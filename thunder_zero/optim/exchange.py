"""Brings the rows of a bucket's parameters and gradients to their owners, and updated rows back.

::

    rank 0: rows 0 1   --gradient and parameter-->   owner: rows 0 1 2 3 4, steps   --parameter-->   rows 0 1
    rank 1: rows 2 3                                                                                 rows 2 3
    rank 2: row  4                                                                                   row  4

In ZeRO-1 every rank has the parameter in full, so of the way there only the gradient's rows travel. A replicated
parameter is on every rank with its gradient: only the way back has messages, of the whole parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.optim.owners import Member, Values
from thunder_zero.plan.params import Param
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.state import State
from thunder_zero.sharded.wire import rest_device

ByPeer = defaultdict[int, list[Tensor]]  # by the rank to or from which they travel


class ToOwners:
    """The rows of a bucket's parameters, and of the gradients of ``paths``, on their way to the owners. Of those
    parameters that every rank has in full (``at_hand``, ZeRO-1) only gradients travel."""

    def __init__(
        self, state: State, members: Sequence[Member], paths: Collection[str], at_hand: Collection[str]
    ) -> None:
        self._state, plan, shard = state, state.plan, state.plan.mesh.shard
        self._values: dict[str, tuple[Param, Tensor, Tensor | None]] = {}
        outgoing, incoming = ByPeer(list), ByPeer(list)
        for member in members:
            param, values = member.param, local(member.shard).detach()
            grad = _gradient(member) if param.path in paths else None
            if not (geometry := plan.geometry(param)).is_spread:
                if member.owner == shard.place:
                    self._values[param.path] = (param, values, grad)
                continue
            sent = [of for of in (None if param.path in at_hand else values, grad) if of is not None]
            if member.owner == shard.place:
                whole = [torch.empty(param.shape, dtype=rows.dtype, device=state.device) for rows in sent]
                for full, rows in zip(whole, sent, strict=True):
                    full[geometry.rows].copy_(rows)
                    for peer in shard.peers:
                        incoming[peer].append(full[geometry.rows_of(peer)].view(-1))
                first = state.resident.full(param).clone() if param.path in at_hand else whole[0]
                self._values[param.path] = (param, first, None if grad is None else whole[-1])
            else:
                rows_here = [rows.to(state.device).contiguous() for rows in sent]
                outgoing[member.owner] += [of.view(-1) for of in rows_here]
        self._handle = _launched(state, outgoing, incoming)

    def wait(self) -> dict[str, Values]:
        """The whole parameters that this rank owns, by path."""
        self._handle.wait()
        found = {}
        for path, (param, full, grad) in self._values.items():
            place = rest_device(param, self._state.plan, self._state.device)
            found[path] = Values(full.to(place), None if grad is None else grad.to(place))
        self._values.clear()
        return found


class FromOwners:
    """A bucket's updated rows, on their way to all ranks; ``updated`` has what this one stepped, by path."""

    def __init__(self, state: State, members: Sequence[Member], updated: Mapping[str, Tensor]) -> None:
        plan, shard = state.plan, state.plan.mesh.shard
        self._rows: list[tuple[Member, Tensor]] = []
        outgoing, incoming = ByPeer(list), ByPeer(list)
        for member in members:
            param, geometry = member.param, plan.geometry(member.param)
            if member.owner == shard.place:
                full = updated[param.path].to(state.device).contiguous()
                for peer in shard.peers:
                    outgoing[peer].append((full[geometry.rows_of(peer)] if param.sharded else full).view(-1))
                rows = full[geometry.rows] if param.sharded else full
            else:
                rows = torch.empty(local(member.shard).shape, dtype=param.dtype, device=state.device)
                incoming[member.owner].append(rows.view(-1))
            self._rows.append((member, rows))
        self._handle = _launched(state, outgoing, incoming)

    def wait(self) -> None:
        """Write the rows into the shards."""
        self._handle.wait()
        for member, rows in self._rows:
            local(member.shard).detach().copy_(rows)
        self._rows.clear()


def _gradient(member: Member) -> Tensor:
    grad = member.shard.grad
    assert grad is not None, "these have a gradient on all ranks"
    return local(grad).detach()


def _launched(state: State, outgoing: ByPeer, incoming: ByPeer) -> Waitable:
    """The messages on their way; nothing where one rank has everything."""
    return state.transport.trade(outgoing, incoming) if state.plan.mesh.shard.size > 1 else WaitsBy(tuple)
