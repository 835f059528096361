"""``thunder-zero plan --machines 1 2``: tells whether a further machine pays, and from which link.

::

    machines  way          recompute  needs     fits  sent      step    tokens/s  pays from
    1         ZeRO-2 on 1  none       21.4 GiB  yes   0 B       114 ms  9,008
    2         ZeRO-2 on 2  none       13.5 GiB  yes   3.67 GiB  31.6 s  65        162 Gbit/s

Rows are those of ``tz.tools.plan_training``. A row pays from the rate at which it has as many tokens/s as the fewest
machines: the same row, evaluated with other links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from textwrap import wrap
from typing import Any, ClassVar

from torch import Tensor

from thunder_zero.plan.amounts import bits_of, bytes_of, duration, size
from thunder_zero.plan.policy import STAGES, Policy, is_count
from thunder_zero.plan.precision import MixedPrecision
from thunder_zero.tools.devices.device import Device, device_of
from thunder_zero.tools.plan.plan_sites import in_int8, on_link
from thunder_zero.tools.plan.plan_training import (
    PRECISION,
    assumed,
    best_of,
    best_or_least,
    compare,
    evaluate_row,
    known_slices,
    known_stages,
)
from thunder_zero.tools.plan.subject import Subject, SubjectPrograms, subject_of
from thunder_zero.tools.plan.training_plan import NARROW, PlanRow, meshes, reason_of
from thunder_zero.tools.printing.progress import show_steps
from thunder_zero.tools.printing.words import PrintedRows, count
from thunder_zero.tools.time.sites import link_of

RATES = (1e6, 1e12)  # bits a second; a row that pays at no rate of these pays at none
PRECISE = 1.005  # the ratio of the two rates between which a row begins to pay
NOTES = (
    "needs and sent are a rank's, tokens/s those of all ranks, and each rank has the same batch: more machines have "
    "a larger batch",
    "the link is a machine's to the others, in each direction, which its ranks share: of its rate, TCP on Ethernet "
    "carries 94%",
)


def rate_of(bits: float | None) -> str:
    """Return a rate such as ``1 Gbit/s``, "any" for 0, and "" for none."""
    return "" if bits is None else f"{count(bits)}bit/s" if bits else "any"


class MachinesRows(PrintedRows):
    """Ways to train on one machine and on several. "pays from" is in bits a second: 0 for any rate, None for none."""

    forms: ClassVar[dict[str, Callable[[Any], str]]] = {
        "machines": str,
        "way": str,
        "recompute": str,
        "needs": size,
        "fits": lambda fits: "yes" if fits else "no",
        "sent": size,
        "step": duration,
        "tokens/s": "{:,.0f}".format,
        "pays from": rate_of,
    }


@dataclass(frozen=True, repr=False)
class MachinesPlan:
    """Whether a further machine pays: the rows, the answer and the assumptions."""

    heading: str
    rows: MachinesRows
    answer: str
    assumed: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as data that JSON can hold."""
        return {"rows": list(self.rows), "answer": self.answer, "assumed": self.assumed}

    def __repr__(self) -> str:
        lines = [*wrap(self.heading, NARROW), repr(self.rows), *wrap(self.answer, NARROW), ""]
        for sentence in self.assumed:
            lines += wrap(f"- {sentence}", NARROW, subsequent_indent="  ")
        return "\n".join(lines)


@dataclass(frozen=True)
class Way:
    """A row, the programs it was evaluated with, and the rate of the link from which it pays."""

    name: str
    machines: int
    programs: SubjectPrograms
    row: PlanRow
    pays_from: float | None = None  # bits a second: 0 for any, None for none

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all ranks."""
        return self.row.mesh.ranks * self.row.tokens_per_second

    def described(self) -> dict[str, Any]:
        row = self.row
        figures = row.needed_bytes, row.fits, row.busiest_bytes, row.seconds, self.tokens_per_second, self.pays_from
        return dict(zip(MachinesRows.forms, (self.machines, self.name, row.recompute, *figures), strict=True))


def plan_machines(
    model: str,
    *,
    machines: Sequence[int],
    between: str,
    device: Device | str = "h100",
    devices_per_node: int | None = None,
    memory_bytes: int | str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    sequence_length: int | None = None,
    micro_batch: int = 1,
    precision: MixedPrecision = PRECISION,
    stages: Sequence[int] = tuple(range(len(STAGES))),
    tp: int | Sequence[int] = 1,
) -> MachinesPlan:
    """Compare the fewest of ``machines`` with each larger number, over links of the rate ``between``.

    The fewest machines have one row, the best. Others have one for each stage, the best mesh of it, and one in int8.
    ``machines`` is such as (1, 2), and ``between`` such as "1gbit". Other arguments are those of ``plan_training``.
    """
    fewest, *more = numbers = _known_machines(machines)
    device, stages, sizes = device_of(device), known_stages(stages), known_slices(tp)
    ranks = device.devices_per_node if devices_per_node is None else devices_per_node
    device = on_link(device, link_of(between, device), ranks)
    memory = device.memory_bytes if memory_bytes is None else bytes_of("memory_bytes", memory_bytes)
    bits = bits_of("between", between)
    subject, asked = _subject(model, loss, sequence_length, micro_batch, sizes), Policy(2, mixed_precision=precision)
    known = [meshes(stage, number * ranks, ranks, part) for number in numbers for stage in stages for part in sizes]
    steps = sum(map(len, known)) + len(more) * any(stages)  # the row in int8 is one step
    with show_steps("thunder-zero plan", steps) as show:
        programs = dict[int, SubjectPrograms]()
        for part in sizes:
            shards = meshes(3, more[-1] * ranks, ranks, part)[0].shards
            programs[part] = SubjectPrograms(subject, asked, shards, device, show, part, subject.tp_plan or {})
        rows = compare(programs, stages, fewest * ranks, memory, show)
        best = best_or_least(rows)
        alone, ways = Way(best.name, fewest, programs[best.mesh.slices], best), list[Way]()
        for number in more:
            compared = _ways(programs, stages, number, memory, show)
            ways += [replace(way, pays_from=_pays_from(way, alone, bits, memory, show)) for way in compared]
    heading = (
        f"{subject.name} on {device.name} of {size(memory)}, {ranks} in a machine, {rate_of(bits)} "
        f"between machines; {subject.tokens:,} tokens of a rank a step"
    )
    sentences = assumed(subject, asked, device, returns_loss=programs[sizes[0]].returns_loss())
    bound = () if device.is_measured else (BOUND,)
    table = MachinesRows(way.described() for way in (alone, *ways))
    answer = _answer(alone, ways, rate_of(bits), memory, subject.batch)
    return MachinesPlan(heading, table, answer, (*NOTES, *bound, *sentences))


BOUND = (
    "compute that takes longer than this bound hides more communication, so a further machine pays from a slower link "
    "on, if the link reaches its rate"
)


def _known_machines(machines: Sequence[int]) -> list[int]:
    numbers = sorted(set(machines))
    if len(numbers) < 2 or not all(is_count(number) and number for number in numbers):
        raise ValueError(f"machines is {tuple(machines)!r}; give two numbers of machines or more, such as 1 2")
    return numbers


def _subject(model: str, loss: Any, length: int | None, micro_batch: int, sizes: Sequence[int]) -> Subject:
    subject = subject_of(model, loss=loss, length=length, micro_batch=micro_batch)
    if max(sizes) > 1 and subject.tp_plan is None:
        raise ValueError(f"tp is {sizes!r}, and nothing says how to slice {model}; leave tp out")
    return subject


def _ways(
    programs: Mapping[int, SubjectPrograms],
    stages: Sequence[int],
    machines: int,
    memory_bytes: int,
    show: Callable[..., None],
) -> list[Way]:
    """Return the best mesh of each stage and ``tp``, and the best sharded one in int8."""
    ranks, ways = machines * next(iter(programs.values())).device.devices_per_node, list[Way]()
    rows = compare(programs, stages, ranks, memory_bytes, show)
    for stage in stages:
        for slices, compared in programs.items():
            best = best_or_least([row for row in rows if (row.stage, row.mesh.slices) == (stage, slices)])
            ways.append(Way(best.name, machines, compared, best))
    if sharded := [row for row in rows if row.stage]:
        best = best_or_least(sharded)
        bytewise = in_int8(programs[best.mesh.slices])
        asked = {best.mesh.slices: bytewise}, (best.stage,), ranks, memory_bytes
        best = best_or_least(compare(*asked, lambda now="", **_: show(now)))
        show(ended=1)
        ways.append(Way(f"{best.name}, int8", machines, bytewise, best))
    return ways


def _pays_from(way: Way, alone: Way, bits: float, memory_bytes: int, show: Callable[..., None]) -> float | None:
    """Return the least rate of the link at which a way has the tokens/s of the fewest machines: 0 for any."""
    if not way.row.fits:
        return None
    if not alone.row.fits:
        return 0.0
    show(f"looks for the link from which {way.name} pays")
    needed, (least, most) = alone.tokens_per_second, RATES

    def pays(bits: float) -> bool:
        return _at(way, bits, memory_bytes).tokens_per_second >= needed

    if way.tokens_per_second >= needed:
        most = bits
        if pays(least):
            return 0.0
    else:
        least = bits
        if not pays(most):
            return None
    while most > PRECISE * least:  # a step takes no longer on a faster link
        middle = sqrt(least * most)
        least, most = (least, middle) if pays(middle) else (middle, most)
    return most


def _at(way: Way, bits: float, memory_bytes: int) -> Way:
    """Return a way on a link of another rate."""
    programs, row = way.programs, way.row
    device = on_link(programs.device, link_of(bits, programs.device), programs.device.devices_per_node)
    programs = replace(programs, device=device, tell=_say_nothing)
    row = evaluate_row(programs, row.stage, row.mesh, row.recompute, memory_bytes, _say_nothing)
    return replace(way, programs=programs, row=row)


def _say_nothing(now: str = "", ended: int = 0) -> None:
    pass


def _answer(alone: Way, ways: Sequence[Way], rate: str, memory_bytes: int, batch: int) -> str:
    """Return the answer in a sentence. ``batch`` is that of ``reason_of``."""
    if best_of(rows := [way.row for way in (alone, *ways)]) is None:
        return f"{reason_of(rows, None, memory_bytes, batch)}."
    one = f"{alone.machines} machine{'s' * (alone.machines > 1)}"
    fitting = [way for way in ways if way.row.fits]
    if not fitting:
        return f"No: only {one} fits into {size(memory_bytes)}."
    best = max(fitting, key=lambda way: way.tokens_per_second)
    reach = f"{best.machines} machines reach {best.tokens_per_second:,.0f} tokens/s at {rate}, with {best.name}"
    if not alone.row.fits:
        return f"Yes: {one} would need {size(alone.row.needed_bytes)} a rank, and {reach}."
    if best.tokens_per_second > alone.tokens_per_second:
        return f"Yes: {reach}, which is {best.tokens_per_second / alone.tokens_per_second:.2f} times {one}."
    paying = [way for way in fitting if way.pays_from is not None]
    if not paying:
        return f"No, at no rate: {reach}, and {one} {alone.tokens_per_second:,.0f}."
    first = min(paying, key=lambda way: way.pays_from or 0.0)
    pays = f"More machines pay from {rate_of(first.pays_from)} on, with {first.name}"
    return f"No: {reach}, and {one} {alone.tokens_per_second:,.0f}. {pays}."
