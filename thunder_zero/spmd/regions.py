"""Joins lines that keep a law only together, so that one experiment runs them all.

Routing sorts elements by their values, computes, and puts them back. In between no line keeps a law, and shapes may
depend on the data::

    perm = sort(experts)            V  a region starts
    y = grouped_mm(x[perm], w, ..)  V  it grows
    y[inverse(perm)]                S  from experts and x, the lines of the region treat slices alike

So do lines that average shares after a gather: only their sum is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thunder_zero.spmd.laws import COUNTS, Outcome, P, R, Rerun, V, Values, filled, has
from thunder_zero.spmd.lines import RecordedLine, Ref

MOST = 128  # lines of a region


@dataclass(frozen=True)
class Trial:
    """A line of a region.

    Attributes:
        number: its place in the record.
        line: the line.
        run: runs it, without copies of its inputs, so that views see what is written.
        codes: of its inputs; None for an input that an earlier line of the region computes.
    """

    number: int
    line: RecordedLine
    run: Rerun
    codes: tuple[Tensor | None, ...]


Region = tuple[Trial, ...]


def joined(regions: Iterable[Region], trial: Trial) -> Region:
    """Return the region of a line whose inputs have these regions, or () if it is too long."""
    known = {item.number: item for region in regions for item in region}
    return (*(known[number] for number in sorted(known)), trial) if len(known) < MOST else ()


def starts_region(name: str, outcomes: Iterable[Outcome], targets: Iterable[Ref], read: Set[int]) -> bool:
    """Return whether a line routes: it writes whole numbers or masks without a law, which are ``read``, or counts."""
    pairs = ((item, ref) for item, ref in zip(outcomes, targets, strict=True) if ref.storage in read)
    return name in COUNTS or any(_is_open(item, ref) and not ref.dtype.is_floating_point for item, ref in pairs)


def are_typed(outcomes: Iterable[Outcome], targets: Iterable[Ref]) -> bool:
    """Return whether outcomes keep a law, so that no experiment with more lines is needed."""
    return not any(item.is_error or _is_open(item, ref) for item, ref in zip(outcomes, targets, strict=True))


def _is_open(outcome: Outcome, ref: Ref) -> bool:
    return has(outcome.codes, V) or (has(outcome.codes, P) and not ref.dtype.is_floating_point)


def as_one(region: Region) -> tuple[dict[Ref, Tensor], Rerun]:
    """Return the codes of what a region reads, and a function of these values that runs it."""
    given: dict[Ref, Tensor] = {}
    for trial in region:
        for ref, codes in zip(trial.line.inputs, trial.codes, strict=True):
            if codes is not None:
                given.setdefault(ref, codes)

    def run(values: Values, rank: int) -> Values:
        start = {ref: value.clone() for ref, value in zip(given, values, strict=True)}
        computed: dict[object, Tensor] = {}
        outputs: Values = []
        for trial in region:
            pairs = zip(trial.line.inputs, trial.codes, strict=True)
            inputs = [computed[ref.place] if codes is None else start[ref] for ref, codes in pairs]
            is_whole = trial.line.is_view and trial.line.results[0].place == trial.line.inputs[0].place
            outputs = inputs if is_whole else trial.run(inputs, rank)  # its recorded sizes may be those of the data
            targets = (*trial.line.written, *trial.line.results)
            computed.update(zip((ref.place for ref in targets), outputs, strict=False))
        return outputs

    return given, run


def gathered(number: int, line: RecordedLine, outputs: Sequence[Ref]) -> Trial:
    """Return the start of a region in which gathered shares are summed."""
    given = replace(line, inputs=tuple(outputs), changes=(), written=(), results=tuple(outputs))
    return Trial(number, given, lambda values, _: values, tuple(filled(ref.shape, P) for ref in outputs))


def sum_of_gathered(
    region: Region, values: Mapping[Ref, Tensor], targets: Sequence[Ref], size: int
) -> list[Outcome] | None:
    """Return the outcomes of a line that writes a multiple of the sum of all shares that were gathered."""
    (given, run), gathers = as_one(region), [trial.line for trial in region if trial.line.collective is not None]
    drawn = {ref: torch.randn(ref.shape, dtype=torch.float64) for ref in gathers[0].results}
    collective, results = gathers[0].collective, []
    assert collective is not None
    total = torch.cat([item.reshape(-1) for item in drawn.values()]).reshape(collective.size, -1).sum(0)
    try:
        outputs = run([drawn[ref] if ref in drawn else values[ref] for ref in given], 0)
    except Exception:
        return None
    for ref, output in zip(targets, outputs, strict=True):
        factor = float(output.reshape(-1)[0] / total[0]) if output.numel() == len(total) else 0.0
        if not factor or not bool(torch.isclose(output.reshape(-1).double(), factor * total, rtol=1e-4).all()):
            return None
        results.append(Outcome(filled(ref.shape, R), factor=factor * collective.size / size))
    return results
