"""``thunder-zero plan --sites``, ``--machines``: compares ways to train over a slow link.

::

    machines  way          recompute  needs     fits  sent      step    tokens/s  pays from
    1         ZeRO-2 on 1  none       21.4 GiB  yes   0 B       114 ms  9,008
    2         ZeRO-2 on 2  none       13.5 GiB  yes   3.67 GiB  33.5 s  61        173 Gbit/s

Rows are those of ``tz.tools.plan_training``, for one place and for the ranks of all places. A machine more pays from
the rate at which a row has as many tokens/s as the fewest machines: the same row, evaluated with other links. Sites may
also take an outer step, each site training as one alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from textwrap import wrap
from typing import Any, ClassVar

from torch import Tensor

from thunder_zero.encodings.int8 import Int8
from thunder_zero.plan.amounts import bits_of, bytes_of, duration, size
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.outer import Outer
from thunder_zero.plan.policy import STAGES, Policy, is_count
from thunder_zero.plan.precision import MixedPrecision
from thunder_zero.tools.devices.device import Device, Link, device_of
from thunder_zero.tools.plan.plan_training import (
    PRECISION,
    assumed,
    best_or_least,
    compare,
    evaluate_row,
    known_slices,
    known_stages,
    programs_of,
)
from thunder_zero.tools.plan.subject import SubjectPrograms, subject_of
from thunder_zero.tools.plan.training_plan import NARROW, MeshShape, PlanRow, meshes, reason_of
from thunder_zero.tools.printing.progress import show_steps
from thunder_zero.tools.printing.words import PrintedRows, count
from thunder_zero.tools.time.sites import exchanges_of, link_of

EVERY, OUTER = (8, 32, 128), Outer(wire=Int8(block=64))
RATES = (1e6, 1e12)  # bits a second; a row that pays at no rate of these pays at none
PRECISE = 1.005  # the ratio of the two rates between which a row begins to pay
OF_SITES = (
    "steps/s of the slowest rank, tokens/s of all ranks; link/step: bytes that a site sends to other sites",
    f"outer step: all units in {OUTER.wire} after H steps, while compute waits; from the H of the column hidden on, a "
    f"delay hides the exchange, and a step takes as long as at one site alone",
    "H (sync_every) costs quality: after as many tokens the loss was higher by 2.9% at H 8, 5.1% at 32 and 8.8% at 128 "
    "in the trainings of docs/two-sites.md, so compare speeds together with its table",
)
OF_MACHINES = (
    "needs and sent are a rank's, tokens/s those of all ranks, and each rank has the same batch: more machines have "
    "a larger batch",
    "the link is a machine's to the others, in each direction, which its ranks share: of its rate, TCP on Ethernet "
    "carries 94%",
)
BOUND = (
    "compute that takes longer than this bound hides more communication, so a further machine pays from a slower link "
    "on, if the link reaches its rate"
)


def rate_of(bits: float | None) -> str:
    """Return a rate such as ``1 Gbit/s``, "any" for 0, and "" for none."""
    return "" if bits is None else f"{count(bits)}bit/s" if bits else "any"


SITES = "way", "ranks", "steps/s", "tokens/s", "link/step", "hidden", "needs", "fits"  # means over steps
MACHINES = "machines", "way", "recompute", "needs", "fits", "sent", "step", "tokens/s", "pays from"


class PlacesRows(PrintedRows):
    """Ways to train at one place and at several. "pays from" is in bits a second: 0 for any rate, None for none."""

    forms: ClassVar[dict[str, Callable[[Any], str]]] = {
        **dict.fromkeys(("machines", "way", "recompute", "ranks"), str),
        "steps/s": "{:.3g}".format,
        "step": duration,
        "tokens/s": "{:,.0f}".format,
        "sent": size,
        "link/step": lambda nbytes: size(round(nbytes)),
        "hidden": lambda every: f"H = {every}" if every else "",
        "needs": size,
        "fits": lambda fits: "yes" if fits else "no",
        "pays from": rate_of,
    }


@dataclass(frozen=True, repr=False)
class PlacesPlan:
    """The rows, the assumptions, and of machines the answer: whether a further one pays."""

    rows: PrintedRows
    assumed: tuple[str, ...]
    heading: str = ""
    answer: str = ""

    def as_json(self) -> Any:
        """Return the plan as data that JSON can hold."""
        machines = {"rows": list(self.rows), "answer": self.answer, "assumed": self.assumed}
        return machines if self.answer else machines["rows"]

    def __repr__(self) -> str:
        lines = [*wrap(self.heading, NARROW), repr(self.rows), *wrap(self.answer, NARROW), *[""] * bool(self.answer)]
        for sentence in self.assumed:
            lines += wrap(f"- {sentence}", NARROW, subsequent_indent="  ")
        return "\n".join(lines)


Way = tuple[str, SubjectPrograms, PlanRow]  # a name, and a row with the programs it was evaluated with


def _tokens_per_second(row: PlanRow) -> float:
    """Return the tokens a second of all ranks."""
    return row.mesh.ranks * row.tokens_per_second


def plan_places(
    model: str,
    *,
    between: str,
    sites: str | None = None,
    machines: Sequence[int] = (),
    device: Device | str = "h100",
    devices_per_node: int | None = None,
    memory_bytes: int | str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    sequence_length: int | None = None,
    micro_batch: int = 1,
    precision: MixedPrecision = PRECISION,
    stages: Sequence[int] = tuple(range(len(STAGES))),
    tp: int | Sequence[int] = 1,
) -> PlacesPlan:
    """Compare one place with several, over a link of the rate ``between``, such as "100mbit".

    ``sites`` is such as "2x2", sites and ranks at each: one site alone, the ranks of all sites in one job, and the
    outer step. ``machines`` is such as (1, 2): the fewest have one row, the best, and others one for each stage, the
    best mesh of it, and one in int8. Other arguments are those of ``plan_training``.
    """
    device, stages, sizes = device_of(device), known_stages(stages), known_slices(tp)
    ranks = device.devices_per_node if devices_per_node is None else devices_per_node
    fewest, *more = numbers = sorted(set(machines)) or [1]
    if sites is not None:
        match = re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)", sites)
        if not match or match[1] == "1":
            raise ValueError(f"sites is {sites!r}; give the number of sites and of ranks at each, such as '2x2'")
        more, ranks = [int(match[1])], int(match[2])
    elif not more or not all(is_count(number) and number for number in numbers):
        raise ValueError(f"machines is {tuple(machines)!r}; give two numbers of machines or more, such as 1 2")
    bits = bits_of("between", between)
    link = link_of(bits, device)
    device = on_link(device, link, ranks)
    if memory_bytes is not None:
        device = replace(device, memory_bytes=bytes_of("memory_bytes", memory_bytes))
    subject = subject_of(model, loss=loss, length=sequence_length, micro_batch=micro_batch)
    if max(sizes) > 1 and subject.tp_plan is None:
        raise ValueError(f"tp is {sizes!r}, and nothing says how to slice {model}; leave tp out")
    asked, slicing = Policy(2, mixed_precision=precision), subject.tp_plan or {}
    known = [meshes(stage, n * ranks, ranks, part) for n in (fewest, *more) for stage in stages for part in sizes]
    steps = sum(map(len, known)) + len(more) * any(stages)  # the row in int8 is one step
    with show_steps("thunder-zero plan", steps) as show:
        programs = programs_of(dict.fromkeys(sizes, subject), asked, device, more[-1] * ranks, show, slicing)
        best = best_or_least(compare(programs, stages, fewest * ranks))
        if sites is not None:
            ways = _ways(programs, sorted(stages), more[0] * ranks, lambda row: row.stage > 0)
            return PlacesPlan(PlacesRows(_rows_of_sites(programs[1], best, ways, more[0], link)), OF_SITES)
        compared, rows = zip(*_rows_of_machines(programs, best, more, stages, bits), strict=True)
    rate, memory = rate_of(bits), device.memory_bytes
    heading = (
        f"{subject.name} on {device.name} of {size(memory)}, {ranks} in a machine, {rate} "
        f"between machines; {subject.tokens:,} tokens of a rank a step"
    )
    sentences = assumed(subject, asked, device, returns_loss=programs[sizes[0]].returns_loss())
    answer = _answer(*rows, rate=rate, memory_bytes=memory)
    if not any(row.fits for row in compared):
        answer = f"{reason_of(compared, None, memory, subject.batch)}."
    sentences = *OF_MACHINES, *[BOUND] * (not device.is_measured), *sentences
    return PlacesPlan(PlacesRows(rows), sentences, heading, answer)


def _rows_of_sites(
    programs: SubjectPrograms, best: PlanRow, ways: Sequence[Way], sites: int, link: Link
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one site alone, the best, of the ways of all sites in one job, and of the outer step."""
    subject, device, ranks = programs.subject, programs.device, best.mesh.ranks

    def described(name: str, row: PlanRow, sent: float = 0.0, hidden: int | None = None) -> dict[str, Any]:
        speed = 1 / row.seconds, row.mesh.ranks * subject.tokens / row.seconds
        needs = row.needed_bytes, row.needed_bytes <= device.memory_bytes
        return dict(zip(SITES, (name, row.mesh.ranks, *speed, sent, hidden, *needs), strict=True))

    yield described(f"one site, {STAGES[best.stage].name}", best)
    for name, _, row in ways:
        replicated, sharded = ranks * row.replica_bytes, device.leaving(row.mesh.ranks, 1, row.busiest_bytes)
        yield described(name, row, replicated if row.mesh.replicas > 1 else sharded)
    policy = programs.policy(best.stage, best.recompute)
    plan = make_plan(subject.module, policy, MeshShape(1, ranks).at_rank_0())
    for every in EVERY:
        outer = replace(OUTER, sync_every=every, sites=sites)
        exchanges, (vectors,) = exchanges_of(plan, outer, link, device), outer.vectors_of(plan)
        buffers = best.at_rest_bytes + outer.buffers(plan, vectors, on_gpu=not device.is_measured)
        needed = best.needed_bytes + (1 + outer.states) * outer.rows(plan) + max(0, buffers - best.peak_bytes)
        seconds, hidden = exchanges.mean_seconds(best.seconds), exchanges.hidden_from(best.seconds)
        row = replace(best, mesh=MeshShape(sites, ranks), needed_bytes=needed, seconds=seconds)
        yield described(f"outer step, H = {every}", row, sum(exchanges.sent) / every, hidden)


def _rows_of_machines(
    programs: Mapping[int, SubjectPrograms], alone: PlanRow, more: Sequence[int], stages: Sequence[int], bits: float
) -> Iterator[tuple[PlanRow, dict[str, Any]]]:
    """Yield the row of the fewest machines, and those of each larger number, with what is printed."""
    ranks = programs[alone.mesh.slices].device.devices_per_node

    def described(name: str, row: PlanRow, pays_from: float | None) -> tuple[PlanRow, dict[str, Any]]:
        figures = row.needed_bytes, row.fits, row.busiest_bytes, row.seconds, _tokens_per_second(row), pays_from
        cells = row.mesh.ranks // ranks, name, row.recompute, *figures
        return row, dict(zip(MACHINES, cells, strict=True))

    yield described(alone.name, alone, None)
    for number in more:
        for name, evaluated, row in _ways(programs, stages, number * ranks, lambda row: (row.stage, row.mesh.slices)):
            evaluated.tell(f"looks for the link from which {name} pays")
            yield described(name, row, _pays_from(evaluated, row, alone, bits))


def on_link(device: Device, link: Link, ranks: int) -> Device:
    """Return a device of places with ``ranks`` each, which share the link of their place to the others.

    A single rank may have been calibrated together with ranks at other places.
    """
    if not device.is_measured or ranks == 1:
        device = replace(device, devices_per_node=ranks)
    if device.devices_per_node != ranks:
        raise ValueError(f"{device.name} was calibrated with {device.devices_per_node} ranks, not with {ranks}")
    return replace(device, inter_node=replace(link, bytes_per_second=link.bytes_per_second / ranks))


def _ways(
    programs: Mapping[int, SubjectPrograms], stages: Sequence[int], ranks: int, kind: Callable[[PlanRow], object]
) -> list[Way]:
    """Return the best row of each kind, and the best sharded one in int8."""
    rows, groups = compare(programs, stages, ranks), defaultdict[object, list[PlanRow]](list)
    for row in rows:
        groups[kind(row)].append(row)
    ways = [(row.name, programs[row.mesh.slices], row) for row in map(best_or_least, groups.values())]
    if sharded := [row for row in rows if row.stage]:
        best = best_or_least(sharded)
        exact = programs[best.mesh.slices]
        bytewise = replace(exact, asked=replace(exact.asked, gather_format=Int8(), reduce_format=Int8()))
        counted = replace(bytewise, tell=lambda now="", **_: exact.tell(now))  # its rows are one step of the bar
        best = best_or_least(compare({best.mesh.slices: counted}, (best.stage,), ranks))
        exact.tell(ended=1)
        ways.append((f"{best.name}, int8", bytewise, best))
    return ways


def _pays_from(programs: SubjectPrograms, row: PlanRow, alone: PlanRow, bits: float) -> float | None:
    """Return the least rate of the link at which a row has the tokens/s of the fewest machines: 0 for any."""
    if not row.fits:
        return None
    if not alone.fits:
        return 0.0
    needed, (least, most), device = _tokens_per_second(alone), RATES, programs.device

    def pays(bits: float) -> bool:
        """Return whether the row has as many tokens/s on a link of another rate."""
        linked = on_link(device, link_of(bits, device), device.devices_per_node)
        again = replace(programs, device=linked, tell=lambda *_, **__: None)
        return _tokens_per_second(evaluate_row(again, row.stage, row.mesh, row.recompute)) >= needed

    if _tokens_per_second(row) >= needed:
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


def _answer(alone: Mapping[str, Any], *others: Mapping[str, Any], rate: str, memory_bytes: int) -> str:
    """Return the answer in a sentence, from the rows that are printed."""
    one = f"{alone['machines']} machine{'s' * (alone['machines'] > 1)}"
    fitting = [row for row in others if row["fits"]]
    if not fitting:
        return f"No: only {one} fits into {size(memory_bytes)}."
    best = max(fitting, key=lambda row: row["tokens/s"])
    reach = f"{best['machines']} machines reach {best['tokens/s']:,.0f} tokens/s at {rate}, with {best['way']}"
    if not alone["fits"]:
        return f"Yes: {one} would need {size(alone['needs'])} a rank, and {reach}."
    if best["tokens/s"] > alone["tokens/s"]:
        return f"Yes: {reach}, which is {best['tokens/s'] / alone['tokens/s']:.2f} times {one}."
    no = f"{reach}, and {one} {alone['tokens/s']:,.0f}"
    paying = [row for row in fitting if row["pays from"] is not None]
    if not paying:
        return f"No, at no rate: {no}."
    first = min(paying, key=lambda row: row["pays from"])
    return f"No: {no}. More machines pay from {rate_of(first['pays from'])} on, with {first['way']}."
