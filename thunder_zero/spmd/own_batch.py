"""Types values of one rank's own batch whose items meet, as in a loss that compares them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import torch
from torch import Tensor

from thunder_zero.spmd.laws import OWN_COUNT, Outcome, P, R, V, filled, halves, has, is_sliced, letters
from thunder_zero.spmd.lines import RecordedLine, Ref, Shadow
from thunder_zero.spmd.rules import LOOKUPS, SCATTERS, SUMS
from thunder_zero.spmd.storages import TypedStorage


def is_of_batch(line: RecordedLine, sources: Sequence[TypedStorage], *, began_backward: bool) -> bool:
    """Return whether a line computes from a batch, and not from shards of a model or from reduced gradients."""
    trains = line.backward or line.differentiates or not began_backward
    return trains and not any(item.is_shard or item.reductions for item in sources)


def scatters_equal(line: RecordedLine, codes: Sequence[Tensor]) -> bool:
    """Return whether a line gives gradients that are equal on all ranks to items that this rank chose, as by a topk."""
    given = [code for code, ref in zip(codes, line.inputs, strict=True) if ref.dtype.is_floating_point]
    return line.backward and line.name in SCATTERS and not any(code.any() for code in given)


def known_numbers(
    line: RecordedLine,
    outcomes: Sequence[Outcome],
    sources: Sequence[TypedStorage],
    mine: Shadow,
    theirs: Shadow | None,
) -> list[Outcome]:
    """Return outcomes with R for numbers that the neighbour has, too, such as a count, and that no parameter made."""
    if theirs is None or line.backward or any(item.is_learned for item in sources):
        return [*outcomes]
    known = [x == y != 0 for x, y in zip(mine.numbers, theirs.numbers, strict=False)]
    known += [False] * (len(outcomes) - len(known))
    return [Outcome(filled((), R)) if is_known else item for item, is_known in zip(outcomes, known, strict=False)]


def of_own_batch(
    line: RecordedLine,
    outcomes: Sequence[Outcome],
    targets: Sequence[Ref],
    codes: Sequence[Tensor],
    sources: Sequence[TypedStorage],
    mine: Shadow,
    theirs: Shadow,
    gradients: Set[int],
) -> Iterator[Outcome]:
    """Yield outcomes in place of those that keep no law because a line mixes the items of this rank's own batch.

    What it writes is of this rank's batch, too: a slice, or in backward a share of a gradient. But backward is linear
    in shares of ``gradients``, which are storages: what is not linear in them alone is done by a hook.
    """
    counts_differ = "nll_loss" in line.name and mine.numbers[1:] != theirs.numbers[1:]  # a mean over an own count
    differ = [(code, ref.storage in gradients) for code, ref in zip(codes, line.inputs, strict=True) if code.any()]
    is_linear = not line.differentiates and all(known and "S" not in letters(code) for code, known in differ)
    has_mean = any(item.is_mean and has(code, P) for item, code in zip(sources, codes, strict=True))
    is_learned = any(item.is_learned for item in sources)
    is_computed = scatters_equal(line, codes) or not any(has(code, V) for code in codes)
    for item, ref in zip(outcomes, targets, strict=True):
        alike = (code for code in codes if code.shape == ref.shape and is_sliced(code))
        is_moved = ref.dtype.is_floating_point or ref.dtype is torch.bool or line.name in LOOKUPS
        is_mixed = is_computed and is_moved and has(item.codes, V) and item.kind in ("note", "error")
        is_nonlinear, what = item.is_error and not has(item.codes, P), "mean" if has_mean else "sum"
        if line.backward and item.is_error and is_linear:
            yield item
        elif line.backward and (is_mixed or item.is_error):
            yield Outcome(next(alike, filled(ref.shape, P)))
        elif is_mixed and counts_differ:
            yield Outcome(filled(ref.shape, P), f"{line.name}: {OWN_COUNT}")
        elif is_mixed:
            part = halves(ref.shape, 0) if ref.shape or not is_learned else filled((), P)
            yield Outcome(next(alike, part), f"{line.name} mixes the items of each rank's own batch", "assumed")
        elif not counts_differ and ((has_mean and item.is_error) or (is_nonlinear and ref.shape)):
            text = f"{line.name} of a {what} over each rank's own batch: it is not that of the whole batch"
            part = halves(ref.shape, 0) if ref.shape and is_nonlinear else filled(ref.shape, P)
            yield Outcome(next(alike, part), "" if line.name in SUMS else text, "warning")
        else:
            yield item
