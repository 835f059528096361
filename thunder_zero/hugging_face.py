"""``sharded``: trainers and accelerators of Hugging Face. ``parallelize``: tensor parallelism.

As under DistributedDataParallel, a trainer has two attributes for its model::

    trainer.model            the plain module with DTensors, for its class, config, signature and adapters
    trainer.model_wrapped    the sharded model, which steps call

An accelerator's ``prepare`` shards modules, and lets their optimizers step the shards. Its state has two parts::

    folder/run                       the model and its optimizers, by tz.save; run_1, run_2 for further models
    folder/scheduler.bin, scaler.pt, random_states_0.pkl, ...    by Accelerate

The user imports Accelerate and transformers: at run time, only ``parallelize`` does here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from thunder_zero.capture.transform import compile
from thunder_zero.capture.zero_module import ZeroModule, zero_module
from thunder_zero.checkpoint.hugging_face import save_pretrained
from thunder_zero.checkpoint.load import load
from thunder_zero.checkpoint.save import save
from thunder_zero.comm.agree import on_rank_0
from thunder_zero.compat.accelerate import left_out, models_of, optimizers_of, torch_optimizer
from thunder_zero.compat.plans_of_transformers import apply_plan
from thunder_zero.plan.policy import Policy, refuse_shares
from thunder_zero.plan.precision import MixedPrecision
from thunder_zero.sharded.full_state_dict import full_state_dict, step_shards
from thunder_zero.sharded.optimizers import parameters_of
from thunder_zero.sharded.sharded_model import MIXED, ShardedModel

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel, Trainer
else:
    Trainer = Accelerator = object

RUN = "run"  # the folder in a checkpoint from which training resumes
SHARDERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
PRECISIONS = ("no", "bf16", "fp16")
PAGE = "(docs/hugging-face.md)"
Runs = dict[str, tuple[ShardedModel, list[Optimizer]]]  # each sharded model with its optimizers, by its folder's name
TrainerClass = TypeVar("TrainerClass", bound=type[Any])
VERSIONS = "4.56 to 5.24"  # versions of transformers, as tested in docs/hugging-face.md
REFUSED = {  # unsupported arguments of a trainer, with alternatives
    "fsdp": "choose a stage of thunder_zero",
    "deepspeed": "choose a stage of thunder_zero",
    "torch_compile": "pass fuse='inductor' to sharded, by which inductor compiles what lies between collectives",
    "auto_find_batch_size": "set per_device_train_batch_size, which tz.tools.memory helps to find",
    "bf16_full_eval": "pass bf16=True, or shard with mixed_precision=tz.MixedPrecision(torch.bfloat16)",
    "fp16_full_eval": "pass bf16=True, or shard with mixed_precision=tz.MixedPrecision(torch.float16)",
    "use_liger_kernel": "leave it out: it replaces the forward that was captured",
    "sync_ref_model": "leave it out: it would mix rows into the reference model, which is whole",
    "predict_with_generate": "generate after training: with tz.full_parameters(trainer.model_wrapped) as module",
    "neftune_noise_alpha": "leave it out: its hook ends a graph wherever the length of a batch differs between ranks",
}


def sharded(trainer: TrainerClass, policy: Policy | int | None = None, **arguments: Any) -> TrainerClass:
    """Return a subclass of a trainer's class, whose instances shard their model, or of Accelerate's ``Accelerator``.

    >>> trainer = sharded(Trainer, stage=3)(model=model, args=args, train_dataset=data)
    >>> accelerator = sharded(Accelerator, stage=3)(mixed_precision="bf16")
    >>> model, optimizer, loader = accelerator.prepare(module, optimizer, loader)  # shards the module

    ``trainer.model_wrapped`` is the sharded model. A checkpoint is a folder for ``from_pretrained``. Its subfolder
    ``run`` lets any number of ranks resume. A sharded trainer can also resume from a plain trainer's checkpoint.

    Args:
        trainer: ``transformers.Trainer``, ``accelerate.Accelerator``, or a class derived from one of them.
        policy, arguments: see :func:`thunder_zero.compile`. Unless ``policy`` is a :class:`~thunder_zero.Policy`, all
            ranks take rank 0's initial values (``broadcast_from=0``), as under DistributedDataParallel. Pass neither
            argument if the trainer's or the accelerator's model is already sharded by ``compile``.

    Raises:
        TypeError: ``trainer`` is not a trainer, or it comes from an unsupported version of transformers.
    """
    defaults = {} if isinstance(policy, Policy) else {"broadcast_from": 0}
    for_compile = {"policy": policy, **defaults, **arguments} if policy is not None or arguments else {}
    library: Any = sys.modules.get("accelerate")
    mixin: type[Any] = ShardedAccelerator
    if library is None or not isinstance(trainer, type) or not issubclass(trainer, library.Accelerator):
        mixin = ShardedTrainer
        _require_methods(trainer)
    subclass: Any = type(f"Sharded{trainer.__name__}", (mixin, trainer), {"_for_compile": for_compile})
    return subclass  # type: ignore[no-any-return]


def parallelize(model: PreTrainedModel, mesh: DeviceMesh, plan: Mapping[str, str] | None = None) -> None:
    """Slice a model of transformers in place for tensor parallelism. The default plan comes from the model.

    ``from_pretrained`` with a ``DistributedConfig`` has the same effect. Afterwards pass the whole mesh to
    :func:`thunder_zero.compile`.

    >>> parallelize(model, mesh["tp"])
    >>> sharded_model = tz.compile(model, stage=3, mesh=mesh)

    Each rank slices its own values, and nothing is sent. So all ranks must build equal models.

    Args:
        model: a model that is built from a config, or loaded whole by ``from_pretrained``.
        mesh: a mesh of one dimension. Parameters are sliced over its ranks.
        plan: a mapping from paths, with ``*`` for the number of a layer, to styles. Its rules override rules of the
            model's plan, as with ``DistributedConfig.tp_plan``.

    Raises:
        ValueError: there is no plan, or the plan has an unknown path or an unsupported style, such as the styles of
            experts. It is also raised if the model is already sliced, or the number of ranks does not divide a size.
        RuntimeError: the installed version of transformers has no plans for tensor parallelism.
    """
    apply_plan(model, mesh, plan)


class ShardedTrainer(Trainer):
    """A mixin that overrides the methods of a trainer that would not work with a sharded model."""

    _for_compile: ClassVar[dict[str, Any]]  # arguments of compile; empty if the trainer gets a sharded model

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        if not self._for_compile and not isinstance(model, ShardedModel):
            raise ValueError("nothing says how to shard the model of the trainer; pass stage= to sharded(...)")
        super().__init__(model.plain if isinstance(model, ShardedModel) else model, *args, **kwargs)
        _require_fitting_arguments(self, model)
        if self._for_compile:
            model = compile(self.model, **{"device": self.args.device, **self._for_compile})
        self.model_wrapped = self.accelerator.prepare_model(model, evaluation_mode=True)
        if self.optimizer is not None:
            step_shards(self.optimizer)

    def create_accelerator_and_postprocess(self) -> None:
        """Let the accelerator unwrap the sharded model, as it unwraps DistributedDataParallel."""
        super().create_accelerator_and_postprocess()
        ShardedAccelerator.adopt(self.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing, since sharding moves this rank's rows to the device."""

    def _precompute_ref_logps(self, *args: Any) -> Any:
        """Move the plain model to its device first, since ``DPOTrainer`` calls the model before it is sharded."""
        if self.ref_model is None:
            super()._move_model_to_device(self.model, self.args.device)
        return super()._precompute_ref_logps(*args)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Return the sharded model in place of DistributedDataParallel."""
        return self.model_wrapped

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss. Raise RuntimeError if the trainer called the plain module, which has only rows."""
        try:
            return super().compute_loss(model, *args, **kwargs)
        except RuntimeError as error:
            if MIXED not in str(error):
                raise
            name = type(self).__name__.removeprefix("Sharded")
            raise RuntimeError(
                f"{name} called the plain module, whose parameters are sharded ({MIXED}), as DPOTrainer does for the "
                f"reference of adapters; pass precompute_ref_log_probs=True to DPOConfig, or let compute_loss of your "
                f"own call the model that it is given, not self.model"
            ) from error

    # Checkpoints

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create an optimizer, and let the accelerator prepare it. Transformers 4 omits this for wrapped models."""
        self.optimizer = self.accelerator.prepare(super().create_optimizer(*args, **kwargs))
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder for ``from_pretrained``. This is a collective."""
        folder = Path(output_dir or self.args.output_dir)
        save_pretrained(self.model_wrapped, folder)
        if self.args.should_save:
            if (tokenizer := self.processing_class or getattr(self.data_collator, "tokenizer", None)) is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(
            Path(output_dir) / RUN, self.model_wrapped, self.optimizer.optimizer, extra={"scheduler": self.lr_scheduler}
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load weights from a plain trainer's checkpoint. Other checkpoints are loaded later, with the optimizer."""
        if not _has_run(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, self.model_wrapped)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _has_run(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            extra = {"scheduler": self.lr_scheduler}
            load(Path(checkpoint) / RUN, self.model_wrapped, self.optimizer.optimizer, extra=extra)

    def _load_best_model(self) -> None:
        load(Path(self.state.best_model_checkpoint) / RUN, self.model_wrapped)


def _require_methods(trainer: type[Any]) -> None:
    """Raise TypeError if a class lacks a method that :class:`ShardedTrainer` overrides.

    Otherwise the trainer would never call the override. For example, it would save only the rows of rank 0.
    """
    overrides = vars(ShardedTrainer).keys() - {"_precompute_ref_logps", *dir(object)}
    if missing := sorted(
        name for name in overrides if callable(vars(ShardedTrainer)[name]) and name not in dir(trainer)
    ):
        installed = version("transformers") if find_spec("transformers") is not None else "not installed"
        raise TypeError(
            f"{trainer.__name__} has no method {missing[0]}, which a sharded trainer replaces; give a class derived "
            f"from Trainer of transformers {VERSIONS} (here: {installed})"
        )


def _has_run(checkpoint: str) -> bool:
    """Return whether a sharded trainer wrote a checkpoint. Rank 0 reads the disk, since all ranks must agree."""
    return on_rank_0("look for a run", lambda _: (Path(checkpoint) / RUN).exists())


def _require_fitting_arguments(trainer: Any, model: Any) -> None:
    args, is_sharded = trainer.args, isinstance(model, ShardedModel)
    for name, action in REFUSED.items():
        if vars(args).get(name):
            raise ValueError(f"{type(args).__name__} has {name}={getattr(args, name)!r}; {action}")
    if args.save_only_model and args.load_best_model_at_end:
        raise ValueError("save_only_model=True leaves out what load_best_model_at_end=True loads; set one of the two")
    if trainer.model_init is not None:
        raise ValueError("model_init makes a new model for each train(), unsharded; pass the model itself as model=")
    if is_sharded and trainer._for_compile:
        raise ValueError(
            "the model of the trainer is sharded twice; leave stage= and the other arguments of sharded(...) out"
        )
    if is_sharded and trainer.model is not model.plain:
        raise ValueError(
            f"the trainer made a {type(trainer.model).__name__} of a model that was sharded before; give it the plain "
            f"model, and stage= to sharded(...)"
        )


# Accelerate


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
            refuse_shares(model.state.plan.policy, "Accelerate")
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
            with left_out(self, [optimizer for _, optimizers in runs.values() for optimizer in optimizers]):
                return super().save_state(*args, **kwargs)
        finally:
            self._in_run = None
            hook.remove()

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state that a sharded accelerator saved. This is a collective."""
        runs = self._runs()
        hook = self.register_load_state_pre_hook(partial(_load_runs, runs))
        try:
            with left_out(self, [optimizer for _, optimizers in runs.values() for optimizer in optimizers]):
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
