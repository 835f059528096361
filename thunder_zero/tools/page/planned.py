"""Makes the page of a named model, or of a model from ``FILE.py:function``."""

from __future__ import annotations

from dataclasses import replace

import torch

from thunder_zero.plan.amounts import float_dtype
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.policy import Policy
from thunder_zero.plan.precision import MixedPrecision
from thunder_zero.tools.devices.named import device_of
from thunder_zero.tools.dry_run import ProgramSource
from thunder_zero.tools.models.named import MODELS
from thunder_zero.tools.page.program import Data
from thunder_zero.tools.page.report import page_of
from thunder_zero.tools.planner.plan_training import PRECISION
from thunder_zero.tools.planner.subject import subject_of


def report_of(
    model: str,
    *,
    world_size: int,
    stage: int,
    beside: int | None,
    rank: int,
    replicas: int,
    device: str,
    dtype: str | None,
    blocks: int | None,
) -> Data:
    """Return the data of the page, with AdamW and the model's loss.

    ``thunder-zero report --help`` describes the arguments.
    """
    described, subject = device_of(device), subject_of(model)
    if blocks is not None and blocks < 1:
        raise ValueError(f"blocks is {blocks}; give how many of the {subject.blocks} alike blocks to keep, at least 1")
    mesh = Mesh.of(world_size, rank, replicas)
    precision = PRECISION if model in MODELS else MixedPrecision()
    if dtype is not None:
        precision = replace(PRECISION, param_dtype=float_dtype("dtype", dtype))
    stages = [stage_number for stage_number in (stage, beside) if stage_number is not None]
    first, *others = (Policy(stage_number, mixed_precision=precision) for stage_number in stages)
    with subject.with_blocks(subject.blocks if blocks is None else blocks) as module:
        captured = ProgramSource(module, subject.args, subject.kwargs, first, mesh, device=described)
        traces, beside_traces = captured.under(first), [captured.under(other) for other in others]
    blocks_text = f", {blocks} of {subject.blocks} blocks" if blocks is not None and blocks < subject.blocks else ""
    return page_of(
        traces,
        described,
        beside=beside_traces[0] if beside_traces else None,
        loss=subject.loss,
        optimizer=torch.optim.AdamW,
        title=f"{subject.name}{blocks_text}",
    )
