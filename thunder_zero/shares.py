"""Batches for ranks of unequal speed: shares of measured steps, and a sampler that cuts by shares.

::

    shares_of(step, 12)        seconds of a step on each rank: 0.1, 0.2      -> (2, 1), on all ranks
    Policy(shares=(2, 1))      the weights of gradients in their mean        plan/params.py: Plan.weight
    ShareSampler(data, 12)     items 0 to 11 of an epoch's order             -> rank 0: 0 to 7, rank 1: 8 to 11
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from itertools import accumulate
from math import gcd
from statistics import median
from timeit import timeit

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from thunder_zero.comm.agree import all_or_none, argument_claims
from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import process_group
from thunder_zero.comm.small_collectives import all_gather_object
from thunder_zero.plan.policy import is_count, require_shares


class ShareSampler(Sampler[list[int]]):
    """A batch sampler that gives each rank its share of every global batch: ``DataLoader(batch_sampler=...)``.

    Pass the same shares to :class:`~thunder_zero.Policy`. As with torch's ``DistributedSampler``, the order depends on
    the seed and the epoch alone, and the last batch is filled up from the first items unless ``drop_last``. A global
    batch has the same items for any number of ranks and any shares, so a run can resume on other ranks.

    >>> sampler = tz.ShareSampler(data, batch_size=12, shares=(2, 1))  # 8 items for rank 0, 4 for rank 1
    >>> loader = DataLoader(data, batch_sampler=sampler)

    Args:
        data: the data set. Only its length is read, which must be equal on all ranks.
        batch_size: the number of items of all ranks in a step, or in a micro-batch under ``no_sync``.
        shares: a positive number for each data-parallel rank. They must divide ``batch_size`` into whole items, so that
            the weights of gradients are exact.
        rank: this rank's index among the data-parallel ranks (default: its rank in the default process group).
        shuffle, seed, drop_last: see torch's ``DistributedSampler``.

    Raises:
        ValueError: shares do not divide ``batch_size``, there is no share for ``rank``, or an argument is out of range.
    """

    def __init__(
        self,
        data: Sized,
        batch_size: int,
        shares: tuple[float, ...],
        rank: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        require_shares(shares)
        rank = dist.get_rank() if rank is None else rank
        if not is_count(rank) or rank >= len(shares):
            raise ValueError(f"rank is {rank!r}, and shares is {shares}; give a share for each data-parallel rank")
        items = _divided(batch_size, shares)
        exact = (batch_size * share / sum(shares) for share in shares)
        if any(abs(count - wanted) > 1e-6 for count, wanted in zip(items, exact, strict=True)):
            raise ValueError(
                f"batch_size is {batch_size}, which shares {shares} do not divide into whole items; give policy and "
                f"sampler shares={tuple(items)}, or another batch_size"
            )
        stop = list(accumulate(items))[rank]
        self._rows = slice(stop - items[rank], stop)  # of each global batch
        self._data, self._batch_size = data, batch_size
        self._shuffle, self._seed, self._drops = shuffle, seed, drop_last
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the order of the next iteration. To resume in an epoch, pass the batches done as ``start``."""
        self._epoch, self._start = epoch, start

    def __len__(self) -> int:
        """Return the number of batches that the epoch still has."""
        return self._batches - self._start

    @property
    def _batches(self) -> int:
        size = len(self._data)
        return size // self._batch_size if self._drops else -(-size // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        size, generator = len(self._data), torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(size, generator=generator) if self._shuffle else torch.arange(size)
        for batch in range(self._start, self._batches):
            index = torch.arange(self._batch_size)[self._rows] + batch * self._batch_size
            yield order[index % size].tolist()


def shares_of(
    step: Callable[[], object], batch_size: int, *, steps: int = 5, group: dist.ProcessGroup | None = None
) -> tuple[int, ...]:
    """Measure each rank's speed, and return shares of a batch in proportion, as small integers, equal on all ranks.

    ``step`` computes alone on this rank, with equally many items on each rank: for example, forward and backward of the
    plain module. It must not communicate. After one call to warm up, the median of ``steps`` calls counts. The shares
    divide ``batch_size`` so that the slowest rank ends as early as possible, with at least one item for each rank.

    >>> shares = tz.shares_of(lambda: loss(module(x)).backward(), batch_size=12)  # (2, 1)

    A collective of the ranks of ``group`` (default: all ranks), one for each data-parallel rank. If ``step`` raises on
    one rank, all ranks raise.
    """
    ranks = process_group(group)
    with doing("shares_of"):
        with all_or_none(ranks, "its step") as claims:
            claims += argument_claims({"batch_size": batch_size, "steps": steps})
            if not is_count(steps) or steps == 0:
                raise ValueError(f"steps is {steps!r}; give how many steps to measure, 1 or more")
            _divided(batch_size, [1] * ranks.size())  # raises before anything is measured
            _run(step)
        with all_or_none(ranks, "its step"):
            seconds = median(timeit(lambda: _run(step), number=1) for _ in range(steps))
        seconds_of_ranks = all_gather_object(max(seconds, 1e-9), ranks)  # a coarse clock may measure 0
        items = _divided(batch_size, [1 / each for each in seconds_of_ranks])
    return tuple(count // gcd(*items) for count in items)


def _run(step: Callable[[], object]) -> None:
    step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _divided(batch_size: int, speeds: Sequence[float]) -> list[int]:
    """Divide a batch between ranks so that the last rank ends as early as possible. Each rank gets an item or more."""
    if not is_count(batch_size) or batch_size < len(speeds):
        raise ValueError(f"batch_size is {batch_size!r}; give an item or more to each of {len(speeds)} ranks")
    items = [1] * len(speeds)
    for _ in range(batch_size - len(speeds)):
        first = min(range(len(speeds)), key=lambda rank: (items[rank] + 1) / speeds[rank])
        items[first] += 1
    return items
