"""``thunder-zero plan --sites 2x2``: compares ways to train a model at sites with a slow link.

Rows are those of ``tz.tools.plan_training``, for one site and for the ranks of all sites, and of the outer step between
sites that each train as the first row does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any, ClassVar

from torch import Tensor

from thunder_zero.encodings.int8 import Int8
from thunder_zero.plan.amounts import bytes_of, size
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.outer import Outer
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.tools.devices.device import Device, Link, device_of
from thunder_zero.tools.plan.plan_training import PRECISION, best_or_least, compare, known_stages
from thunder_zero.tools.plan.subject import SubjectPrograms, subject_of
from thunder_zero.tools.plan.training_plan import NARROW, MeshShape, PlanRow, meshes
from thunder_zero.tools.printing.progress import show_steps
from thunder_zero.tools.printing.words import PrintedRows
from thunder_zero.tools.time.sites import exchanges_of, link_of

EVERY, OUTER = (8, 32, 128), Outer(wire=Int8(block=64))
NOTES = (
    "steps/s of the slowest rank, tokens/s of all ranks; link/step: bytes that a site sends to other sites",
    f"outer step: all units in {OUTER.wire} after H steps, while compute waits; from the H of the column hidden on, a "
    f"delay hides the exchange, and a step takes as long as at one site alone",
    "H (sync_every) costs quality, as measured in docs/two-sites.md: after as many tokens, the loss is higher, so "
    "compare speeds together with that table",
)


class SitesRows(PrintedRows):
    """Ways to train at several sites. Figures are means over steps."""

    forms: ClassVar[dict[str, Callable[[Any], str]]] = {
        "way": str,
        "ranks": str,
        "steps/s": "{:.3g}".format,
        "tokens/s": "{:,.0f}".format,
        "link/step": lambda nbytes: size(round(nbytes)),
        "hidden": lambda every: f"H = {every}" if every else "",
        "needs": size,
        "fits": lambda fits: "yes" if fits else "no",
    }

    def as_json(self) -> list[Any]:
        return list(self)

    def __repr__(self) -> str:
        notes = (line for note in NOTES for line in wrap(f"- {note}", NARROW, subsequent_indent="  "))
        return "\n".join([super().__repr__(), *notes])


def plan_sites(
    model: str,
    *,
    sites: str,
    between: str,
    device: Device | str = "h100",
    memory_bytes: int | str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    sequence_length: int | None = None,
    micro_batch: int = 1,
    stages: Sequence[int] = tuple(range(len(STAGES))),
) -> SitesRows:
    """Compare one site alone, the ranks of all sites in one job, and the outer step.

    ``sites`` is such as "2x2": sites, and ranks at each, which share the link ``between``, such as "100mbit". Other
    arguments are those of ``plan_training``.
    """
    match, device, stages = re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)", sites), device_of(device), known_stages(stages)
    if not match or match[1] == "1":
        raise ValueError(f"sites is {sites!r}; give the number of sites and of ranks at each, such as '2x2'")
    ranks, world_size = int(match[2]), int(match[1]) * int(match[2])
    link = link_of(between, device)
    device = on_link(device, link, ranks)
    memory = device.memory_bytes if memory_bytes is None else bytes_of("memory_bytes", memory_bytes)
    subject = subject_of(model, loss=loss, length=sequence_length, micro_batch=micro_batch)
    with show_steps("thunder-zero plan", 4 * len(stages)) as show:
        asked, shards = Policy(2, mixed_precision=PRECISION), meshes(3, world_size, ranks)[0].shards
        programs = SubjectPrograms(subject, asked, shards, device, show)
        alone = best_or_least(compare({1: programs}, stages, ranks, memory, show))
        joined = compare({1: programs}, stages, world_size, memory, show)
        ddp, zero = ([row for row in joined if (row.stage > 0) is sharded] for sharded in (False, True))
        ways = {row.name: row for row in map(best_or_least, filter(None, (ddp, zero)))}
        if zero:
            stage = best_or_least(zero).stage
            best = best_or_least(compare({1: in_int8(programs)}, (stage,), world_size, memory, show))
            ways[f"{best.name}, int8"] = best

    def described(name: str, row: PlanRow, sent: float = 0.0, hidden: int | None = None) -> dict[str, Any]:
        speed, fits = (1 / row.seconds, row.mesh.ranks * subject.tokens / row.seconds), row.needed_bytes <= memory
        figures = name, row.mesh.ranks, *speed, sent, hidden, row.needed_bytes, fits
        return dict(zip(SitesRows.forms, figures, strict=True))

    rows = [described(f"one site, {STAGES[alone.stage].name}", alone)]
    for name, row in ways.items():
        replicated, sharded = ranks * row.replica_bytes, device.leaving(world_size, 1, row.busiest_bytes)
        rows.append(described(name, row, replicated if row.mesh.replicas > 1 else sharded))
    plan = make_plan(subject.module, programs.policy(alone.stage, alone.recompute), MeshShape(1, ranks).at_rank_0())
    for every in EVERY:
        outer = replace(OUTER, sync_every=every, sites=int(match[1]))
        rows.append(described(f"outer step, H = {every}", *_outer_row(plan, outer, alone, link, device)))
    return SitesRows(rows)


def _outer_row(plan: Plan, outer: Outer, alone: PlanRow, link: Link, device: Device) -> tuple[PlanRow, float, int]:
    """Return the row of sites that each train as one alone, the bytes that a site sends, and the H that hides them."""
    exchanges, (vectors,) = exchanges_of(plan, outer, link, device), outer.vectors_of(plan)
    buffers = alone.at_rest_bytes + outer.buffers(plan, vectors, on_gpu=not device.is_measured)
    needed = alone.needed_bytes + (1 + outer.states) * outer.rows(plan) + max(0, buffers - alone.peak_bytes)
    seconds, hidden = exchanges.mean_seconds(alone.seconds), exchanges.hidden_from(alone.seconds)
    row = replace(alone, mesh=MeshShape(outer.sites, plan.mesh.size()), needed_bytes=needed, seconds=seconds)
    return row, sum(exchanges.sent) / outer.sync_every, hidden


def on_link(device: Device, link: Link, ranks: int) -> Device:
    """Return a device of places with ``ranks`` each, which share the link of their place to the others.

    A single rank may have been calibrated together with ranks at other places.
    """
    if not device.is_measured or ranks == 1:
        device = replace(device, devices_per_node=ranks)
    if device.devices_per_node != ranks:
        raise ValueError(f"{device.name} was calibrated with {device.devices_per_node} ranks, not with {ranks}")
    return replace(device, inter_node=replace(link, bytes_per_second=link.bytes_per_second / ranks))


def in_int8(programs: SubjectPrograms) -> SubjectPrograms:
    """Return the programs whose gathers and gradients are int8 on the wire."""
    return replace(programs, asked=replace(programs.asked, gather_format=Int8(), reduce_format=Int8()))
