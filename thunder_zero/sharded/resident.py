"""Full parameters, kept between forwards: ZeRO-1's buffers, and gathered parameters of ZeRO-2.

::

    ZeRO-1, rank 1 of 2      buffer [ rows of rank 0 | of rank 1 ]   the optimizer steps this rank's rows in place;
                                      ^ stale after a step           a gather then updates the other rows
    ZeRO-2, accumulating     the first micro-batch gathers, later micro-batches read these tensors, the last frees them

:func:`lay_out` allocates the memory when the model is built. ``runtime.py`` asks the classes here which parameters are
stale or missing, and gathers only these. If an optimizer may have stepped, ranks agree on the stale parameters before
the next forward. Otherwise a rank without stale parameters would not take part in the gather.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import local_rows, padded, rows_in
from thunder_zero.sharded.wire import is_staged, rest_device
from thunder_zero.sharded.writes import Versions, digests_of


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The tensors that a rank holds at rest, by parameter path."""

    rows: dict[str, Tensor]  # this rank's rows with padding, or a replicated parameter in full
    buffers: dict[str, Tensor]  # ZeRO-1's full parameters, padded
    shared: tuple[str, ...]  # paths of the buffers that share memory with ``rows``


def lay_out(plan: Plan, device: torch.device, at_rest: dict[str, Tensor]) -> RankMemory:
    """Allocate a rank's memory, and fill it from ``at_rest``. Remove each value from ``at_rest`` once it is copied."""
    rows: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for param in plan.params:
        value = at_rest.pop(param.path)
        if param.resident:
            buffers[param.path] = buffer = padded(value.to(param.compute_dtype), param, plan)
            is_copied = is_staged(param, plan, device)
            value = local_rows(value, param, plan) if is_copied else rows_in(buffer, param, plan)
        rows[param.path] = _to_rest_device(value, rest_device(param, plan, device), device)
    shared = tuple(path for path in buffers if not is_staged(plan.by_name[path], plan, device))
    return RankMemory(rows, buffers, shared)


def _to_rest_device(rows: Tensor, rest: torch.device, device: torch.device) -> Tensor:
    """Move rows to the device ``rest``. Pin them if ``rest`` is the CPU and ``device`` is a GPU."""
    rows = rows.to(rest)
    return rows.pin_memory() if device.type == "cuda" and rest.type == "cpu" else rows


OnAnyRank = Callable[[Sequence[str], Collection[str], Tensor | None], list[str]]  # ``State.on_any_rank``


# Tensors to gather, their parameters, and the buffers to gather into.
GatherArgs = tuple[list[Tensor], list[Param], list[Tensor] | None]


class StayingParameters(Protocol):
    """Full parameters that are kept between forwards. Only stale or missing parameters must be gathered."""

    def due(self, params: Sequence[Param]) -> list[int]:
        """Return the indices of the parameters that must be gathered."""

    def select(self, due: Sequence[int], sent: Sequence[Tensor], params: Sequence[Param]) -> GatherArgs:
        """Return the arguments of a gather, for the parameters at the indices ``due``."""

    def full(self, param: Param) -> Tensor:
        """Return an unpadded view of a full parameter that needs no gather."""

    def launched(self, params: Sequence[Param], due: Sequence[int], *, last: bool) -> None:
        """Record that the gather was launched. ``last`` is True in the last micro-batch."""

    def arrived(self, params: Sequence[Param], full: Sequence[Tensor], *, last: bool) -> None:
        """Record that all of these parameters have arrived. ``last`` is True in the last micro-batch."""


def _select(due: Sequence[int], sent: Sequence[Tensor], params: Sequence[Param]) -> tuple[list[Tensor], list[Param]]:
    """Return the tensors and the parameters at the indices ``due``."""
    return [sent[index] for index in due], [params[index] for index in due]


class ResidentParameters(StayingParameters):
    """ZeRO-1's full parameters. In a buffer, this rank's rows are the shard, or a cast or offloaded shard's copy.

    Args:
        buffers: the full, padded parameters by path.
        shared: paths of the buffers that share memory with the shards.
        versions: an object that detects writes that bump a tensor's version.
        digested: the shards to digest, so that all other writes are detected; empty if no copy can become stale.
    """

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        shared: tuple[str, ...],
        versions: Versions,
        digested: Mapping[str, Tensor],
    ) -> None:
        self._buffers, self.shared, self._versions, self._digested = buffers, shared, versions, digested
        self._digests = self._digests_now()
        self._stale: set[str] = set()  # paths of rows that changed: on this rank, or after an agreement on any rank
        self._may_step = False  # True if gradients were reduced since ranks last agreed
        versions.note(buffers)

    def expect_step(self) -> None:
        """Record that gradients were reduced, so that an optimizer may step before the next forward."""
        self._may_step = True

    def mark_stale(self, paths: Iterable[str]) -> None:
        """Record that these parameters changed. Their next gather refreshes the other ranks' rows."""
        if self._buffers:
            self._stale.update(self._buffers.keys() & set(paths))

    def _digests_now(self) -> Tensor | None:
        """Return the current digests of the shards; None if no shards are digested."""
        return digests_of(tuple(self._digested.values())) if self._digested else None

    def agree_on_stale(self, on_any_rank: OnAnyRank) -> None:
        """Mark the parameters that changed on any rank as stale on all ranks.

        Ranks agree in one small collective after each backward. An optimizer may have stepped on some ranks only, for
        example if a scaler found an Inf. Ranks also agree after other changes on this rank, such as a load or a write
        in place. All ranks must make these changes, since a rank without a change would not join the collective.
        If no parameter can have changed, there is no collective.

        Digests detect writes that bump no version, such as writes through ``.data``. If ranks agree in this call, such
        a write marks its parameter as stale. Otherwise this method raises, since a rank without the write would not
        join a collective.
        """
        if not self._buffers:
            return
        self._stale.update(filter(self._versions.changed, self._buffers))
        old_digests, new_digests = self._digests, self._digests_now()
        is_written = None if old_digests is None or new_digests is None else old_digests != new_digests
        if self._may_step or self._stale:
            self._stale = set(on_any_rank(tuple(self._buffers), self._stale, is_written))
            self._may_step, self._digests = False, new_digests
        elif is_written is not None and is_written.any():
            path = tuple(self._buffers)[int(is_written.int().argmax())]
            raise RuntimeError(
                f"parameter {path!r} was written to in a way that PyTorch does not see (.data, numpy, a kernel), with "
                f"no backward since ranks last compared their rows, so ZeRO-1 cannot know whether all ranks did so; "
                f"write in place, as in param.copy_(new) under torch.no_grad(), on every rank"
            )

    def out_of_date(self, paths: Iterable[str]) -> list[bool]:
        """Return a flag for each path: False only if this rank knows that the full parameter equals the shards.

        The flag is True for a parameter without a buffer, and for a buffer that shares no memory with the shard.
        """
        old_digests, new_digests = self._digests, self._digests_now()
        written: set[str] = set()
        if old_digests is not None and new_digests is not None:
            flags = (old_digests != new_digests).tolist()
            written = {path for path, is_written in zip(self._digested, flags, strict=True) if is_written}
        return [
            path not in self.shared or path in self._stale or path in written or self._versions.changed(path)
            for path in paths
        ]

    def full(self, param: Param) -> Tensor:
        """Return an unpadded view of the full parameter, with the values of its last refresh."""
        return self._buffers[param.path][: param.shape[0]]

    def due(self, params: Sequence[Param]) -> list[int]:
        return [index for index, param in enumerate(params) if param.path in self._stale]

    def select(self, due: Sequence[int], sent: Sequence[Tensor], params: Sequence[Param]) -> GatherArgs:
        return (*_select(due, sent, params), [self._buffers[params[index].path] for index in due])

    def launched(self, params: Sequence[Param], due: Sequence[int], *, last: bool) -> None:
        # Only after the launch: if it fails, the rows are still stale.
        self._stale.difference_update(param.path for param in params)

    def arrived(self, params: Sequence[Param], full: Sequence[Tensor], *, last: bool) -> None:
        self._versions.note([param.path for param in params])


class KeptUnsharded(StayingParameters):
    """ZeRO-2's gathered parameters, kept between micro-batches (``policy.reshard_after_backward=False``)."""

    def __init__(self, shards: Mapping[str, Tensor], versions: Versions) -> None:
        self._shards, self._versions = shards, versions
        self._held: dict[str, Tensor] = {}
        self._digests: dict[str, Tensor] = {}  # digests of shards when they were gathered

    def require_unwritten(self) -> None:
        """Raise RuntimeError if a shard was written to since it was gathered, by a write that bumped no version.

        A rank without the write would not join a second gather.
        """
        paths = [path for path in self._held if not self._versions.changed(path)]
        if not paths:
            return
        old_digests = torch.stack([self._digests[path] for path in paths])
        is_written = old_digests != digests_of([self._shards[path] for path in paths])
        if is_written.any():
            path = paths[int(is_written.int().argmax())]
            raise RuntimeError(
                f"parameter {path!r} was written to in the middle of an accumulation, in a way that PyTorch does not "
                f"see (.data, numpy, a kernel), and reshard_after_backward=False still holds its old values; write to "
                f"it after the last micro-batch, outside of no_sync"
            )

    def due(self, params: Sequence[Param]) -> list[int]:
        self.drop(filter(self._versions.changed, tuple(self._held)))
        return [index for index, param in enumerate(params) if param.path not in self._held]

    def select(self, due: Sequence[int], sent: Sequence[Tensor], params: Sequence[Param]) -> GatherArgs:
        return (*_select(due, sent, params), None)

    def full(self, param: Param) -> Tensor:
        return self._held[param.path]

    def launched(self, params: Sequence[Param], due: Sequence[int], *, last: bool) -> None:
        paths = [param.path for param in params]
        if last:
            self.drop(paths)
            return
        if gathered := [paths[index] for index in due]:
            digests = digests_of([self._shards[path] for path in gathered])
            self._digests.update(zip(gathered, digests.unbind(), strict=True))
        self._versions.note(paths)

    def arrived(self, params: Sequence[Param], full: Sequence[Tensor], *, last: bool) -> None:
        if not last:
            self._held.update(zip((param.path for param in params), full, strict=True))

    def drop(self, paths: Iterable[str]) -> None:
        """Drop the gathered tensors of these parameters."""
        for path in paths if self._held else ():
            self._held.pop(path, None)

    def clear(self) -> None:
        """Drop all gathered tensors."""
        self._held.clear()
