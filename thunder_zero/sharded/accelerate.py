"""Refuses what Hugging Face's Accelerate, and so its ``Trainer``, would get wrong without a word.

Accelerate is never imported: if a script uses it, ``sys.modules`` has it, and its public names say how it is set up.
"""

from __future__ import annotations

import inspect
import sys

import torch

from thunder_zero.plan.precision import MixedPrecision

SHARDERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
PAGE = "(docs/hugging-face.md)"


def refuse_lost_options(kind: str, precision: MixedPrecision, device: torch.device) -> None:
    """Raise in a forward that Accelerate's ``mixed_precision`` does not reach, or if Accelerate is to shard."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.is_initialized():
        return
    state = accelerate.AcceleratorState()
    if state.distributed_type in SHARDERS:
        raise RuntimeError(
            f"Accelerate is set up to shard by {state.distributed_type.value}, and thunder_zero already shards {kind}; "
            f"leave that plugin out of Accelerator, its config or TrainingArguments {PAGE}"
        )
    if state.mixed_precision != "no" and precision == MixedPrecision() and not torch.is_autocast_enabled(device.type):
        raise RuntimeError(
            f"mixed_precision of Accelerate is {state.mixed_precision!r}, and {kind} was called outside of autocast, "
            f"so it would compute in its own dtypes; call model = accelerator.prepare_model(model, "
            f"evaluation_mode=True) first, or shard with mixed_precision=tz.MixedPrecision(...) instead, of "
            f"torch.float32 if the model is to stay as it is {PAGE}"
        )


def refuse_model_file(kind: str) -> None:
    """Raise if Accelerate asks for a model's state dict, of which it writes one rank's rows."""
    if _is_running("accelerator.get_state_dict"):
        raise RuntimeError(
            f"Accelerate writes the state dict of {kind} on one rank, and each rank holds its own rows; call "
            f"tz.save_pretrained(model, folder) or tz.full_state_dict(model) on all ranks, and tz.save(path, model, "
            f"optimizer.optimizer) in the place of save_state {PAGE}"
        )


def refuse_optimizer_file(kind: str) -> None:
    """Raise if Accelerate's ``save_state`` asks for an optimizer's state, of which it writes one rank's rows."""
    if _is_running("checkpointing.save_accelerator_state"):
        raise RuntimeError(
            f"save_state of Accelerate writes the state of {kind} on one rank, and each rank may hold its own rows; "
            f"call tz.save(path, model, optimizer.optimizer) on all ranks, and tz.load to continue {PAGE}"
        )


def _is_running(function: str) -> bool:
    """Return whether a function of Accelerate has called this one, directly or not."""
    frame = inspect.currentframe() if "accelerate" in sys.modules else None
    while frame is not None:
        if f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}" == f"accelerate.{function}":
            return True
        frame = frame.f_back
    return False
