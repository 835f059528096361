"""Holds a forecast of memory: frozen data with a printed form.

::

    peak 49.1 MiB in backward, at t4128 = torch.mul(t4030, t4120)
      31.1 MiB  saved for backward
      8.01 MiB  gathered parameters
    the largest of 187 tensors
      1.00 MiB  saved for backward     blocks.0.up: t3681 = torch.nn.functional.linear(t3680, t955, t960)
    at rest 6.34 MiB, in the optimizer's step 26.4 MiB
    to load, on the host: weights=folder 6.84 MiB, weights=mapping 7.34 MiB, reset_parameters 7.34 MiB, init 7.34 MiB
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from textwrap import wrap

from thunder_zero.plan.amounts import WIDTH, size, summed_up
from thunder_zero.plan.params import Plan
from thunder_zero.tools.printing.words import clip
from thunder_zero.tools.table.rows import OPTIMIZER_STEP, OUTER_STEP, Row


class Holds(StrEnum):
    """The kind of data that a storage holds. The kind does not change while the storage is alive."""

    PARAMETER = "parameters at rest"
    BUFFER = "buffers of the module"
    OPTIMIZER = "optimizer state"
    OUTER = "state of the outer step"
    INPUT = "inputs"
    GATHERED = "gathered parameters"
    SAVED = "saved for backward"
    FULL_GRADIENT = "full gradients"
    REDUCED_GRADIENT = "reduced gradients"
    DEFERRED = "deferred gradients"
    IN_FLIGHT = "buffers of collectives"
    LOSS = "outputs and loss"
    TEMPORARY = "temporaries"


EXCHANGE = "an exchange with other sites"  # the name of its buffers
LARGEST = 8  # the most tensors that are listed
AT_REST = (Holds.PARAMETER, Holds.BUFFER, Holds.OPTIMIZER, Holds.OUTER)
SHARDED = (Holds.PARAMETER, Holds.OPTIMIZER, Holds.OUTER, Holds.REDUCED_GRADIENT)  # kinds that shrink on more ranks
OF_BATCH = (Holds.INPUT, Holds.SAVED, Holds.TEMPORARY, Holds.LOSS)  # kinds that shrink in smaller batches
COMPUTED = (Holds.SAVED, Holds.FULL_GRADIENT, Holds.LOSS, Holds.TEMPORARY)  # kinds shown with their lines


@dataclass(frozen=True, slots=True, repr=False)
class Storage:
    """Memory that tensors share.

    Its name is a path for a parameter, a gradient or a buffer of the module. Optimizer state has the path and the key,
    such as "blocks.0.up.weight: exp_avg". A collective's buffer has the parameters' label from ``print_trace``. Every
    other storage has the name of a value of the trace.
    """

    kind: Holds  # the kind of data in the storage
    nbytes: int
    name: str
    module: str = ""  # path of the module whose parameter was used last before the allocation; "" if none was used
    line: int = -1  # the allocating line's index in ``Memory.lines``; -1 if the storage exists before the step
    freed: int | None = None  # the freeing line's index in ``Memory.lines``; None if the storage outlives the step

    def __repr__(self) -> str:
        return summed_up(self, f"{self.name}, {self.kind}, {size(self.nbytes)}")


@dataclass(frozen=True, repr=False)
class Memory:
    """The memory of one rank in one training step, in bytes of tensors' storages."""

    lines: tuple[Row, ...] = field(hash=False)  # the lines of the step, with ``reserve`` in their bytes alive
    storages: tuple[Storage, ...]  # in the order of their allocation
    plan: Plan  # the plan of the traces. Functions of the policy, such as ``unit_of``, are removed
    at_peak: tuple[Storage, ...]  # the storages that are alive at the peak, largest first
    reserve: int  # bytes that are added to every figure
    excluded: tuple[str, ...]  # descriptions of the parts of a step that the forecast leaves out
    # the most bytes of host memory while a module on the meta device is loaded, keyed by the source of its values
    loading: dict[str, int] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        line = self.peak_line
        return summed_up(self, f"peak {size(self.peak)} in {line.phase}, {'; '.join(outside_of_the_peak(self))}")

    def __str__(self) -> str:
        """Return text in 100 columns: the peak's kinds and largest tensors, and the figures outside the peak."""
        return self.table(LARGEST)

    def table(self, tensors: int | None = None) -> str:
        """Return the text of ``str(self)``, but with all tensors alive at the peak, or with the ``tensors`` largest."""
        line = self.peak_line
        lines = [clip(f"peak {size(self.peak)} in {line.phase}, at {line.statement}", WIDTH)]
        lines += [f"{size(nbytes):>10}  {kind}" for kind, nbytes in self.by_kind.items()]
        lines += [f"{size(self.reserve):>10}  reserve"] if self.reserve else []
        lines.append(f"the largest of {len(self.at_peak)} tensors")
        lines += [clip(_tensor(storage, self), WIDTH) for storage in self.at_peak[:tensors]]
        at_rest, *excluded = outside_of_the_peak(self)
        sources = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in self.loading.items())
        loading = [f"to load, on the host: {sources}"] if sources else []
        return "\n".join([*lines, *(part for line in (at_rest, *loading, *excluded) for part in wrap(line, WIDTH))])

    @cached_property
    def peak_line(self) -> Row:
        """The line that runs at the peak."""
        return next(line for line in self.lines if line.is_peak)

    @property
    def peak(self) -> int:
        """The most bytes alive in forward, the loss and backward, with ``reserve``."""
        return self.peak_line.highest or 0

    @property
    def at_rest(self) -> int:
        """Bytes alive between steps, without gradients, with ``reserve``."""
        between = (storage for storage in self.storages if storage.line < 0 and storage.kind in AT_REST)
        return sum(storage.nbytes for storage in between) + self.reserve

    @property
    def optimizer_step(self) -> int | None:
        """The most bytes alive in the optimizer's step; None without an optimizer, or if gradients are deferred."""
        return self._most_in(OPTIMIZER_STEP)

    @property
    def outer_step(self) -> int | None:
        """The most bytes alive in an exchange with other sites; None without an outer step."""
        return self._most_in(OUTER_STEP)

    def _most_in(self, phase: str) -> int | None:
        return max((line.highest for line in self.lines if line.phase == phase and line.highest), default=None)

    @property
    def by_kind(self) -> dict[Holds, int]:
        """Bytes alive at the peak, keyed by kind, largest first. Their sum plus ``reserve`` is ``peak``."""
        counts: Counter[Holds] = Counter()
        for storage in self.at_peak:
            counts[storage.kind] += storage.nbytes
        return dict(counts.most_common())

    @property
    def alive(self) -> list[dict[Holds, int]]:
        """Bytes alive after each line, keyed by kind, without ``reserve``."""
        alive, after = Counter[str](), []
        for storage in self.storages:
            alive[storage.kind] += storage.nbytes if storage.line < 0 else 0
        for row in self.lines:
            alive.update(row.allocated)
            alive.subtract(row.freed)
            after.append({kind: alive[kind] for kind in Holds if alive[kind]})
        return after

    def largest(self, most: int) -> Iterator[Sequence[Storage]]:
        """Yield the largest storages alive after each line, and for the peak's line at the peak."""
        ordered, changes = sorted(self.storages, key=lambda storage: -storage.nbytes), defaultdict[int, list[int]](list)
        for number, storage in enumerate(ordered):
            changes[storage.line].append(number)
            if storage.freed is not None:
                changes[storage.freed].append(number)
        alive = changes[-1]
        for line, row in enumerate(self.lines):
            for number in changes[line]:
                at = bisect_left(alive, number)
                is_alive = alive[at : at + 1] == [number]
                alive[at : at + is_alive] = [number] * (not is_alive)
            yield self.at_peak[:most] if row.is_peak else [ordered[number] for number in alive[:most]]


def outside_of_the_peak(memory: Memory) -> list[str]:
    """Return lines of text: the figures at rest and in the optimizer's step, and the exclusions."""
    steps = {"the optimizer's step": memory.optimizer_step, EXCHANGE: memory.outer_step}
    in_steps = "".join(f", in {name} {size(most)}" for name, most in steps.items() if most is not None)
    return [f"at rest {size(memory.at_rest)}{in_steps}", *(f"left out: {exclusion}" for exclusion in memory.excluded)]


def _tensor(storage: Storage, memory: Memory) -> str:
    """Return a line such as ``1.00 MiB  saved for backward     blocks.0.up: t3 = torch.erf(t2)``.

    If the storage has no module, the line names the phase.
    """
    place = storage.name
    if storage.kind in COMPUTED:
        line = memory.lines[storage.line]
        place = place if storage.kind is Holds.FULL_GRADIENT else storage.module or line.phase
        place += f": {line.statement}" if storage.line >= 0 else ""
    return f"{size(storage.nbytes):>10}  {storage.kind:22} {place}"
