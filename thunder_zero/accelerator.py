"""``ShardedAccelerator``: what an Accelerator of Hugging Face does otherwise with sharded models.

``prepare`` shards modules in place of DistributedDataParallel, and lets their optimizers step the shards. A state has
two parts::

    folder/run                       the model and its optimizers, by tz.save; run_1, run_2 for further models
    folder/scheduler.bin, scaler.pt, random_states_0.pkl, ...    by Accelerate

Accelerate is imported by the user, never here at run time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from thunder_zero.capture.transform import compile
from thunder_zero.capture.zero_module import ZeroModule, zero_module
from thunder_zero.checkpoint.load import load
from thunder_zero.checkpoint.save import save
from thunder_zero.compat.accelerate import left_out, models_of, optimizers_of, torch_optimizer
from thunder_zero.plan.precision import MixedPrecision
from thunder_zero.sharded.full_state_dict import full_state_dict, step_shards
from thunder_zero.sharded.optimizers import parameters_of
from thunder_zero.sharded.sharded_model import ShardedModel

if TYPE_CHECKING:
    from accelerate import Accelerator
else:
    Accelerator = object

RUN = "run"  # the folder in a checkpoint from which training resumes
SHARDERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
PRECISIONS = ("no", "bf16", "fp16")
PAGE = "(docs/hugging-face.md)"
Runs = dict[str, tuple[ShardedModel, list[Optimizer]]]  # each sharded model with its optimizers, by its folder's name


class ShardedAccelerator(Accelerator):
    """A mixin that overrides the methods of an accelerator that would not work with a sharded model."""

    _for_compile: ClassVar[dict[str, Any]] = {}  # arguments of compile; empty if models are sharded before
    _in_run: dict[str, Any] | None = None  # while a state is saved: what stands for values that folder/run has

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _require_fitting_settings(self)

    @classmethod
    def adopt(cls, accelerator: Any) -> Self:
        """Change an accelerator into a sharded one in place."""
        _require_fitting_settings(accelerator)
        accelerator.__class__ = type(f"Sharded{type(accelerator).__name__}", (cls, type(accelerator)), {})
        sharded: Self = accelerator
        return sharded

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Return a sharded model. With ``evaluation_mode``, or without parameters, a module stays whole."""
        if not isinstance(model, ShardedModel) and not evaluation_mode and any(True for _ in model.parameters()):
            model = self._shard(model)
        if isinstance(model, ShardedModel):
            model = zero_module(model)
            model.wrap_forward(self._under_autocast(model))
            for optimizer in optimizers_of(self):
                step_shards(optimizer)
        return super().prepare_model(model, device_placement, evaluation_mode=True)  # True leaves DDP out

    def _shard(self, module: nn.Module) -> ZeroModule:
        if not self._for_compile:
            raise ValueError(
                f"nothing says how to shard {type(module).__name__}; pass stage= to sharded(Accelerator, ...), or the "
                f"model that tz.compile returned to prepare"
            )
        return compile(module, **{"device": self.device, **self._for_compile})

    def _under_autocast(self, model: ZeroModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a wrapper of forward with the autocast of ``mixed_precision``, unless the policy sets dtypes."""
        if not self.native_amp or model.state.plan.policy.mixed_precision != MixedPrecision():
            return lambda forward: forward
        from accelerate.utils import convert_outputs_to_fp32

        return lambda forward: convert_outputs_to_fp32(self.autocast()(forward))

    def prepare_optimizer(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Let an optimizer of a sharded module's parameters step the shards."""
        step_shards(torch_optimizer(optimizer))
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the plain module, whose parameters are the shards, as for DistributedDataParallel."""
        return super().unwrap_model(model.plain if isinstance(model, ShardedModel) else model, *args, **kwargs)

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        """Clip gradients, and return the norm over all ranks as a plain tensor, which ``gather`` takes."""
        norm = super().clip_grad_norm_(*args, **kwargs)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    # Checkpoints

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the full values of a sharded model, or of its plain module, on each rank. This is a collective."""
        sharded = next((item for item in self._sharded_models() if model in (item, item.plain)), None)
        if sharded is None:
            return super().get_state_dict(model, unwrap)
        return full_state_dict(sharded) if unwrap or self._in_run is None else self._in_run

    def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:
        """Write values on one rank. Raise TypeError for DTensors, of which only this rank's rows would be written."""
        if any(isinstance(value, DTensor) for value in tree_leaves(obj)):
            raise TypeError(
                f"Accelerator.save was given DTensors, and writes the rows of one rank; pass it "
                f"accelerator.get_state_dict(model), or call accelerator.save_state(folder) {PAGE}"
            )
        super().save(obj, *args, **kwargs)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save a state from which any number of ranks can resume, in any stage. This is a collective."""
        runs, self._in_run = self._runs(), {}
        hook = self.register_save_state_pre_hook(partial(_save_runs, runs, self._in_run))
        try:
            with left_out(self, _optimizers_in(runs)):
                return super().save_state(*args, **kwargs)
        finally:
            self._in_run = None
            hook.remove()

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state that a sharded accelerator saved. This is a collective."""
        runs = self._runs()
        hook = self.register_load_state_pre_hook(partial(_load_runs, runs))
        try:
            with left_out(self, _optimizers_in(runs)):
                return super().load_state(*args, **kwargs)
        finally:
            hook.remove()

    def _sharded_models(self) -> list[ShardedModel]:
        return [model for model in models_of(self) if isinstance(model, ShardedModel)]

    def _runs(self) -> Runs:
        runs: Runs = {}
        for index, model in enumerate(self._sharded_models()):
            ids = {id(param.shard) for param in model.state.params.values()}
            optimizers = [opt for opt in optimizers_of(self) if not ids.isdisjoint(map(id, parameters_of(opt)))]
            runs[f"{RUN}_{index}" if index else RUN] = model, optimizers
        return runs


def is_accelerator(kind: object) -> bool:
    """Return whether a value is Accelerate's class Accelerator, or a class derived from it."""
    library: Any = sys.modules.get("accelerate")
    return library is not None and isinstance(kind, type) and issubclass(kind, library.Accelerator)


def _optimizers_in(runs: Runs) -> list[Optimizer]:
    return [optimizer for _, optimizers in runs.values() for optimizer in optimizers]


def _save_runs(runs: Runs, in_run: dict[str, Any], models: Any, weights: list[Any], folder: str) -> None:
    """Write our checkpoints, and take out of ``weights`` what Accelerate need not write."""
    for name, (model, optimizers) in runs.items():
        save(Path(folder) / name, model, optimizers)
    weights[:] = [values for values in weights if values is not in_run]


def _load_runs(runs: Runs, models: list[Any], folder: str) -> None:
    """Load our checkpoints, and take out of ``models`` what Accelerate need not load."""
    for name, (model, optimizers) in runs.items():
        load(Path(folder) / name, model, optimizers)
    models[:] = [model for model in models if not isinstance(model, ShardedModel)]


def _require_fitting_settings(accelerator: Any) -> None:
    kind, backend = accelerator.distributed_type.value, accelerator.state.dynamo_plugin.backend.value
    if kind in SHARDERS:
        problem, action = f"is set up to shard by {kind}", "leave that plugin out of Accelerator, its config or Trainer"
    elif accelerator.mixed_precision not in PRECISIONS:
        problem, action = f"has mixed_precision={accelerator.mixed_precision!r}", "pass 'bf16' or 'fp16'"
    elif backend != "NO":
        problem, action = f"compiles by dynamo_backend={backend!r}", "pass fuse='inductor' to sharded instead"
    elif accelerator.parallelism_config is not None:
        problem, action = "has a parallelism_config", "pass a mesh= to sharded instead"
    else:
        return
    raise ValueError(f"Accelerator {problem}, and thunder_zero shards the model; {action} {PAGE}")
