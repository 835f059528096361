"""``tz.tools.fit``: finds the cheapest policy whose step fits into memory.

The module is captured once. Each candidate is a schedule of the same lines, whose memory is a fold over their records.
The printed table has memory, work and costs::

        peak      sent  done again  units kept  again  in flight  cost
     100 MiB  50.0 MiB   1.5 GFLOP           1      2   4.00 MiB  1.50  ████████████████
     120 MiB  40.0 MiB                       3      0   4.00 MiB  1.00  █ <- chosen
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

from torch import nn

from thunder_zero.capture.arguments import Fuser
from thunder_zero.comm.agree import on_rank_0
from thunder_zero.comm.group import has_groups, process_group
from thunder_zero.plan.amounts import bytes_of, size
from thunder_zero.plan.policy import ZERO3, Policy
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.dry_run import ProgramSource, planned_mesh, require_plain
from thunder_zero.tools.forecast.figures import OF_BATCH, SHARDED, Memory
from thunder_zero.tools.forecast.for_loss import Loss
from thunder_zero.tools.forecast.memory import memory_of, recorder_of
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.plan.search import FLOPS_PER_BYTE, Candidate, Search
from thunder_zero.tools.printing.progress import show_status
from thunder_zero.tools.printing.words import aligned, count

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims

STEPS = 7  # the most rows of the printed table
COLUMNS = ("peak", "sent", "done again", "units kept", "again", "in flight", "cost", "")
BAR = 16  # columns of the longest bar
CHOSEN = ("reshard_after_forward", "keep_unsharded", "recompute_units", "bucket_bytes", "in_flight_bytes")


class DoesNotFit(ValueError):
    """Raised if no policy fits. The message has the missing bytes, the contents of the peak, and possible remedies."""

    def __init__(self, message: str, least_bytes: int = 0) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes  # the smallest peak that was found


def fit(
    module: nn.Module,
    *args: Any,
    memory_bytes: int | str,
    world_size: int | None = None,
    policy: Policy | int = ZERO3,
    file: IO[str] | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    backend: str | None = None,
    fuse: Fuser | None = None,
    replicas: int = 1,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    reserve: int = 0,
    flops_per_byte: float = FLOPS_PER_BYTE,
    **kwargs: Any,
) -> Policy:
    """Return the cheapest policy whose forecast peak fits into ``memory_bytes``.

    The search chooses ``Policy.keep_unsharded`` (alone, or with the last units, which ``reshard_after_forward=None``
    adds), ``Policy.recompute_units``, and the bytes of buckets and in flight. The cost is the bytes that a rank sends,
    plus 128 KiB for each launch, and a byte for ``flops_per_byte`` FLOPs of recomputed work. The printed table has the
    costs for other amounts of memory. Under ``torchrun`` every rank calls this function, and rank 0 decides.

    >>> policy = tz.tools.fit(module, tokens, memory_bytes="24GiB", world_size=8, optimizer=torch.optim.AdamW)

    Args:
        module: a plain module, possibly on the meta device.
        memory_bytes: memory of a rank, such as ``"24GiB"``. The optimizer's step must fit as well.
        policy: a policy with the values of all other fields, such as the stage (default: ZeRO-3). ``recompute="units"``
            becomes ``"cheap"``.
        loss, optimizer, backend, reserve: as for :func:`thunder_zero.tools.memory`; the others as for ``tz.trace``.
        flops_per_byte: FLOPs that cost as much as a byte on the wire (default: about an H100's ratio with NVLink).

    Raises:
        DoesNotFit: no policy fits.
    """
    require_plain("fit", module)
    if not isinstance(flops_per_byte, int | float) or isinstance(flops_per_byte, bool) or not flops_per_byte > 0:
        raise ValueError(f"flops_per_byte is {flops_per_byte!r}; give a number above 0, such as 1000.0")
    most = bytes_of("memory_bytes", memory_bytes)
    asked = policy if isinstance(policy, Policy) else Policy(policy)
    # the search chooses recompute_units
    searched = replace(asked, recompute="cheap") if asked.recompute == "units" else asked
    if mesh is None and dp_mesh_dims is None and world_size is None:
        if not has_groups():
            raise ValueError("world_size is None, and there is no process group; give the number of ranks")
        world_size = process_group(None).size()
    planned, slices, partial = planned_mesh(module, world_size, 0, replicas, mesh, dp_mesh_dims)

    def decide(go_on: Callable[[], None]) -> dict[str, Any]:
        with show_status("tz.tools.fit") as show:

            def tell(what: str) -> None:
                show(what)
                go_on()  # keeps the waiting ranks from timing out

            tell("captures the module")
            source = ProgramSource(module, args, kwargs, asked, planned, fuse=fuse, slices=slices, partial=partial)
            traces = source.under(asked)
            if traces.backward is None:
                raise ValueError("no gradient is needed, so there is no step to fit; call it outside torch.no_grad()")
            recorder = recorder_of(traces, loss, optimizer, backend, reserve=reserve)
            missing = traces.lifted.tangents - recorder.traces.timeline.tangents

            def schedule(policy: Policy) -> Timeline:
                tell(f"evaluates schedule {len(search.evaluated) + 1}")
                return source.schedule(policy, missing=missing).timeline

            search = Search(recorder, searched, schedule, flops_per_byte, reserve)
            best = _searched(search, most)
        print(trade_off(_shown(search, best), best), file=file)
        return {name: getattr(best.policy, name) for name in CHOSEN}  # functions in a policy cannot be sent

    return replace(searched, **on_rank_0("tz.tools.fit", decide))


def _searched(search: Search, memory_bytes: int) -> Candidate:
    """Return the cheapest candidate that fits. Raise if none fits."""
    recorder = search.recorder
    as_asked = memory_of(recorder, search.reserve)
    if (as_asked.optimizer_step or 0) <= memory_bytes:
        if best := search.best(memory_bytes):
            return best
        if (least := search.least()).peak <= memory_bytes:
            return least
    plan, step = recorder.plan, as_asked.optimizer_step or 0
    requested = replace(search.asked, recompute_units=tuple(unit for unit in plan.units if unit in plan.recomputed))
    cheap = search.candidate(replace(requested, recompute="cheap")).peak
    least = min(search.least(), search.candidate(requested), key=lambda candidate: candidate.peak)
    message = refusal(as_asked, least, as_asked.peak - cheap, memory_bytes)
    raise DoesNotFit(message, max(least.peak, step))


def _shown(search: Search, best: Candidate) -> list[Candidate]:
    """Return evaluated candidates from the least memory to the least cost, including the best."""
    cheapest_first = sorted(search.evaluated.values(), key=lambda candidate: (candidate.cost, candidate.peak))
    most, least = cheapest_first[0].peak, min(candidate.peak for candidate in cheapest_first)
    targets = (least + (most - least) * step // (STEPS - 1) for step in range(STEPS))
    rows = [next(candidate for candidate in cheapest_first if candidate.peak <= target) for target in targets]
    by_policy = {candidate.policy: candidate for candidate in (*rows, best)}
    return sorted(by_policy.values(), key=lambda candidate: candidate.peak)


def trade_off(rows: Sequence[Candidate], chosen: Candidate) -> str:
    """Return a table of the candidates. Bars show the costs. Rows with equal figures are printed once."""
    costs = [candidate.cost for candidate in rows]
    least, spread = min(costs), max(costs) - min(costs)
    printed: dict[tuple[str, ...], str] = {}
    for candidate in rows:
        plan, again = candidate.timeline.plan, candidate.flops
        flops = f"{count(again)}FLOP" if again >= 1000 else f"{again} FLOP" if again else ""
        counts = str(len(candidate.kept)), str(len(plan.recomputed)), size(plan.sizes.in_flight_bytes)
        cost = f"{candidate.cost / (least or 1):.2f}"
        figures = size(candidate.peak), size(candidate.sent), flops, *counts, cost
        if candidate is chosen or figures not in printed:
            bar = "█" * max(round(BAR * (candidate.cost - least) / (spread or 1)), 1)
            printed[figures] = bar + " <- chosen" * (candidate is chosen)
    cells = [(*figures, end) for figures, end in printed.items()]
    return aligned([COLUMNS, *cells], left=(len(COLUMNS) - 1,))


def refusal(as_asked: Memory, least: Candidate, by_cheap: int, memory_bytes: int) -> str:
    """Return a sentence with the missing bytes, the contents of the peak, and possible remedies.

    ``by_cheap`` is what the requested policy saves with ``recompute="cheap"``.
    """
    nbytes = max(least.peak, as_asked.optimizer_step or 0)
    step_text = " (in the optimizer's step)" if nbytes == as_asked.optimizer_step else ""
    at_peak, policy, plan = as_asked.by_kind, as_asked.plan.policy, least.timeline.plan
    kinds = ", ".join(f"{size(nbytes)} of {kind}" for kind, nbytes in list(at_peak.items())[:3])
    sharded, batch = (sum(at_peak.get(kind, 0) for kind in kinds) for kinds in (SHARDED, OF_BATCH))
    remedies = {
        "twice the ranks": sharded // 2,
        "half the batch": batch // 2,
        "cpu_offload on GPUs": 0 if policy.cpu_offload or as_asked.plan.mesh.is_sliced else sharded,
        'recompute="cheap"': max(by_cheap, 0) if policy.recompute == "none" else 0,
    }
    offers = ", ".join(f"{remedy} (about {size(nbytes)} less)" for remedy, nbytes in remedies.items() if nbytes)
    units = len(plan.recomputed)
    again = f"{units or 'no'} unit{'s' * (units > 1)} computed again and " if least.units else ""
    return (
        f"no policy fits into {size(memory_bytes)}: the least that was found takes {size(nbytes)}{step_text}, "
        f"{size(nbytes - memory_bytes)} more, with {again}{size(plan.sizes.in_flight_bytes)} in flight; "
        f"the peak as asked for, {size(as_asked.peak)}, has {kinds}; what would help: {offers}"
    )
