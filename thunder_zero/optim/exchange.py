"""Sends a bucket's rows of parameters and gradients to owners, and updated rows to all ranks.

::

    rank 0: rows 0 1   --gradient and parameter-->   owner: rows 0 1 2 3 4, steps   --parameter-->   rows 0 1
    rank 1: rows 2 3                                                                                 rows 2 3
    rank 2: row  4                                                                                   row  4

In ZeRO-1 every rank has the parameter in full, so only the gradient's rows are sent to the owner. The owner of a
replicated parameter has its gradient in full, so only the stepped parameter is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.plan.params import Param
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.state import State
from thunder_zero.sharded.wire import rest_device


@dataclass(frozen=True, eq=False)
class Member:
    param: Param
    shard: Tensor  # the parameter in the optimizer over shards, and the key of its states
    group: int
    name: str | None  # the name in the group, if the group has names
    owner: int  # the rank that steps the parameter, as an index among the ranks of a replica


ParamAndGrad = tuple[Tensor, Tensor | None]  # a whole parameter and its gradient, on the device of the shards
ByPeer = defaultdict[int, list[Tensor]]  # lists of messages, keyed by peer


class ToOwners:
    """A bucket's rows, in flight to the owners: gradients of ``paths``, and parameters unless in ``full_paths``."""

    def __init__(
        self, state: State, members: Sequence[Member], paths: Collection[str], full_paths: Collection[str]
    ) -> None:
        self._state, plan, shard = state, state.plan, state.plan.mesh.shard
        self._owned: dict[str, tuple[Param, Tensor, Tensor | None]] = {}
        outgoing, incoming = ByPeer(list), ByPeer(list)
        for member in members:
            param, values = member.param, local(member.shard).detach()
            grad = None
            if param.path in paths:
                assert member.shard.grad is not None, "the member has a gradient on all ranks"
                grad = local(member.shard.grad).detach()
            if not (geometry := plan.geometry(param)).is_spread:
                if member.owner == shard.place:
                    self._owned[param.path] = (param, values, grad)
                continue
            to_send = [rows for rows in (None if param.path in full_paths else values, grad) if rows is not None]
            if member.owner == shard.place:
                full_tensors = [torch.empty(param.shape, dtype=rows.dtype, device=state.device) for rows in to_send]
                for full, rows in zip(full_tensors, to_send, strict=True):
                    full[geometry.rows].copy_(rows)
                    for peer in shard.peers:
                        incoming[peer].append(full[geometry.rows_of(peer)].view(-1))
                full_param = (
                    state.params[param.path].full_value().clone() if param.path in full_paths else full_tensors[0]
                )
                self._owned[param.path] = (param, full_param, None if grad is None else full_tensors[-1])
            else:
                outgoing[member.owner] += [rows.to(state.device).contiguous().view(-1) for rows in to_send]
        self._handle = _launch(state, outgoing, incoming)

    def wait(self) -> dict[str, ParamAndGrad]:
        """Wait for the messages; return the whole parameters that this rank owns, by path."""
        self._handle.wait()
        arrived: dict[str, ParamAndGrad] = {}
        for path, (param, full, grad) in self._owned.items():
            device = rest_device(param, self._state.plan, self._state.device)
            arrived[path] = (full.to(device), None if grad is None else grad.to(device))
        self._owned.clear()
        return arrived


class FromOwners:
    """A bucket's updated rows, in flight to all ranks. ``updated`` has the parameters that this rank has stepped."""

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
        self._handle = _launch(state, outgoing, incoming)

    def wait(self) -> None:
        self._handle.wait()
        for member, rows in self._rows:
            local(member.shard).detach().copy_(rows)
        self._rows.clear()


def _launch(state: State, outgoing: ByPeer, incoming: ByPeer) -> Waitable:
    return state.transport.trade(outgoing, incoming) if state.plan.mesh.shard.size > 1 else WaitsBy(tuple)
