"""A plan of training as text: a table, why a row is recommended, code to paste.

::

    stage    shards  recompute     needs  fits      sent  exposed    step  tokens/s    MFU
    ZeRO-2  128 x 8      cheap  70.9 GiB   yes  46.7 GiB  48.7 ms  668 ms    12,268  74.5%
    ZeRO-3  16 x 64      cheap  40.7 GiB   yes  57.4 GiB  21.8 ms  630 ms    13,010  79.0%  <- chosen
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from rich.console import Console

from thunder_zero.plan.amounts import duration, size
from thunder_zero.plan.policy import RECOMPUTE, STAGES, Policy
from thunder_zero.tools.forecast.figures import OF_BATCH, SHARDED
from thunder_zero.tools.planner.figures import PlanRow, TrainingPlan
from thunder_zero.tools.printing.text import table_of

COLUMNS = ("stage", "shards", "recompute", "needs", "fits", "sent", "exposed", "step", "tokens/s", "MFU", "")


def print_plan(plan: TrainingPlan, console: Console) -> None:
    """Print it."""
    console.print(_heading(plan), highlight=False, soft_wrap=True)
    rows = [(*_cells(row), "<- chosen" if row == plan.chosen else "") for row in plan.rows]
    console.print(table_of(COLUMNS, rows, left=("stage", "")))
    console.print(f"{plan.reason}.", highlight=False, markup=False)
    if plan.code:
        console.print(f"\n{plan.code}\n", highlight=False, markup=False, soft_wrap=True)
    for sentence in plan.assumed:
        console.print(f"- {sentence}", highlight=False, markup=False)


def _heading(plan: TrainingPlan) -> str:
    traced = max(row.traced_blocks for row in plan.rows)
    repeated = f"; {traced} of {plan.blocks} blocks traced" if traced < plan.blocks else ""
    return (
        f"{plan.model}: {plan.parameters / 1e9:.2f} B parameters on {plan.world_size:,} {plan.device} of "
        f"{size(plan.memory_bytes)}, {plan.devices_per_node} in a node; {plan.tokens:,} tokens of a rank a "
        f"step{repeated}"
    )


def _cells(row: PlanRow) -> tuple[str, ...]:
    return (
        STAGES[row.stage].name,
        str(row.mesh),
        row.recompute,
        size(row.needed_bytes),
        "yes" if row.fits else "no",
        size(row.sent_bytes),
        duration(row.exposed_seconds),
        duration(row.seconds),
        f"{row.tokens_per_second:,.0f}",
        f"{row.mfu:.1%}",
    )


AS_FAST = 0.995  # of the fastest: below that share of its tokens a second, nothing makes up for it
MUCH_SLOWER = 0.98


def reason_of(rows: Sequence[PlanRow], chosen: PlanRow | None, memory_bytes: int, batch: int) -> str:
    """One sentence; ``batch``: rows of a rank's inputs, 1 if the caller cannot choose them."""
    if chosen is None:
        return _nothing_fits(rows, memory_bytes, batch)
    fitting = [row for row in rows if row.fits]
    others = [text for text in (_too_large(rows, chosen, memory_bytes), _slower(fitting, chosen)) if text]
    because = f": {', and '.join(others)}" if others else ""
    return f"{chosen.name_with_ranks} is {_best(rows, fitting, chosen, size(memory_bytes))}{because}"


def _best(rows: Sequence[PlanRow], fitting: Sequence[PlanRow], chosen: PlanRow, memory: str) -> str:
    """What sets the row apart."""
    if len(rows) == 1:
        return f"the only one that was compared, and fits into {memory}"
    if len(fitting) == 1:
        return f"the only one that fits into {memory}"
    fastest = f"the fastest of {len(fitting)} that fit into {memory}"
    if chosen.tokens_per_second == max(row.tokens_per_second for row in fitting):
        return fastest
    return f"within {1 - AS_FAST:.1%} of {fastest}, and needs the least memory of those"


def _too_large(rows: Sequence[PlanRow], chosen: PlanRow, memory_bytes: int) -> str:
    """What a lower stage would take."""
    lower = [row for row in rows if not row.fits and row.stage < chosen.stage]
    if not lower:
        return ""
    least = min(lower, key=lambda row: row.needed_bytes)
    return f"{least.name} would take {size(least.needed_bytes)}"


def _slower(fitting: Sequence[PlanRow], chosen: PlanRow) -> str:
    """How much slower the next is, and the part of its step that grows most."""
    slower = [row for row in fitting if row.tokens_per_second < MUCH_SLOWER * chosen.tokens_per_second]
    if not slower:
        return ""
    one = max(slower, key=lambda row: row.tokens_per_second)
    less = 1 - one.tokens_per_second / chosen.tokens_per_second
    parts = {
        "{} more of communication are exposed": one.exposed_seconds - chosen.exposed_seconds,
        "it computes {} longer": one.compute_seconds - chosen.compute_seconds,
        "the loss takes {} longer": one.loss_seconds - chosen.loss_seconds,
        "the optimizer takes {} longer": one.optimizer_seconds - chosen.optimizer_seconds,
    }
    what = max(parts, key=parts.__getitem__)
    again = ""
    if RECOMPUTE.index(one.recompute) > RECOMPUTE.index(chosen.recompute):
        link = "as" if "computes" in what else "and"
        again = f", {link} it has to recompute={one.recompute!r} to fit"
    return f"{one.name} is {less:.0%} slower, where {what.format(duration(parts[what]))}{again}"


def _nothing_fits(rows: Sequence[PlanRow], memory_bytes: int, batch: int) -> str:
    """The least that was found, and which lever alone would help."""
    least = min(rows, key=lambda row: row.needed_bytes)
    over = least.needed_bytes - memory_bytes
    sharded = sum(least.by_kind.get(kind, 0) for kind in SHARDED) * STAGES[least.stage].sharded
    of_batch = sum(least.by_kind.get(kind, 0) for kind in OF_BATCH) * (least.peak_phase != "optimizer step")
    offers = []
    if sharded > over:  # of N times the ranks, each holds 1/N of it
        ranks = ceil(least.mesh.ranks * sharded / (sharded - over))
        offers.append(f"about {ranks:,} ranks would be needed, as they share {size(sharded)} of it")
    if of_batch * (batch - 1) // batch >= over:
        offers.append(f"half the batch saves about {size(of_batch // 2)}")
    return (
        f"nothing fits into {size(memory_bytes)}: the least, {least.name_with_ranks} with "
        f"recompute={least.recompute!r}, takes {size(least.needed_bytes)}, {size(over)} more; "
        f"{', '.join(offers) or 'neither more ranks nor a smaller batch alone would help'}"
    )


def code_of(row: PlanRow, policy: Policy, build: str) -> str:
    """Python to paste: imports, the policy, the module, the mesh, and the model's transform.

    Args:
        row: which stage on which mesh.
        policy: of the row.
        build: Python that makes ``module``: lines that import, and one that makes it.
    """
    *imports, made = build.splitlines()
    where, mesh = "", []
    if row.mesh.replicas > 1:
        shape = row.mesh.replicas, row.mesh.shards
        imports.append("from torch.distributed.device_mesh import init_device_mesh")
        mesh = [f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names=("replicate", "shard"))']
        where = ", mesh=mesh"
    precision = policy.mixed_precision
    lines = [
        "import torch",
        "import thunder_zero as tz  # before thunder",
        "import thunder",
        *imports,
        "",
        "policy = tz.Policy(",
        f"    stage={policy.stage},",
        f"    recompute={policy.recompute!r},",
        f"    mixed_precision=tz.MixedPrecision({precision.param_dtype}, reduce_dtype={precision.reduce_dtype}),",
        f"    bucket_bytes={policy.bucket_bytes:_},",
        f"    in_flight_bytes={policy.in_flight_bytes:_},",
        f"    prefetch={policy.prefetch},",
        ")",
        made,
        *mesh,
        f"model = thunder.jit(module, transforms=[tz.ZeroTransform(policy{where})])",
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)",
    ]
    return "\n".join(lines)
