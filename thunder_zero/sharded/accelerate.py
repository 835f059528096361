"""Adapts a sharded model to Accelerate: runs its autocast, and prevents files with one rank's rows.

This module never imports Accelerate. It reads Accelerate's settings through ``sys.modules``.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from thunder_zero.plan.precision import MixedPrecision

SHARDERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PAGE = "(docs/hugging-face.md)"


def dtype_of_accelerate(kind: str, precision: MixedPrecision, device: torch.device) -> torch.dtype | None:
    """Return the dtype of Accelerate's autocast around the call of a model.

    Return None if Accelerate uses no autocast, if the policy sets ``mixed_precision``, or if the caller is already
    inside an autocast.

    Raises:
        RuntimeError: Accelerate is set up to shard the model, or Accelerate's precision is neither bf16 nor fp16.
    """
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.is_initialized():
        return None
    state = accelerate.AcceleratorState()
    if state.distributed_type in SHARDERS:
        raise RuntimeError(
            f"Accelerate is set up to shard by {state.distributed_type.value}, and thunder_zero already shards {kind}; "
            f"leave that plugin out of Accelerator, its config or TrainingArguments {PAGE}"
        )
    requested: str = state.mixed_precision
    if requested == "no" or precision != MixedPrecision() or torch.is_autocast_enabled(device.type):
        return None
    if requested not in DTYPES:
        raise RuntimeError(
            f"mixed_precision of Accelerate is {requested!r}, and {kind} takes {' or '.join(map(repr, DTYPES))}; or "
            f"shard with mixed_precision=tz.MixedPrecision(...) {PAGE}"
        )
    return DTYPES[requested]


def in_float32(output: Any) -> Any:
    """Return a model's output with floating-point tensors cast to float32, as Accelerate does after an autocast."""
    return sys.modules["accelerate.utils"].convert_to_fp32(output)


def refuse_plain_trainer(kind: str) -> None:
    """Raise RuntimeError if a plain Trainer of transformers is a caller, since it would save one rank's rows."""
    if _is_running("transformers.trainer._inner_training_loop"):
        raise RuntimeError(
            f"Trainer was given a {kind} that thunder_zero trains, of which it would save one rank's rows; make it by "
            f"thunder_zero.hugging_face.sharded(Trainer)(model=model, ...) {PAGE}"
        )


def refuse_model_file(kind: str) -> None:
    """Raise RuntimeError if Accelerate requests a model's state dict, which would have only one rank's rows."""
    if _is_running("accelerate.accelerator.get_state_dict"):
        raise RuntimeError(
            f"Accelerate writes the state dict of {kind} on one rank, and each rank holds its own rows; call "
            f"tz.save_pretrained(model, folder) or tz.full_state_dict(model) on all ranks, and tz.save(path, model, "
            f"optimizer.optimizer) in the place of save_state {PAGE}"
        )


def refuse_optimizer_file(kind: str) -> None:
    """Raise RuntimeError if Accelerate's ``save_state`` requests a state dict, which would have one rank's rows."""
    if _is_running("accelerate.checkpointing.save_accelerator_state"):
        raise RuntimeError(
            f"save_state of Accelerate writes the state of {kind} on one rank, and each rank may hold its own rows; "
            f"call tz.save(path, model, optimizer.optimizer) on all ranks, and tz.load to continue {PAGE}"
        )


def _is_running(function: str) -> bool:
    """Return whether the function ``module.name`` is on the call stack."""
    frame = inspect.currentframe() if "accelerate" in sys.modules else None
    while frame is not None:
        if f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}" == function:
            return True
        frame = frame.f_back
    return False
