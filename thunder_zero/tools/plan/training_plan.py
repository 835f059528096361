"""Holds a training plan: a table of stages and meshes, the recommended row, and code to paste.

::

    stage   shards recompute    needs     sent exposed   step tokens/s   MFU fits
    ZeRO-2 128 x 8     cheap 70.9 GiB 46.7 GiB 48.7 ms 668 ms   12,268 74.5% yes
    ZeRO-3 16 x 64     cheap 40.7 GiB 57.4 GiB 21.8 ms 630 ms   13,010 79.0% chosen

``128 x 8`` means 128 replicas, each sharded over the 8 devices of a node. With tensor parallelism, the table also has a
column ``tp``, and the column ``recompute`` is called ``again``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from math import ceil
from textwrap import wrap
from typing import Any

from thunder_zero.plan.amounts import duration, size, summed_up
from thunder_zero.plan.formats import FORMATS, Formats
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.policy import RECOMPUTE, STAGES, Policy, is_count
from thunder_zero.tools.forecast.figures import OF_BATCH, SHARDED
from thunder_zero.tools.printing.words import aligned
from thunder_zero.tools.time.estimate import REACHED

FACTOR = 8  # the ratio between the numbers of shards of successive meshes
NARROW = 80  # width of the text
RUNS = "torchtitan's Llama 3.1 8B on 8 H100, December 2024"  # docs/plan.md


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The sizes of a mesh. ``slices`` is the number of torch's tensor-parallel ranks."""

    replicas: int
    shards: int
    slices: int = 1

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.replicas * self.shards * self.slices

    def at_rank_0(self) -> Mesh:
        """Return the mesh as rank 0 sees it."""
        return Mesh.of(self.shards, replicas=self.replicas, slices=self.slices if self.slices > 1 else None)

    @property
    def data(self) -> str:
        """The data-parallel sizes as text, such as ``16 x 64``."""
        return str(self.shards) if self.replicas == 1 else f"{self.replicas} x {self.shards}"

    def __str__(self) -> str:
        return self.data if self.slices == 1 else f"{self.data}, tp {self.slices}"


def meshes(stage: int, world_size: int, devices_per_node: int, slices: int = 1) -> tuple[MeshShape, ...]:
    """Return the meshes to compare for a stage: sharding over one node, over 8, 64, ... nodes, and over all ranks.

    For DDP there is one mesh. Each mesh has ``slices`` tensor-parallel ranks inside a node.
    """
    if not is_count(world_size) or not world_size:
        raise ValueError(f"world_size is {world_size!r}; give the number of ranks, at least 1")
    if world_size > devices_per_node and world_size % devices_per_node:
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {devices_per_node} devices; give a multiple of "
            f"{devices_per_node}, or another number of devices per node"
        )
    if devices_per_node % slices or world_size % slices:
        raise ValueError(
            f"{slices} ranks of tensor parallelism do not divide {world_size} ranks in nodes of {devices_per_node} "
            f"devices; give numbers that do"
        )
    data = world_size // slices
    whole = (MeshShape(1, data, slices),)
    if not STAGES[stage].sharded or world_size <= devices_per_node:
        return whole
    hybrid = []
    shards = devices_per_node // slices if slices < devices_per_node else FACTOR
    while shards < data:
        if data % shards == 0:
            hybrid.append(MeshShape(data // shards, shards, slices))
        shards *= FACTOR
    return (*hybrid, *whole)


@dataclass(frozen=True, repr=False)
class PlanRow:
    """A stage on a mesh, with the lowest recompute level that fits. Bytes and seconds refer to the busiest rank."""

    stage: int  # the stage, 0 to 3
    mesh: MeshShape  # the sizes of the mesh
    recompute: str  # the value of ``Policy.recompute``
    fits: bool  # True if ``needed_bytes`` fit into the memory of a rank
    needed_bytes: int  # memory at the peak, including overhead that belongs to no tensor
    peak_bytes: int  # bytes of tensors at the peak, which may be in the optimizer's step
    at_rest_bytes: int  # bytes of tensors between two steps
    peak_phase: str  # "forward", "loss", "backward" or "optimizer step"
    # a mapping from kinds to bytes of tensors that are alive behind the line of the peak of forward, loss and backward
    by_kind: Mapping[str, int] = field(hash=False)
    busiest_bytes: int  # bytes that the busiest rank sends in a step
    compute_seconds: float  # time of compute in forward and backward
    exposed_seconds: float  # time that compute waits for communication
    tensor_exposed_seconds: float  # the part of ``exposed_seconds`` that waits for tensor parallelism
    loss_seconds: float  # time of the loss and its gradient
    optimizer_seconds: float  # time of AdamW's step
    seconds: float  # time of the step: compute, exposed communication, loss and optimizer
    # tokens of a rank's batch, divided by the seconds of a step and by the tensor-parallel ranks
    tokens_per_second: float
    mfu: float  # Model FLOPs utilization: time of the model's FLOPs at the device's peak, divided by the step's time
    traced_blocks: int  # number of traced blocks, which represent all blocks
    replica_bytes: int = 0  # the part of ``busiest_bytes`` that a rank sends to other replicas

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return summed_up(self, f"{self.name_with_ranks}: {size(self.needed_bytes)}, {fits}; {duration(self.seconds)}")

    @property
    def name(self) -> str:
        """The stage and the mesh, such as ``ZeRO-3 on 128 x 8``."""
        return f"{STAGES[self.stage].name} on {self.mesh}"

    @property
    def name_with_ranks(self) -> str:
        """The stage and the mesh, followed by the word "ranks", such as ``ZeRO-3 on 128 x 8 ranks``."""
        slices = f" of data, each of {self.mesh.slices} in slices (tp)" if self.mesh.slices > 1 else ""
        return f"{STAGES[self.stage].name} on {self.mesh.data} rank{'s' if self.mesh.ranks > 1 else ''}{slices}"


@dataclass(frozen=True, repr=False)
class TrainingPlan:
    """A recommended stage and mesh for a training run, with the table that supports the choice."""

    model: str  # name of the model
    parameters: int  # number of elements of all parameters
    blocks: int  # number of identical blocks
    world_size: int  # number of ranks
    device: str  # name of the device
    devices_per_node: int
    memory_bytes: int  # memory of a rank
    # tokens of a data-parallel rank in a step. For a global batch, this is the number with the first ``tp``.
    tokens: int
    global_tokens: int | None  # tokens of all ranks in a step, or None if there is no global batch
    rows: tuple[PlanRow, ...]  # stages and meshes, in the order of the table
    chosen: PlanRow | None  # the recommended row; None if no row fits
    reason: str  # the reason for the recommendation, in one sentence
    code: str  # Python code to paste; "" if no row fits
    assumed: tuple[str, ...]  # the assumptions behind the figures, as sentences
    is_bound: bool  # True if times are lower bounds, because the device was not measured

    @property
    def expected_tokens_per_second(self) -> tuple[float, float] | None:
        """The range of tokens/s to expect from a rank in the chosen row, based on published runs.

        None if times are not bounds, or if no row fits.
        """
        if self.chosen is None or not self.is_bound:
            return None
        return REACHED[0] * self.chosen.tokens_per_second, REACHED[1] * self.chosen.tokens_per_second

    def as_json(self) -> dict[str, Any]:
        """Return the plan as data that JSON can hold."""
        return asdict(self)

    def __repr__(self) -> str:
        chosen = f"{self.chosen.name_with_ranks} of {len(self.rows)} rows" if self.chosen else "nothing fits"
        return summed_up(self, f"{self.model} on {self.world_size:,} {self.device}: {chosen}")

    def __str__(self) -> str:
        """Return the table, the reason, code to paste and the assumptions, in 80 columns."""
        return "\n".join(_text(self))

    def table(self) -> str:
        """Return the table, with a line for each row, in 80 columns."""
        has_slices = any(row.mesh.slices > 1 for row in self.rows)
        recompute = ("tp", "again") if has_slices else ("recompute",)
        columns = ("stage", "shards", *recompute, "needs", "sent", "exposed", "step", "tokens/s", "MFU", "fits")
        rows = [self._cells(row, has_slices) for row in self.rows]
        return aligned([columns, *rows], left=(0, len(columns) - 1), apart=1)

    def _cells(self, row: PlanRow, has_slices: bool) -> tuple[str, ...]:
        return (
            STAGES[row.stage].name,
            row.mesh.data,
            *[str(row.mesh.slices)] * has_slices,
            row.recompute,
            size(row.needed_bytes),
            size(row.busiest_bytes),
            duration(row.exposed_seconds),
            duration(row.seconds),
            f"{row.tokens_per_second:,.0f}",
            f"{row.mfu:.1%}",
            "chosen" if row == self.chosen else "yes" if row.fits else "no",
        )


def _text(plan: TrainingPlan) -> Iterator[str]:
    traced, tokens, whose = max(row.traced_blocks for row in plan.rows), plan.tokens, "a rank"
    if plan.global_tokens is not None:
        tokens, whose = plan.global_tokens, "all ranks"
    heading = (
        f"{plan.model}: {plan.parameters / 1e9:.2f} B parameters on {plan.world_size:,} {plan.device} of "
        f"{size(plan.memory_bytes)}, {plan.devices_per_node} in a node; {tokens:,} tokens of {whose} a step"
    )
    repeated = f"; {traced} of {plan.blocks} blocks traced" if traced < plan.blocks else ""
    yield from wrap(f"{heading}{repeated}", NARROW)
    yield plan.table()
    yield from wrap(f"{plan.reason}.", NARROW)
    if (expected := plan.expected_tokens_per_second) and plan.chosen:
        fewest, most = (f"{tokens:,.0f}" for tokens in expected)
        mfu = " to ".join(f"{share * plan.chosen.mfu:.0%}" for share in REACHED)
        expectation = f"Expect {fewest} to {most} tokens/s, MFU {mfu}: what {RUNS}, reached of such a bound."
        yield from wrap(f"These are bounds. {expectation}", NARROW)
    yield f"\n{plan.code}\n" if plan.code else ""
    for sentence in plan.assumed:
        yield from wrap(f"- {sentence}", NARROW, subsequent_indent="  ")


AS_FAST = 0.995  # a row with this share of the fastest row's tokens/s counts as equally fast
MUCH_SLOWER = 0.98  # a reason names rows below this share of the chosen row's tokens/s


def reason_of(rows: Sequence[PlanRow], chosen: PlanRow | None, memory_bytes: int, batch: int) -> str:
    """Return a sentence with the reason for a recommendation, or the reason why no row fits.

    ``batch`` is the number of rows of a rank's inputs, or 1 if the caller cannot choose the number.
    """
    if chosen is None:
        return _nothing_fits(rows, memory_bytes, batch)
    fitting = [row for row in rows if row.fits]
    lower, comparisons = [row for row in rows if not row.fits and row.stage < chosen.stage], list[str]()
    if lower:
        least = min(lower, key=lambda row: row.needed_bytes)
        comparisons.append(f"{least.name} would take {size(least.needed_bytes)}")
    if slower := [row for row in fitting if row.tokens_per_second < MUCH_SLOWER * chosen.tokens_per_second]:
        comparisons.append(_slower(max(slower, key=lambda row: row.tokens_per_second), chosen))
    because = f": {', and '.join(comparisons)}" if comparisons else ""
    return f"{chosen.name_with_ranks} is {_best(rows, fitting, chosen, size(memory_bytes))}{because}"


def _best(rows: Sequence[PlanRow], fitting: Sequence[PlanRow], chosen: PlanRow, memory: str) -> str:
    if len(rows) == 1:
        return f"the only one that was compared, and fits into {memory}"
    if len(fitting) == 1:
        return f"the only one that fits into {memory}"
    fastest = f"the fastest of {len(fitting)} that fit into {memory}"
    if chosen.tokens_per_second == max(row.tokens_per_second for row in fitting):
        return fastest
    return f"within {1 - AS_FAST:.1%} of {fastest}, and needs the least memory of those"


def _slower(next_row: PlanRow, chosen: PlanRow) -> str:
    """Describe how much slower a row is than the chosen row, and why."""
    less = 1 - next_row.tokens_per_second / chosen.tokens_per_second
    parts = {
        "{} more of communication are exposed": next_row.exposed_seconds - chosen.exposed_seconds,
        "it computes {} longer": next_row.compute_seconds - chosen.compute_seconds,
        "the loss takes {} longer": next_row.loss_seconds - chosen.loss_seconds,
        "the optimizer takes {} longer": next_row.optimizer_seconds - chosen.optimizer_seconds,
    }
    largest = max(parts, key=parts.__getitem__)
    text = f"{next_row.name} is {less:.0%} slower, where {largest.format(duration(parts[largest]))}"
    if RECOMPUTE.index(next_row.recompute) > RECOMPUTE.index(chosen.recompute):
        conjunction = "as" if "computes" in largest else "and"
        text += f", {conjunction} it has to recompute={next_row.recompute!r} to fit"
    return text


def _nothing_fits(rows: Sequence[PlanRow], memory_bytes: int, batch: int) -> str:
    least = min(rows, key=lambda row: row.needed_bytes)
    missing = least.needed_bytes - memory_bytes
    sharded_bytes = sum(least.by_kind.get(kind, 0) for kind in SHARDED) * STAGES[least.stage].sharded
    batch_bytes = sum(least.by_kind.get(kind, 0) for kind in OF_BATCH) * (least.peak_phase != "optimizer step")
    offers = []
    if sharded_bytes > missing:  # on N times as many ranks, a rank holds 1/N of the sharded bytes
        ranks = ceil(least.mesh.ranks * sharded_bytes / (sharded_bytes - missing))
        offers.append(f"about {ranks:,} ranks would be needed, as they share {size(sharded_bytes)} of it")
    if batch_bytes * (batch - 1) // batch >= missing:
        offers.append(f"half the batch saves about {size(batch_bytes // 2)}")
    return (
        f"nothing fits into {size(memory_bytes)}: the least, {least.name_with_ranks} with "
        f"recompute={least.recompute!r}, takes {size(least.needed_bytes)}, {size(missing)} more; "
        f"{', '.join(offers) or 'neither more ranks nor a smaller batch alone would help'}"
    )


def _format(asked: Formats) -> str:
    """Return a format as Python code, or "" for no format. The code of a user-defined encoding has no prefix."""
    if isinstance(asked, Mapping):
        return "{" + ", ".join(f"{pattern!r}: {_format(form) or None}" for pattern, form in asked.items()) + "}"
    prefix = "tz." if type(asked).__module__.startswith("thunder_zero.") else ""
    return f"{prefix}{asked!r}" if asked else ""


START = {
    "cuda": ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', 'torch.distributed.init_process_group("nccl")'),
    "cpu": ('torch.distributed.init_process_group("gloo")',),
}
CODE = """
policy = tz.Policy(
    stage={policy.stage},
    recompute={policy.recompute!r},
    mixed_precision=tz.MixedPrecision(
        {policy.mixed_precision.param_dtype}, reduce_dtype={policy.mixed_precision.reduce_dtype}
    ),
{formats}    bucket_bytes={policy.bucket_bytes:_},
    in_flight_bytes={policy.in_flight_bytes:_},
    prefetch={policy.prefetch},
)
with torch.device("meta"):  # without values
    {build}
{mesh}torch.manual_seed(0)  # every rank draws the same values, and keeps its rows
# reset_parameters draws them; or pass init=function, or weights=folder
model = tz.compile(module, policy{argument})
optimizer = torch.optim.AdamW(model.parameters(), fused=True)"""


def code_of(row: PlanRow, policy: Policy, build: str, slicing: str = "", device: str = "cuda") -> str:
    """Return Python code to paste: imports, the process group, the policy, the module, the mesh, and the model.

    ``build`` is a line of code that makes ``module``, which the code runs on the meta device. ``slicing`` is code that
    slices the module over ``mesh["tp"]``. ``device`` is "cuda" or "cpu".
    """
    imports = [*(["import os", ""] if device == "cuda" else []), "import torch", "import thunder_zero as tz"]
    (replicas, shards, slices), argument, mesh = astuple(row.mesh), "", list[str]()
    axes = {"replicate": replicas, "shard": shards}
    if slices > 1:
        axes = {"dp_replicate": replicas, "dp_shard": shards} if replicas > 1 else {"dp": shards}
        axes["tp"] = slices
    if replicas > 1 or slices > 1:
        imports.append("from torch.distributed.device_mesh import init_device_mesh")
        dims = ", ".join(f'"{axis}"' for axis in axes)
        mesh = ["mesh = init_device_mesh(", f'    "{device}", {(*axes.values(),)}, mesh_dim_names=({dims})', ")"]
        argument = ", mesh=mesh"
    if slices > 1:
        if "parallelize_module" in slicing:
            imports.append("from torch.distributed.tensor.parallel import parallelize_module")
        mesh += slicing.splitlines()
    formats = [f"    {name}={form},\n" for name in FORMATS if (form := _format(getattr(policy, name)))]
    lines, mesh_lines = [*imports, "", *START[device]], [f"{line}\n" for line in mesh]
    rest = {"formats": "".join(formats), "build": build, "mesh": "".join(mesh_lines), "argument": argument}
    return "\n".join(lines) + CODE.format(policy=policy, **rest)
