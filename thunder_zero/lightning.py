"""Strategies for Lightning's Fabric and Trainer.

This is the only module that imports Lightning, and ``import thunder_zero`` does not import it. It uses the package
``lightning``, as LitGPT does, and not ``lightning_fabric`` or ``pytorch_lightning``: a Fabric and a Trainer accept only
strategies of their own package.

    script -> Fabric's wrapper -> Forward -> ZeroModule -> the plain module, with shards
                       \\______________________________________/
                        the wrapper refers to the plain module, too

    training_step -> self.net, the plain module -> Redirect, its forward -> ZeroModule -> its own forward, in traces
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)

from thunder_zero.comm.group import hybrid_mesh
from thunder_zero.frontends.arguments import Arguments, CheckedArguments, check_arguments
from thunder_zero.frontends.dynamo.compile import compile
from thunder_zero.frontends.plugin import zero
from thunder_zero.frontends.transform import ZeroTransform
from thunder_zero.frontends.zero_module import ZeroModule
from thunder_zero.optim.global_numbers import clip_grad_norm_
from thunder_zero.plan.policy import Policy
from thunder_zero.sharded.dtensors import load_parts
from thunder_zero.sharded.frozen import decoded_values, encoded_values
from thunder_zero.sharded.full_state_dict import (
    full_optimizer_state_dict,
    shard_optimizer_state_dict,
    step_shards,
)

import thunder
from thunder.core.module import ThunderModule

try:
    from lightning.fabric import plugins as of_fabric
    from lightning.fabric.strategies import DDPStrategy
    from lightning.pytorch import plugins as of_trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy as TrainerDDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"thunder_zero.lightning needs Lightning ({error}); run pip install -e '.[lightning]' in a checkout"
    ) from error

if TYPE_CHECKING:
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer

TIMEOUT = timedelta(minutes=30)  # the default of torch and Fabric
SET_BY_LIGHTNING = ("process_group", "mesh", "device")
FRONTENDS = ("thunder", "dynamo")
SUPPORTED = [  # they leave modules that Thunder compiles as they are
    kind
    for of in (of_fabric, of_trainer)
    for kind in (of.Precision, of.HalfPrecision, of.DoublePrecision, of.MixedPrecision)
]


@dataclass(frozen=True)
class Sharding:
    """What both strategies do with a module: shard it as their arguments say."""

    given: CheckedArguments
    mesh_shape: tuple[int, int] | None
    jit_options: Mapping[str, Any]
    frontend: str

    @classmethod
    def of(
        cls,
        policy: Policy | int | None,
        mesh_shape: tuple[int, int] | None,
        jit_options: Mapping[str, Any] | None,
        frontend: str,
        arguments: Arguments,
    ) -> Sharding:
        """Check a strategy's arguments; raises as :class:`ZeroStrategy` does."""
        require_left_to_lightning(arguments)
        if not isinstance(policy, Policy):
            arguments.setdefault("broadcast_from", 0)
        if frontend not in FRONTENDS:
            raise ValueError(f"frontend is {frontend!r}; choose {' or '.join(map(repr, FRONTENDS))}")
        return cls(check_arguments(policy, **arguments), mesh_shape, dict(jit_options or {}), frontend)

    def sharded(self, module: nn.Module, device: torch.device) -> ZeroModule:
        """Compile the module, or jit it with ZeroTransform, or shard a jitted module; a collective."""
        if isinstance(module, ZeroModule):
            raise RuntimeError(
                f"{type(module.plain).__name__} is already sharded; give Lightning the plain module, and the strategy "
                f"the arguments of ZeroTransform"
            )
        sources = self.given.sources
        mesh = None if self.mesh_shape is None else hybrid_mesh(self.mesh_shape, device)
        where = Arguments(device=device, mesh=mesh, init=sources.init, weights=sources.weights)
        if not isinstance(module, ThunderModule) and self.frontend == "dynamo":
            return compile(module, self.given.policy, **where, **self.jit_options)
        if not isinstance(module, ThunderModule):
            options = dict(self.jit_options)
            transforms = [*options.pop("transforms", ()), ZeroTransform(self.given.policy, **where)]
            return cast(ZeroModule, thunder.jit(module, transforms=transforms, **options))
        if self.jit_options:
            raise TypeError(
                f"the strategy has jit_options ({', '.join(self.jit_options)}), but the module is already jitted; give "
                f"Lightning the plain module, or the strategy no jit_options"
            )
        model = zero(module, self.given.policy, **where)
        module._overrides_parameters.clear()  # Fabric's wrapper refers to it, and these are the full weights
        return cast(ZeroModule, model)


def full_model_state_dict(model: nn.Module) -> dict[str, Any]:
    """The full state dict on rank 0, on the CPU, and an empty one on other ranks; a collective."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return decoded_values(model, full)


class ZeroStrategy(DDPStrategy):
    """DDP, ZeRO-1, ZeRO-2 or ZeRO-3 in Thunder, as a strategy of Lightning Fabric.

    >>> fabric = Fabric(accelerator="cpu", devices=2, strategy=ZeroStrategy(stage=3))
    >>> fabric.launch()
    >>> model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))

    DDPStrategy provides the processes (with its launcher, or under torchrun), the process group and Fabric's own
    collectives. An optimizer may be built before ``setup`` or after it; once Fabric has set it up, it steps this rank's
    rows. ``Fabric.save`` writes one file with full tensors of the model and the optimizers, which any number of ranks
    loads, and plain torch, too. All ranks must call ``save`` and ``clip_gradients``. The wrapper's own ``state_dict``
    is the plain module's, of DTensors.

    Args:
        policy: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        mesh_shape: the number of copies of the model, and the number of ranks that share one (hybrid sharding); if
            None, all ranks share one copy.
        frontend: "thunder": ``thunder.jit`` compiles the module; "dynamo": :func:`thunder_zero.compile` does.
        jit_options: further arguments of what compiles, such as ``{"executors": [...]}`` for "thunder", and
            ``{"fuse": "inductor"}`` for "dynamo".
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: those of DDPStrategy, which Fabric
            sets from its own arguments.
        process_group_backend, timeout, start_method: those of DDPStrategy.
        arguments: the arguments of ZeroTransform, such as ``stage=3``, ``init`` and ``weights``, except those that
            Fabric sets: process group, mesh and device. ``broadcast_from`` is 0 by default, unless ``policy`` is a
            Policy: as with DDP, ranks may have built the module with different seeds.

    Raises:
        ValueError: a stage or a field out of range.
        TypeError: not a policy; a field that policies do not have; init that is no function, weights that are no
            mapping; a precision plugin that is not supported.
    """

    def __init__(
        self,
        policy: Policy | int | None = None,
        *,
        mesh_shape: tuple[int, int] | None = None,
        frontend: str = "thunder",
        jit_options: Mapping[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: of_fabric.Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        start_method: str = "popen",
        **arguments: Unpack[Arguments],
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._sharding = Sharding.of(policy, mesh_shape, jit_options, frontend, arguments)
        # An attribute of Fabric's strategies: Fabric.no_backward_sync calls this object's method.
        self._backward_sync_control = NoBackwardSync()

    @property
    def policy(self) -> Policy:
        """The policy that the arguments ask for."""
        return self._sharding.given.policy

    def setup_environment(self) -> None:
        """Start the process group.

        Raises:
            TypeError: the precision plugin is not supported.
        """
        require_supported(self.precision)
        super().setup_environment()

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """For ``Fabric.init_module``: build full modules on the CPU, since only shards go to the device.

        Raises:
            ValueError: ``empty_init=True``, which leaves no values to shard.
        """
        if empty_init:
            raise ValueError(
                "empty_init=True leaves no values for ZeroStrategy to shard; build the module with empty_init=False"
            )
        stack = ExitStack()
        stack.enter_context(super().module_init_context(empty_init))
        stack.enter_context(torch.device("cpu"))  # the innermost device wins
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: ``setup_module`` moves the shards to the device, where the full module may not fit."""

    def setup_module(self, module: nn.Module) -> Forward:
        """Jit the module with ZeroTransform, or shard a jitted module; a collective.

        Raises:
            TypeError: ``jit_options`` for a module that is already jitted.
            ValueError, RuntimeError: the module is already sharded; errors of ZeroTransform.
        """
        return Forward(self._sharding.sharded(module, self.root_device), module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make the optimizer step the shards, whichever parameters it was built on, and load full state dicts."""
        optimizer.register_load_state_dict_pre_hook(shard_optimizer_state_dict, prepend=True)
        step_shards(optimizer)
        return optimizer

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the global norm of the module's gradients with :func:`~thunder_zero.clip_grad_norm_`."""
        return clip_grad_norm_(zero_module(module), max_norm, float(norm_type), error_if_nonfinite)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The full state dict on rank 0, on the CPU, and an empty one on other ranks; a collective."""
        if not isinstance(module, Forward):
            return super().get_module_state_dict(module)  # type: ignore[no-any-return]
        return full_model_state_dict(module.model)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a plain module's full state dict into the shards.

        Raises:
            RuntimeError: ``strict``, and names are missing or unexpected.
            ValueError: a parameter has another shape.
        """
        if not isinstance(module, Forward):
            super().load_module_state_dict(module, state_dict, strict)
            return
        module.model.load_state_dict(state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's full state dict on rank 0, on the CPU, and an empty one on other ranks; a collective."""
        return full_optimizer_state_dict(optimizer, wanted=self.is_global_zero)


class NoBackwardSync:
    """Implements ``Fabric.no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """The sharded model's ``no_sync``, if enabled."""
        return zero_module(module).no_sync() if enabled else nullcontext()


class Forward(nn.Module):
    """The module inside Fabric's wrapper: calls the sharded model. To call another method of the module that it was
    given, Fabric sets it as that module's ``forward``."""

    def __init__(self, model: ZeroModule, module: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._current_forward = partial(vars(module).get, "forward")  # and not the module itself, a submodule then
        self._own_forward = self._current_forward()

    @torch.compiler.disable  # Fabric applies torch.compile to this if it was applied to the module
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the sharded model; refuse if Fabric put another method here, which Thunder has not compiled."""
        if self._current_forward() is not self._own_forward:
            raise RuntimeError(
                f"a method of {type(self.model.plain).__name__} was called through Fabric's wrapper instead of forward "
                f"(mark_forward_method, training_step), but Thunder compiles forward alone; move the method's code "
                f"into forward"
            )
        return self.model(*args, **kwargs)


class ZeroTrainerStrategy(TrainerDDPStrategy):
    """DDP, ZeRO-1, ZeRO-2 or ZeRO-3 in Thunder, as a strategy of Lightning's Trainer.

    >>> trainer = Trainer(accelerator="cpu", devices=2, strategy=ZeroTrainerStrategy(stage=3))
    >>> trainer.fit(lightning_module, loader)

    It shards the one submodule of the LightningModule that has its parameters, such as ``self.net``, before
    ``configure_optimizers``. Hooks such as ``training_step`` run as Python, and call ``self.net(batch)``, which Thunder
    compiles. Checkpoints have full tensors under the names of the plain module, as without a strategy.

    Args:
        policy, mesh_shape, frontend, jit_options, process_group_backend, timeout, arguments: as of
            :class:`ZeroStrategy`.

    Raises:
        ValueError, TypeError: as :class:`ZeroStrategy`.
    """

    def __init__(
        self,
        policy: Policy | int | None = None,
        *,
        mesh_shape: tuple[int, int] | None = None,
        frontend: str = "thunder",
        jit_options: Mapping[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        **arguments: Unpack[Arguments],
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._sharding = Sharding.of(policy, mesh_shape, jit_options, frontend, arguments)
        self._sharded: ZeroModule | None = None

    @property
    def sharded(self) -> ZeroModule:
        """The sharded model, for ``tz.print_trace`` and others.

        Raises:
            RuntimeError: the Trainer has not set it up yet.
        """
        if self._sharded is None:
            raise RuntimeError("the Trainer has not sharded a model yet; call trainer.fit first")
        return self._sharded

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Load checkpoints into the shards."""
        return True

    def setup_environment(self) -> None:
        """Start the process group."""
        require_supported(self.precision_plugin)
        if self._layer_sync is not None:
            raise ValueError("ZeroTrainerStrategy does not support sync_batchnorm=True; leave it out")
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, then set up optimizers and precision; a collective."""
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ValueError(
                    f"ZeroTrainerStrategy does not support the callback {type(callback).__name__}, which copies full "
                    f"weights; leave it out, and average them by tz.EMA(trainer.strategy.sharded)"
                )
        self.accelerator.setup(trainer)
        module = only_submodule(self.lightning_module)
        forward = vars(module).get("forward")
        if isinstance(forward, Redirect):  # of an earlier call of the Trainer
            self._sharded = forward.model
        else:
            self.precision_plugin.convert_module(self.lightning_module)
            self._sharded = self._sharding.sharded(module, self.root_device)
            vars(module)["forward"] = Redirect(self._sharded, forward)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                optimizer.register_load_state_dict_pre_hook(shard_optimizer_state_dict, prepend=True)
        self.setup_precision_plugin()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure, forward and backward, before the step, which refuses to begin without its gradients."""
        results = [closure()]

        def once() -> Any:
            if not results:
                raise RuntimeError(
                    f"{type(optimizer).__name__} evaluates the loss more than once in a step, which the strategy does "
                    f"not support; choose another optimizer"
                )
            return results.pop()

        return super().optimizer_step(optimizer, once, model, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Reduce nothing: for all but the last micro-batch of ``accumulate_grad_batches``."""
        return self.sharded.no_sync()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full state dict on rank 0, and an empty one on other ranks; a collective."""
        return full_model_state_dict(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a checkpoint's full model into the shards."""
        module = self.lightning_module
        load_parts(module, encoded_values(module, checkpoint["state_dict"]), module.state_dict(), strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's full state dict on rank 0, and an empty one on other ranks; a collective."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return full_optimizer_state_dict(plain, wanted=self.is_global_zero)

    def teardown(self) -> None:
        """Leave the shards on their device."""
        module = self.lightning_module
        self._lightning_module = None  # or its tensors would be moved to the CPU
        super().teardown()
        self._lightning_module = module


class Redirect:
    """Is set as the plain module's ``forward``, and calls the sharded model, which traces the module's own."""

    def __init__(self, model: ZeroModule, own: Callable[..., Any] | None) -> None:
        self.model = model
        self._own = {} if own is None else {"forward": own}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the sharded model."""
        attributes = vars(self.model.plain)
        del attributes["forward"]
        attributes |= self._own
        try:
            return self.model(*args, **kwargs)
        finally:
            attributes["forward"] = self


def only_submodule(module: LightningModule) -> nn.Module:
    """The submodule that has all parameters of a LightningModule."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    found: dict[str, nn.Module] = {
        name: child for name, child in module.named_children() if any(True for _ in child.parameters())
    }
    if own or len(found) != 1:
        raise ValueError(
            f"{type(module).__name__} has parameters in {', '.join([*own, *found]) or 'no submodule'}, and the "
            f"strategy shards one submodule: put all parameters into one, such as self.net, and call self.net(batch) "
            f"in training_step"
        )
    ((name, only),) = found.items()
    if isinstance(only, ThunderModule):
        raise TypeError(
            f"{type(module).__name__}.{name} is jitted already; leave the plain module there, and give the strategy "
            f"the arguments of ZeroTransform, and jit_options"
        )
    if only._forward_pre_hooks or only._forward_hooks:
        raise ValueError(
            f"{type(module).__name__}.{name} has forward hooks, which would run twice, outside of the program and in "
            f"it; move their code into its forward"
        )
    return only


def zero_module(model: nn.Module) -> ZeroModule:
    """The sharded model in the module that ``Fabric.setup`` returned, for ``print_trace``, ``global_mean`` and others.

    >>> tz.print_trace(zero_module(model))

    Raises:
        TypeError: the module has no sharded model.
    """
    found = next((module.model for module in model.modules() if isinstance(module, Forward)), None)
    if found is None:
        raise TypeError(
            f"{type(model).__name__} was not set up by a Fabric with ZeroStrategy; give the module that fabric.setup "
            f"or fabric.setup_module returned"
        )
    return found


def require_left_to_lightning(arguments: Arguments) -> None:
    """Raise if an argument of ZeroTransform is one that Fabric or the Trainer sets."""
    for name in SET_BY_LIGHTNING:
        if name in arguments:
            raise TypeError(
                f"the strategy does not take {name}: Lightning sets it; give Fabric or Trainer accelerator and "
                f"devices, and the strategy mesh_shape"
            )


def require_supported(precision: of_fabric.Precision | of_trainer.Precision) -> None:
    """Raise if a plugin would wrap modules that Thunder compiles."""
    if type(precision) not in SUPPORTED:
        raise TypeError(
            f"thunder_zero does not support precision={precision.precision!r} ({type(precision).__name__}); choose "
            f"'32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'"
        )
