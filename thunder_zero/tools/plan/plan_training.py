"""``tz.tools.plan_training``: compares stages and meshes, and recommends one.

In: a model, a number of ranks and a device. Out: a table, a recommendation and code. For each stage, a few blocks of
the model are compiled, and their figures are extended to all blocks. A row has a mesh, a recompute level and figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from thunder_zero.plan.amounts import bytes_of, name_of
from thunder_zero.plan.formats import Formats
from thunder_zero.plan.policy import RECOMPUTE, STAGES, Policy, is_count
from thunder_zero.plan.precision import MixedPrecision
from thunder_zero.tools.devices.device import Device, Lane, device_of
from thunder_zero.tools.models import NamedModel
from thunder_zero.tools.plan.subject import Slicing, Subject, SubjectPrograms, subject_of
from thunder_zero.tools.plan.training_plan import AS_FAST, MeshShape, PlanRow, TrainingPlan, code_of, meshes, reason_of
from thunder_zero.tools.printing.progress import show_steps

PRECISION = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
MiB, GiB = 1 << 20, 1 << 30

# CUDA's context, the code of kernels and the workspaces of cuBLAS took 723 MiB with the first tensor
# (https://discuss.pytorch.org/t/73021, 2020), here rounded up.
CONTEXT = GiB
# An NCCL communicator has 32 channels and 2 directions. Each channel and direction has buffers for the protocols simple
# (4 MiB), LL (512 KiB) and LL128 (about 4.7 MiB; DEFAULT_BUFFSIZE and others in
# https://github.com/NVIDIA/nccl/blob/master/src/init.cc).
COMMUNICATOR = 32 * 2 * int(9.2 * MiB)
# Torch's allocator has a segment of small blocks and one of large blocks that are not full. It rounds each block up to
# a multiple of BLOCK (https://github.com/pytorch/pytorch/blob/main/c10/core/AllocatorConfig.h: kSmallBuffer,
# kLargeBuffer, kMinBlockSize).
SEGMENTS = 2 * MiB + 20 * MiB
BLOCK = 512
OVERHEAD = (
    f"overhead that is no tensor: {CONTEXT >> 20:,} MiB for CUDA's context, {COMMUNICATOR >> 20} MiB for each NCCL "
    f"communicator (1; 3 with copies), {SEGMENTS >> 20} MiB for segments of the allocator that are not full, and "
    f"{BLOCK} B for each tensor; fragments are not counted"
)
# On two gloo ranks, a process took 409 MiB after three steps of a model of 130 kB (torch 2.13.0), here rounded up.
PROCESS = 512 * MiB
OVERHEAD_OF_CPU = (
    f"overhead that is no tensor: {PROCESS >> 20} MiB for the process with Python, torch and Thunder; fragments are "
    f"not counted"
)


def plan_training(
    model: nn.Module | NamedModel | str,
    *args: Any,
    world_size: int,
    device: Device | str = "h100",
    memory_bytes: int | str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    devices_per_node: int | None = None,
    sequence_length: int | None = None,
    micro_batch: int = 1,
    global_batch: int | None = None,
    precision: MixedPrecision = PRECISION,
    gather_format: Formats = None,
    reduce_format: Formats = None,
    frozen_format: Formats = None,
    stages: Sequence[int] = tuple(range(len(STAGES))),
    tp: int | Sequence[int] = 1,
    tp_plan: Slicing | None = None,
    **kwargs: Any,
) -> TrainingPlan:
    """Compare stages and meshes for a model before anything runs: memory, bytes sent, time of a step.

    A few of the model's identical blocks are traced, and their figures are extended to all blocks. No tensor of the
    model is allocated. The optimizer is AdamW.

    >>> print(tz.tools.plan_training("llama3-8b", world_size=1024, device="h100", memory_bytes="80GiB"))
    >>> tz.tools.plan_training(module, tokens, world_size=16).chosen

    Args:
        model: a key of ``tz.tools.MODELS``, a ``tz.tools.NamedModel``, a plain module (also on the meta device), or
            ``FILE.py:function``, which returns ``(module, input, ...)`` or ``(module, (input, ...), {name: input})``.
        args, kwargs: the arguments of a module's forward, for one rank's share of a batch.
        loss: a function from a module's outputs to the loss (default: forward returns the loss).
        sequence_length: tokens of a sequence, for a named model (default: the model's).
        micro_batch: sequences of a rank in a step, for a named model. Twice the ``tp`` halves the batch of all ranks.
        global_batch: sequences of all ranks in a step, in place of ``micro_batch``, equal for every ``tp``.
        precision: dtypes of compute and of reduced gradients (default: bfloat16, float32). Parameters and the
            optimizer's state keep their dtypes.
        gather_format, reduce_format: as in :class:`thunder_zero.Policy`, for stages 1 to 3 (default: None).
        frozen_format: as in :class:`thunder_zero.Policy`, for stages 2 and 3 (default: None).
        tp: number of tensor-parallel ranks inside a node, or several numbers to compare, such as ``(1, 2, 4, 8)``.
        tp_plan: styles keyed by name, as for ``parallelize_module``, or a function that slices a meta copy of the
            module over a mesh (default: a named model's own plan).

    Raises:
        ValueError: also if no parameter is trained, ranks do not fill nodes, ``tp`` does not divide the devices of a
            node, or ``global_batch`` is not a multiple of the data-parallel ranks.
        RuntimeError: ``tp`` is more than 1 and there is a process group.
    """
    stages = known_stages(stages)
    described = device_of(device)
    if devices_per_node is not None:
        described = replace(described, devices_per_node=devices_per_node)
    if memory_bytes is not None:
        described = replace(described, memory_bytes=bytes_of("memory_bytes", memory_bytes))
    sizes = known_slices(tp)
    count = sum(len(meshes(stage, world_size, described.devices_per_node, size)) for stage in stages for size in sizes)
    batches = _batches(micro_batch, global_batch, world_size, sizes)
    of_batch = cache(partial(subject_of, model, args, kwargs, loss=loss, length=sequence_length))
    subjects = {size: of_batch(micro_batch=batch) for size, batch in batches.items()}
    subject = subjects[sizes[0]]
    slicing = subject.tp_plan if tp_plan is None else tp_plan
    if max(sizes) > 1 and slicing is None:
        raise ValueError(f"tp is {tp!r}, and nothing says how to slice {subject.name}; give tp_plan=")
    asked = Policy(2, mixed_precision=precision, gather_format=gather_format, reduce_format=reduce_format)
    asked = replace(asked, frozen_format=frozen_format)
    with show_steps("tz.tools.plan_training", count) as show:
        programs = programs_of(subjects, asked, described, world_size, show, slicing or {})
        rows = compare(programs, stages, world_size)
    chosen = best_of(rows)
    returns_loss = programs[sizes[0]].returns_loss()
    return TrainingPlan(
        model=subject.name,
        parameters=sum(param.numel() for param in subject.module.parameters()),
        blocks=subject.blocks,
        world_size=world_size,
        device=described.name,
        devices_per_node=described.devices_per_node,
        memory_bytes=described.memory_bytes,
        tokens=subject.tokens,
        global_tokens=None if global_batch is None else subject.tokens * (world_size // sizes[0]),
        rows=rows,
        chosen=chosen,
        reason=reason_of(rows, chosen, described.memory_bytes, subject.batch),
        code="" if chosen is None else _code(chosen, programs[chosen.mesh.slices], _slicing_code(model, tp_plan)),
        assumed=(*assumed(subject, asked, described, returns_loss=returns_loss), *[OF_SLICES] * (max(sizes) > 1)),
        is_bound=not described.is_measured,
    )


def programs_of(
    subjects: Mapping[int, Subject],
    asked: Policy,
    device: Device,
    world_size: int,
    show: Callable[..., None],
    slicing: Slicing,
) -> dict[int, SubjectPrograms]:
    """Return the programs of subjects, both keyed by the number of tensor-parallel ranks."""
    shards = {size: meshes(3, world_size, device.devices_per_node, size)[0].shards for size in subjects}
    return {
        size: SubjectPrograms(subject, asked, shards[size], device, show, size, slicing)
        for size, subject in subjects.items()
    }


def known_stages(stages: Sequence[int]) -> tuple[int, ...]:
    is_some = isinstance(stages, Sequence) and bool(stages)
    if not is_some or any(not is_count(stage) or stage not in range(len(STAGES)) for stage in stages):
        raise ValueError(f"stages is {stages!r}; give some of 0, 1, 2 and 3, such as (2, 3)")
    return tuple(dict.fromkeys(stages))


def known_slices(tp: int | Sequence[int]) -> tuple[int, ...]:
    sizes = tp if isinstance(tp, Sequence) else (tp,)
    if not sizes or any(not is_count(size) or not size for size in sizes):
        raise ValueError(f"tp is {tp!r}; give a number of ranks, at least 1, or several")
    return tuple(dict.fromkeys(sizes))


def _code(chosen: PlanRow, programs: SubjectPrograms, slicing: str) -> str:
    policy, kind = programs.policy(chosen.stage, chosen.recompute), "cpu" if programs.device.is_measured else "cuda"
    return code_of(chosen, policy, programs.subject.build, slicing, kind)


def _slicing_code(model: nn.Module | NamedModel | str, tp_plan: Slicing | None) -> str:
    if tp_plan is None and isinstance(model, str):
        return OWN_SLICES.format(model)
    return FUNCTION_SLICES if callable(tp_plan) else SLICES


def _batches(micro_batch: int, global_batch: int | None, world_size: int, sizes: Sequence[int]) -> dict[int, int]:
    """Return a mapping from numbers of tensor-parallel ranks to the sequences of a data-parallel rank."""
    if global_batch is None:
        return dict.fromkeys(sizes, micro_batch)
    if micro_batch != 1:
        raise ValueError("micro_batch and global_batch are given; leave one out")
    if not is_count(global_batch) or not global_batch:
        raise ValueError(f"global_batch is {global_batch!r}; give a number of sequences, at least 1")
    if wrong := [size for size in sizes if global_batch % (world_size // size)]:
        allowed = [size for size in sizes if size not in wrong]
        raise ValueError(
            f"global_batch is {global_batch:,}, which the {world_size // wrong[0]:,} ranks of data at tp={wrong[0]} do "
            f"not divide; {f'give tp={allowed}' if allowed else 'give more ranks of tp'}, or another batch"
        )
    return {size: global_batch * size // world_size for size in sizes}


def compare(programs: Mapping[int, SubjectPrograms], stages: Sequence[int], world_size: int) -> tuple[PlanRow, ...]:
    """Return a row for each mesh of each stage, with the first recompute level that fits, or the last level.

    ``programs`` are keyed by the number of tensor-parallel ranks.
    """
    by_stage: dict[tuple[int, int], list[PlanRow]] = {}
    for size, compared in programs.items():
        levels: Sequence[str] = RECOMPUTE
        for stage in sorted(stages, reverse=True):
            rows, possible = [], levels
            # From most shards to fewest: a level that does not fit on a mesh does not fit on one of fewer shards. One
            # that does not fit on all ranks in a stage does not fit in a lower stage.
            for mesh in reversed(meshes(stage, world_size, compared.device.devices_per_node, size)):
                tried = (evaluate_row(compared, stage, mesh, level) for level in possible)
                rows.append(next(row for row in tried if row.fits or row.recompute == possible[-1]))
                possible = possible[possible.index(rows[-1].recompute) :]
                compared.tell(ended=1)
            levels = levels[levels.index(rows[0].recompute) :]
            by_stage[stage, size] = rows[::-1]
    return tuple(row for stage in stages for size in programs for row in by_stage[stage, size])


def evaluate_row(programs: SubjectPrograms, stage: int, mesh: MeshShape, recompute: str) -> PlanRow:
    """Return the row of a stage on a mesh with a recompute level, whether it fits or not."""
    step, traced = programs.evaluate(programs.policy(stage, recompute), mesh)
    overhead = overhead_bytes(programs.device, mesh, step.storages)
    peak = max(step.peak, step.optimizer_step)
    programs.tell(f"simulates a step of {STAGES[stage].name} on {mesh}")
    estimate = step.estimate
    seconds = estimate.seconds + step.loss_seconds + step.optimizer_seconds
    return PlanRow(
        stage=stage,
        mesh=mesh,
        recompute=recompute,
        fits=peak + overhead <= programs.device.memory_bytes,
        needed_bytes=peak + overhead,
        peak_bytes=peak,
        at_rest_bytes=step.at_rest,
        peak_phase=step.phase if step.peak >= step.optimizer_step else "optimizer step",
        by_kind=dict(step.by_kind),
        busiest_bytes=estimate.busiest_bytes,
        compute_seconds=estimate.compute_seconds,
        exposed_seconds=estimate.exposed_seconds,
        replica_bytes=sum(cost.busiest_bytes for cost in estimate.costs if cost.lane is Lane.REPLICATE),
        tensor_exposed_seconds=estimate.exposed_on.get(Lane.TENSOR, 0.0),
        loss_seconds=step.loss_seconds,
        optimizer_seconds=step.optimizer_seconds,
        seconds=seconds,
        tokens_per_second=programs.subject.tokens / seconds / mesh.slices,
        mfu=estimate.model_seconds / seconds,
        traced_blocks=traced,
    )


def overhead_bytes(device: Device, mesh: MeshShape, storages: int) -> int:
    """Return the bytes of a rank's memory that belong to no tensor. The allocator rounds ``storages`` up to blocks."""
    if device.is_measured:  # a CPU
        return PROCESS
    communicators = (1 if mesh.replicas == 1 else 3) + (mesh.slices > 1)
    return CONTEXT + communicators * COMMUNICATOR + SEGMENTS + storages * BLOCK


OWN_SLICES = """styles = tz.tools.MODELS["{}"].tp_plan
parallelize_module(module, mesh["tp"], styles)  # a Llama's logits: Shard(-1), for loss_parallel"""
SLICES = 'parallelize_module(module, mesh["tp"], ...)  # yours: tp_plan'
FUNCTION_SLICES = '...  # yours: tp_plan, which slices module over mesh["tp"]'
OF_SLICES = (
    "ranks of tensor parallelism (tp) have one batch; their collectives go over the links of a node, as the next lines "
    "wait for them, and they have one communicator more; a Llama's loss is torch's loss_parallel, without "
    "its sums of one number a token"
)


def best_of(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Return the row with the least memory among fitting rows that are nearly as fast as the fastest fitting row."""
    fitting = [row for row in rows if row.fits]
    fastest = max((row.tokens_per_second for row in fitting), default=0.0)
    fast = (row for row in fitting if row.tokens_per_second >= AS_FAST * fastest)
    return min(fast, key=lambda row: row.needed_bytes, default=None)


def best_or_least(rows: Sequence[PlanRow]) -> PlanRow:
    """Return the best row that fits, or the row that needs the least memory."""
    return best_of(rows) or min(rows, key=lambda row: row.needed_bytes)


MEASURED = ("each line takes as long as lines of its kind and size took where the device was measured",)
DESCRIBED = (
    "the time is a lower bound: products at the device's peak, memory and wires at full speed, no time of the host",
    "attention is the kernel that torch chooses on a GPU; every other line that computes is a kernel of its own, as "
    "tz.compile runs it",
)


def assumed(subject: Subject, asked: Policy, device: Device, *, returns_loss: bool) -> tuple[str, ...]:
    """Return the assumptions behind the figures, as sentences. ``returns_loss`` is True if forward returns the loss."""
    compute, reduce = (
        "the parameters' dtype" if dtype is None else name_of(dtype)
        for dtype in (asked.mixed_precision.param_dtype, asked.mixed_precision.reduce_dtype)
    )
    if asked.gather_format or asked.reduce_format:
        formats = f"gathers {asked.gather_format or 'as they are'}, gradients {asked.reduce_format or 'as they are'}"
        reduce = f"{reduce} (from stage 1 on: {formats}, whose bytes are written and read at both ends)"
    if asked.frozen_format:
        reduce = f"{reduce}; from stage 2 on frozen parameters rest as {asked.frozen_format}"
    shards = " and ".join(dict.fromkeys(name_of(param.dtype) for param in subject.module.parameters()))
    loss = "the loss is left out, since the model does not return one number and no loss= was given"
    if subject.loss or returns_loss:
        loss = "the loss is eager torch's" if subject.loss else "the one number that the model returns is its loss"
    return (
        *(MEASURED if device.is_measured else DESCRIBED),
        f"compute in {compute}, gradients on the wire in {reduce}; {shards} shards and AdamW's two averages, stepped "
        f"by AdamW(fused=True); {loss}; memory is that of lines that are not fused",
        "a collective is a flat ring, with a latency for each rank that a message passes",
        OVERHEAD_OF_CPU if device.is_measured else OVERHEAD,
    )
