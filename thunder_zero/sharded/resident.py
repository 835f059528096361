"""Full parameters that stay: ZeRO-1's resident ones, those that an accumulation keeps unsharded.

::

    ZeRO-1, rank 1 of 2      buffer [ rows of rank 0 | own rows ]    the optimizer steps its own rows in place;
                                      ^ stale after a step           a gather then fills the others'
    ZeRO-2, accumulating     the first micro-batch gathers, the next ones read the same tensors, the last frees them

:func:`lay_out` makes the memory when the model is made. ``runtime.py`` sends the gathers of these parameters here. Only
what is stale or missing travels, and the handle gives full parameters as any other does. If an optimizer may have
stepped, ranks agree before the next forward on what is stale: a rank that took its buffer for fresh would not take part
in the gather.
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

    rows: dict[str, Tensor]  # what programs read: this rank's rows with padding, or a replicated parameter in full
    buffers: dict[str, Tensor]  # ZeRO-1's full parameters, padded
    shared: tuple[str, ...]  # paths of the buffers whose own rows are ``rows`` themselves, not copies of them


def lay_out(plan: Plan, device: torch.device, at_rest: dict[str, Tensor]) -> RankMemory:
    """Allocate the memory at rest, with the values of ``at_rest``. That is emptied, so that no unpadded full tensor
    outlives its copy."""
    rows: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for param in plan.params:
        value = at_rest.pop(param.path)
        if param.resident:
            buffers[param.path] = buffer = padded(value.to(param.compute_dtype), param, plan)
            is_copied = is_staged(param, plan, device)
            value = local_rows(value, param, plan) if is_copied else rows_in(buffer, param, plan)
        rows[param.path] = _at_rest(value, rest_device(param, plan, device), device)
    shared = tuple(path for path in buffers if not is_staged(plan.by_name[path], plan, device))
    return RankMemory(rows, buffers, shared)


def _at_rest(rows: Tensor, place: torch.device, device: torch.device) -> Tensor:
    """Move rows to where they rest. In host memory they are pinned if ``device`` is a GPU."""
    rows = rows.to(place)
    return rows.pin_memory() if device.type == "cuda" and place.type == "cpu" else rows


OnAnyRank = Callable[[Sequence[str], Collection[str], Tensor | None], list[str]]  # ``State.on_any_rank``


# Tensors to gather, their parameters, and the buffers to gather into.
WhatTravels = tuple[list[Tensor], list[Param], list[Tensor] | None]


class StayingParameters(Protocol):
    """Full parameters that stay between forwards, so that a gather brings only what is due."""

    def due(self, params: Sequence[Param]) -> list[int]:
        """Return the positions of the parameters that must be gathered."""

    def select(self, due: Sequence[int], sent: Sequence[Tensor], params: Sequence[Param]) -> WhatTravels:
        """Return what travels of a bucket."""

    def full(self, param: Param) -> Tensor:
        """Return a view of a full parameter that is not due, unpadded."""

    def launched(self, params: Sequence[Param], due: Sequence[int], *, last: bool) -> None:
        """Note that the gather of what is due was launched. ``last``: in the last micro-batch."""

    def arrived(self, params: Sequence[Param], full: Sequence[Tensor], *, last: bool) -> None:
        """Note that all of these parameters have arrived."""


def _at(due: Sequence[int], sent: Sequence[Tensor], params: Sequence[Param]) -> tuple[list[Tensor], list[Param]]:
    """Return the tensors and the parameters at the positions ``due``."""
    return [sent[index] for index in due], [params[index] for index in due]


class ResidentParameters(StayingParameters):
    """ZeRO-1's full parameters, padded, by path. Their own rows are the shards, or copies of them, cast or offloaded.

    Args:
        buffers: the full parameters.
        shared: paths of the buffers whose own rows are the shards themselves.
        versions: finds writes that raise a version.
        digested: the shards of all buffers, in which writes without a version are looked for; empty if no other memory
            holds their values.
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
        self._stale: set[str] = set()  # paths whose rows changed on this rank or, once ranks agreed, on any
        self._may_step = False  # gradients were reduced since ranks last agreed, so an optimizer may have stepped
        versions.note(buffers)

    def expect_step(self) -> None:
        """Note that gradients were reduced: an optimizer may step before the next forward, on some ranks or on all."""
        self._may_step = True

    def mark_stale(self, paths: Iterable[str]) -> None:
        """Note that these parameters changed: their next gather refreshes the other ranks' rows."""
        if self._buffers:
            self._stale.update(self._buffers.keys() & set(paths))

    def _digests_now(self) -> Tensor | None:
        """Return the digests of the shards as they are now; None if nothing is digested."""
        return digests_of(tuple(self._digested.values())) if self._digested else None

    def agree_on_stale(self, on_any_rank: OnAnyRank) -> None:
        """Let all ranks refresh the parameters that changed on any rank.

        Ranks agree, by one small collective, after each backward: an optimizer may then have stepped on some of them
        only (a scaler that found an Inf). They also agree after other changes on this rank, such as a load or a write
        in place. These changes must be made on all ranks, as with any replicated parameter, since a rank without them
        would not take part. While nothing can have changed, there is no collective.

        Digests find writes that nothing reported, such as a hand-written optimizer's through ``.data``. They count when
        ranks agree for another reason. Otherwise such a write raises: a rank without it would not take part in an
        agreement.
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
        """Return for each path whether the full parameter may differ from the shards, as far as this rank can tell.

        It may for parameters that are not resident, and for buffers that are copies in another dtype or place.
        """
        old_digests, new_digests = self._digests, self._digests_now()
        unseen: set[str] = set()
        if old_digests is not None and new_digests is not None:
            flags = (old_digests != new_digests).tolist()
            unseen = {path for path, is_written in zip(self._digested, flags, strict=True) if is_written}
        return [
            path not in self.shared or path in self._stale or path in unseen or self._versions.changed(path)
            for path in paths
        ]

    def full(self, param: Param) -> Tensor:
        """Return a view of the full parameter as it was refreshed last, unpadded."""
        return self._buffers[param.path][: param.shape[0]]

    def due(self, params: Sequence[Param]) -> list[int]:
        return [index for index, param in enumerate(params) if param.path in self._stale]

    def select(self, due: Sequence[int], sent: Sequence[Tensor], params: Sequence[Param]) -> WhatTravels:
        return (*_at(due, sent, params), [self._buffers[params[index].path] for index in due])

    def launched(self, params: Sequence[Param], due: Sequence[int], *, last: bool) -> None:
        # Only after the launch: if it fails, the rows are still stale.
        self._stale.difference_update(param.path for param in params)

    def arrived(self, params: Sequence[Param], full: Sequence[Tensor], *, last: bool) -> None:
        self._versions.note([param.path for param in params])


class KeptUnsharded(StayingParameters):
    """ZeRO-2's gathered parameters between micro-batches (``policy.reshard_after_backward=False``)."""

    def __init__(self, shards: Mapping[str, Tensor], versions: Versions) -> None:
        self._shards, self._versions = shards, versions
        self._held: dict[str, Tensor] = {}
        self._digests: dict[str, Tensor] = {}  # digests of shards when they were gathered

    def require_unwritten(self) -> None:
        """Raise if a shard was written to without a version since it was gathered.

        Another rank, without such a write, would not gather again.
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

    def select(self, due: Sequence[int], sent: Sequence[Tensor], params: Sequence[Param]) -> WhatTravels:
        return (*_at(due, sent, params), None)

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
        """Drop these parameters."""
        for path in paths if self._held else ():
            self._held.pop(path, None)

    def clear(self) -> None:
        """Drop all parameters."""
        self._held.clear()
