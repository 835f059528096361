"""Loads from each rank's own state dict, or from rank 0's, which it sends to all ranks."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor, Shard

from thunder_zero.comm import agree
from thunder_zero.comm.agree import Fact
from thunder_zero.comm.small_collectives import broadcast_object_from_rank_0, full_tensor
from thunder_zero.plan import Param
from thunder_zero.rows import own_rows
from thunder_zero.runtime.state import State


class StateDictSource(Protocol):
    """Reads a state dict for this rank.

    ``pack`` and ``require_tensor`` raise before any rank waits for another: call them where all ranks agree on errors
    (``all_or_none``). The methods that talk to other ranks raise on all of them.
    """

    @property
    def state(self) -> State:
        """The model's state."""

    def is_read(self) -> bool:
        """Whether this rank's own state dict is read."""

    def require_tensor(self, what: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raise unless a value can be copied into a tensor of this shape and dtype.

        Raises:
            ValueError: not a tensor; another shape; a DTensor that rank 0 alone would have to gather; a tensor that
                cannot be copied to this device or dtype.
        """

    def pack(self, value: Any) -> Any:
        """Prepare what all ranks must know, besides the tensors, for :meth:`exchange`.

        Raises:
            ValueError: it cannot be sent.
        """

    def exchange(self, packed: Any) -> Any:
        """What was packed: on this rank, or on rank 0 (tensors are then on the CPU). A collective."""

    def require_same_groups(self, facts: Sequence[Fact]) -> None:
        """Raise on every rank unless all ranks' optimizers have the groups that the exchange presumes; a collective.

        Raises:
            RuntimeError: naming the first group or parameter that differs.
        """

    def must_gather(self, value: Any, param: Param | None) -> bool:
        """Whether a value is a DTensor whose local part is not this rank's rows of ``param``."""

    def require_same_gathers(self, gathers: Mapping[str, Sequence[str]]) -> None:
        """Raise on every rank unless all ranks must gather the same tensors, by their owner; a
        collective.

        Raises:
            RuntimeError: some ranks would wait for others.
        """

    def rows(self, value: Tensor | None, param: Param | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This rank's rows of a value, padded; all of it, if it is not a sharded parameter's. A collective if the value
        is sent or gathered.

        Args:
            value: the tensor in the state dict; None where the state dict is not read.
            param: the parameter that it belongs to, if any.
            shape: the full shape.
            dtype: the dtype in which rank 0 sends it.
        """


def source_for(state: State, options: StateDictOptions) -> StateDictSource:
    """The source that the options ask for."""
    return FromRank0(state) if options.broadcast_from_rank0 else FromEveryRank(state)


@dataclass(frozen=True, slots=True)
class FromEveryRank:
    """Each rank reads its own state dict: full tensors, or DTensors."""

    state: State

    def is_read(self) -> bool:
        """Yes, on every rank."""
        return True

    def require_tensor(self, what: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """See :meth:`StateDictSource.require_tensor`."""
        require_shape(what, value, shape)
        require_copyable(what, value, dtype, self.state.device)

    def pack(self, value: Any) -> Any:
        """The value: nothing is sent."""
        return value

    def exchange(self, packed: Any) -> Any:
        """This rank's value; not a collective."""
        return packed

    def require_same_groups(self, facts: Sequence[Fact]) -> None:
        """Nothing: each rank loads its own groups. Not a collective."""

    def must_gather(self, value: Any, param: Param | None) -> bool:
        """See :meth:`StateDictSource.must_gather`."""
        if not isinstance(value, DTensor):
            return False
        if param is None or not param.sharded or value.placements != (Shard(0),):
            return True
        ranks = dist.get_process_group_ranks(self.state.ranks.inside)
        return bool(value.device_mesh.mesh.tolist() != ranks)

    def require_same_gathers(self, gathers: Mapping[str, Sequence[str]]) -> None:
        """See :meth:`StateDictSource.require_same_gathers`."""
        remedy = "give every rank its part of the same state dict"
        shown = {owner: f"DTensors to gather: {', '.join(names) or 'none'}" for owner, names in gathers.items()}
        facts = [Fact(f"the layout of {owner} in the state dict", text, remedy) for owner, text in shown.items()]
        agree.require_same(facts, self.state.group)

    def rows(self, value: Tensor | None, param: Param | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See :meth:`StateDictSource.rows`; a collective only if it must be gathered."""
        assert value is not None, "every rank's state dict was checked"
        if not isinstance(value, DTensor):
            return _rows(value, param, self.state)
        if self.must_gather(value, param):
            return _rows(full_tensor(value, self.state.group), param, self.state)
        assert param is not None
        local = value.to_local()
        padded = local.new_zeros(self.state.plan.shard_shape(param))
        padded[: len(local)] = local
        return padded


@dataclass(frozen=True, slots=True)
class FromRank0:
    """Rank 0 reads its state dict of full tensors, and sends them to the others one at a time."""

    state: State

    def is_read(self) -> bool:
        """Only on rank 0."""
        return self.state.group.rank() == 0

    def require_tensor(self, what: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """See :meth:`StateDictSource.require_tensor`."""
        require_shape(what, value, shape)
        if isinstance(value, DTensor):
            raise ValueError(
                f"rank 0 cannot send {what}: it is a DTensor in the state dict; load it on all ranks, without "
                f"broadcast_from_rank0"
            )
        require_copyable(what, value, dtype, self.state.device)

    def pack(self, value: Any) -> bytes:
        """Pickle the value."""
        stream = io.BytesIO()
        try:
            torch.save(value, stream)
        except Exception as error:
            raise ValueError(
                f"rank 0 cannot send the state dict: torch.save failed ({error}); use numbers, strings, tensors, and "
                f"dicts and lists of them, or load it on all ranks, without broadcast_from_rank0"
            ) from error
        return stream.getvalue()

    def exchange(self, packed: bytes) -> Any:
        """Rank 0's value, with its tensors on the CPU: rank 0's device is not this rank's. A small collective."""
        sent = broadcast_object_from_rank_0(packed, self.state.group)
        return torch.load(io.BytesIO(sent), weights_only=False, map_location="cpu")

    def require_same_groups(self, facts: Sequence[Fact]) -> None:
        """See :meth:`StateDictSource.require_same_groups`."""
        agree.require_same(facts, self.state.group)

    def must_gather(self, value: Any, param: Param | None) -> bool:
        """No: rank 0's DTensors were refused."""
        return False

    def require_same_gathers(self, gathers: Mapping[str, Sequence[str]]) -> None:
        """Nothing: there are none. Not a collective."""

    def rows(self, value: Tensor | None, param: Param | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See :meth:`StateDictSource.rows`; always a collective."""
        state = self.state
        full = torch.empty(shape, dtype=dtype, device=state.device)
        if self.is_read():
            assert value is not None, "rank 0's state dict was checked"
            full.copy_(value)
        agree.broadcast(full, 0, state.group, state.device)
        return _rows(full, param, state)


def require_shape(what: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raise unless a value in a state dict is a tensor of this shape.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} is a {type(value).__name__} in the state dict; give a tensor of shape {shape}")
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{what} has shape {tuple(value.shape)} in the state dict and {shape} in the model; give the state dict of "
            f"this model"
        )


def require_copyable(what: str, value: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless a tensor's values can be copied; one element is tried.

    Raises:
        ValueError: they cannot, as those of a tensor on the meta device.
    """
    local = value.to_local() if isinstance(value, DTensor) else value.detach()
    try:
        first = local[(slice(0, 1),) * local.ndim]
        torch.empty(first.shape, dtype=dtype, device=device).copy_(first)
    except Exception as error:
        raise ValueError(
            f"cannot copy {what} from the state dict to {device} as {dtype} ({error}); give a dense tensor with values"
        ) from error


def _rows(full: Tensor, param: Param | None, state: State) -> Tensor:
    return full if param is None else own_rows(full, param, state.plan)
