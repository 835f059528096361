"""Writes the report of a step of train_gpt.py: its forecast, the measured step, and another stage beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from ranks import Ranks
from torch import Tensor, nn

import thunder_zero as tz  # before thunder

from thunder.core.module import ThunderModule

CALIBRATE_SECONDS = 10.0


def write_step_report(
    model: ThunderModule,
    step: Callable[[], object],
    path: Path,
    *,
    traces: tz.tools.Traces,
    plain: nn.Module,
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    ranks: Ranks,
) -> None:
    """Measure the machine, unless it has GPUs, and ``step`` of the model, on every rank; rank 0 writes the file.

    The other stage is ZeRO-2 beside ZeRO-3, and ZeRO-3 beside all other stages; ``plain`` is the module before it was
    sharded, and ``inputs`` are those of a step.
    """
    times = tz.tools.measure_times(model, step)
    device = "h100" if ranks.device.type == "cuda" else tz.tools.calibrate(CALIBRATE_SECONDS)
    if ranks.rank == 0:
        policy = replace(traces.plan.policy, stage=2 if traces.plan.policy.stage == 3 else 3)
        beside = tz.trace(plain, inputs, policy=policy, world_size=ranks.world_size)
        around = {"loss": loss, "optimizer": optimizer}
        tz.tools.report(traces, path, device=device, measured=times, beside=beside, title="Byte-level GPT", **around)
