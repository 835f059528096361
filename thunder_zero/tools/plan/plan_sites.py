"""``thunder-zero plan --sites 2x2``: compares ways to train a model at sites with a slow link between them.

In: a model, a number of sites and of ranks at each, and a rate. Out: :class:`SitesPlan`. Its rows are those of
:func:`thunder_zero.tools.plan_training`, for one site and for the ranks of all sites, and of the outer step between
sites that each train as the first row does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import wrap
from typing import Any

from torch import Tensor

from thunder_zero.encodings.int8 import Int8
from thunder_zero.plan.amounts import bits_of, bytes_of, size, summed_up
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.outer import Outer
from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.tools.devices.device import Device, Link, device_of
from thunder_zero.tools.plan.plan_training import PRECISION, best_of, compare, known_stages
from thunder_zero.tools.plan.subject import SubjectPrograms, subject_of
from thunder_zero.tools.plan.training_plan import NARROW, MeshShape, PlanRow, meshes
from thunder_zero.tools.printing.progress import show_steps
from thunder_zero.tools.printing.words import aligned
from thunder_zero.tools.time.sites import exchanges_of

EVERY = (8, 32, 128)  # steps between exchanges
OUTER, INT8 = Outer(wire=Int8(block=64)), Int8()
QUALITY = (
    "H, the steps between two exchanges (sync_every), costs quality: after as many tokens, the loss is higher than "
    "that of DDP. docs/two-sites.md has what was measured. Compare speeds together with that table."
)


@dataclass(frozen=True)
class SitesRow:
    """A way to train at several sites. Seconds and bytes are means over steps."""

    name: str
    ranks: int  # that train together
    seconds: float  # of a step
    tokens_per_second: float  # of all these ranks
    link_bytes: float  # that a site sends to other sites in a step
    hidden_from: int | None  # the smallest ``sync_every`` with a delay that hides exchanges; None without an outer step
    needed_bytes: int  # memory of a rank at the peak
    fits: bool


@dataclass(frozen=True, repr=False)
class SitesPlan:
    """Ways to train a model at several sites, beside one site alone."""

    model: str
    sites: int
    ranks: int  # of a site
    device: str
    between: str  # the rate of the link between sites
    tokens: int  # of a rank in a step
    rows: tuple[SitesRow, ...]
    is_bound: bool  # True if times are lower bounds, because the device was not measured

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __repr__(self) -> str:
        return summed_up(self, f"{self.model} at {self.sites} sites of {self.ranks} {self.device}, {self.between}")

    def __str__(self) -> str:
        """Return the table and its explanation, in 80 columns."""
        heads = ("", "ranks", "steps/s", "tokens/s", "link/step", "hidden from", "needs", "fits")
        cells = [heads, *map(_cells, self.rows)]
        heading = (
            f"{self.model} at {self.sites} sites of {self.ranks} {self.device}, {self.between} between them; "
            f"{self.tokens:,} tokens of a rank a step"
        )
        outer = next(row for row in self.rows if row.hidden_from)
        sentences = [
            f"link/step: bytes that a site sends to other sites in a step, on average; outer step: {OUTER.wire}, all "
            f"units after H steps, while compute waits; with delay= it runs beside compute from "
            f"sync_every={outer.hidden_from} on, where a step takes as long as at one site alone",
            QUALITY,
            *["steps/s are bounds: products at the device's peak, wires at full speed"] * self.is_bound,
        ]
        texts = [line for text in sentences for line in wrap(f"- {text}", NARROW, subsequent_indent="  ")]
        return "\n".join([*wrap(heading, NARROW), aligned(cells, apart=1), *texts])


def _cells(row: SitesRow) -> tuple[str, ...]:
    hidden, fits = f"H = {row.hidden_from}" if row.hidden_from else "", "yes" if row.fits else "no"
    amounts = f"{row.tokens_per_second:,.0f}", size(round(row.link_bytes)), hidden, size(row.needed_bytes), fits
    return row.name, str(row.ranks), f"{1 / row.seconds:.3g}", *amounts


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
) -> SitesPlan:
    """Compare one site alone, the ranks of all sites in one job, and the outer step, before anything runs.

    Args:
        sites: the number of sites and of ranks at each, such as ``"2x2"``.
        between: the rate of a site's link to the others, such as ``"100 Mbit/s"``, which its ranks share.
        device, memory_bytes, loss, sequence_length, micro_batch, stages: as for ``tz.tools.plan_training``.
    """
    count, ranks = _shape(sites)
    rate, described = bits_of("between", between) / 8, device_of(device)
    if described.is_measured and described.devices_per_node != ranks:
        raise ValueError(f"{described.name} was calibrated with {described.devices_per_node} ranks, not with {ranks}")
    latency = described.inter_node.latency_seconds if described.inter_node else 0.0
    described = replace(described, devices_per_node=ranks, inter_node=Link(rate / ranks, latency))
    memory = described.memory_bytes if memory_bytes is None else bytes_of("memory_bytes", memory_bytes)
    subject = subject_of(model, loss=loss, length=sequence_length, micro_batch=micro_batch)
    stages = known_stages(stages)
    number = sum(len(meshes(stage, size, ranks)) for stage in (*stages, max(stages)) for size in (ranks, count * ranks))
    with show_steps("thunder-zero plan", number) as show:
        programs = SubjectPrograms(subject, Policy(2, mixed_precision=PRECISION), ranks, described, show)
        alone = _fastest(compare({1: programs}, stages, ranks, memory, show))
        joined = compare({1: programs}, stages, count * ranks, memory, show)
        rows = [_row(f"one site, {STAGES[alone.stage].name}", alone, described)]
        for group in ([row for row in joined if row.stage == 0], [row for row in joined if row.stage]):
            rows += [_row(best.name, best, described) for best in [_fastest(group)] if group]
        if zeros := [row for row in joined if row.stage]:
            bytewise = replace(programs.asked, gather_format=INT8, reduce_format=INT8)
            other = replace(programs, asked=bytewise, scheduled={}, enough={})
            best = _fastest(compare({1: other}, (_fastest(zeros).stage,), count * ranks, memory, show))
            rows.append(_row(f"{best.name}, int8", best, described))
    plan = make_plan(subject.module, programs.policy(alone.stage, alone.recompute), MeshShape(1, ranks).at_rank_0())
    outer = replace(OUTER, sites=count)
    exchanges = exchanges_of(plan, outer, Link(rate, latency), described)
    buffers = [outer.buffers(plan, vectors, on_gpu=not described.is_measured) for vectors in outer.vectors_of(plan)]
    held = (1 + outer.states) * outer.rows(plan)
    in_exchange = alone.needed_bytes - alone.peak_bytes + alone.at_rest_bytes + max(buffers)
    needed = held + max(alone.needed_bytes, in_exchange)
    for every in EVERY:
        timed = exchanges.every(every)
        seconds = timed.mean_seconds(alone.seconds)
        rows.append(
            SitesRow(
                f"outer step, H = {every}",
                count * ranks,
                seconds,
                count * ranks * alone.tokens_per_second * alone.seconds / seconds,
                timed.sent_per_step,
                timed.hidden_from(alone.seconds),
                needed,
                needed <= memory,
            )
        )
    return SitesPlan(
        subject.name,
        count,
        ranks,
        described.name,
        between,
        subject.tokens,
        tuple(rows),
        is_bound=not described.is_measured,
    )


def _shape(sites: str) -> tuple[int, int]:
    match = re.fullmatch("([0-9]+)x([0-9]+)", sites)
    if not match or int(match[1]) < 2 or not int(match[2]):
        raise ValueError(f"sites is {sites!r}; give the number of sites and of ranks at each, such as '2x2'")
    return int(match[1]), int(match[2])


def _fastest(rows: Sequence[PlanRow]) -> PlanRow:
    """Return the best row that fits, or the row that needs the least memory."""
    return best_of(rows) or min(rows, key=lambda row: row.needed_bytes)


def _row(name: str, row: PlanRow, device: Device) -> SitesRow:
    """Return the row of ranks that train in one job, at one site or at all."""
    ranks, in_site = row.mesh.ranks, device.devices_per_node
    if ranks == in_site:
        sent = 0.0
    elif row.mesh.replicas > 1:  # a replica at each site
        sent = float(in_site * row.replica_bytes)
    else:
        sent = device.leaving(ranks, 1, row.sent_bytes)
    tokens = ranks * row.tokens_per_second
    return SitesRow(name, ranks, row.seconds, tokens, sent, None, row.needed_bytes, row.fits)
