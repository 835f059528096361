"""The strategy of Lightning Fabric."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from lightning.fabric import plugins as fabric_plugins
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch import plugins as trainer_plugins
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from thunder_zero.capture.arguments import Arguments, check_arguments
from thunder_zero.capture.plugin import zero
from thunder_zero.capture.transform import ZeroTransform
from thunder_zero.capture.zero_module import ZeroModule
from thunder_zero.comm.group import hybrid_mesh
from thunder_zero.compat.jitted import forget_tensors
from thunder_zero.optim.global_numbers import clip_grad_norm_
from thunder_zero.plan.policy import Policy, refuse_shares
from thunder_zero.sharded.frozen import decoded_values
from thunder_zero.sharded.full_state_dict import (
    full_optimizer_state_dict,
    shard_optimizer_state_dict,
    step_shards,
)

import thunder
from thunder.core.module import ThunderModule

if TYPE_CHECKING:
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
    from torch.optim import Optimizer

TIMEOUT = timedelta(minutes=30)  # the default of torch and Fabric
SET_BY_LIGHTNING = ("process_group", "mesh", "device")
SUPPORTED = [  # these plugins do not wrap modules
    kind
    for plugins in (fabric_plugins, trainer_plugins)
    for kind in (plugins.Precision, plugins.HalfPrecision, plugins.DoublePrecision, plugins.MixedPrecision)
]


class ZeroStrategy(DDPStrategy):
    """DDP, ZeRO-1, ZeRO-2 or ZeRO-3 in Thunder, as a strategy of Lightning Fabric.

    >>> fabric = Fabric(accelerator="cpu", devices=2, strategy=ZeroStrategy(stage=3))
    >>> fabric.launch()
    >>> model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))

    DDPStrategy provides the processes (with its launcher, or under torchrun), the process group and Fabric's own
    collectives. An optimizer may be built before or after ``setup``. After ``setup``, the optimizer steps this rank's
    rows. ``Fabric.save`` writes one file with full tensors of the model and the optimizers. Any number of ranks can
    load the file, and so can plain torch. All ranks must call ``save`` and ``clip_gradients``. The ``state_dict`` of
    Fabric's wrapper has the plain module's names, and DTensors as values.

    Args:
        policy: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        mesh_shape: the number of replicas, and the number of ranks that share a replica (hybrid sharding). By default
            all ranks share one replica.
        jit_options: further arguments of ``thunder.jit``, such as ``{"transforms": [...]}``.
        arguments: the arguments of ZeroTransform, such as ``stage=3``, ``init`` and ``weights``. Process group, mesh
            and device are excluded, because Fabric sets them. ``broadcast_from`` is 0 by default, unless ``policy`` is
            a Policy: as with DDP, ranks may have built the module with different seeds.

    The other arguments are those of DDPStrategy.
    """

    def __init__(
        self,
        policy: Policy | int | None = None,
        *,
        mesh_shape: tuple[int, int] | None = None,
        jit_options: Mapping[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
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
        self._sharding = Sharding(policy, mesh_shape, jit_options, arguments)
        # Fabric.no_backward_sync calls a method of this attribute of a strategy.
        self._backward_sync_control = self

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return zero_module(module).no_sync() if enabled else nullcontext()

    @property
    def policy(self) -> Policy:
        return self._sharding.arguments.policy

    def setup_environment(self) -> None:
        require_supported(self.precision)
        super().setup_environment()

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which ``Fabric.init_module`` builds full modules on the CPU. Only shards move later."""
        if empty_init:
            raise ValueError(
                "empty_init=True leaves no values for ZeroStrategy to shard; build the module with empty_init=False"
            )
        stack = ExitStack()
        stack.enter_context(super().module_init_context(empty_init))
        stack.enter_context(torch.device("cpu"))  # the innermost device wins
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing, since the full module may not fit on the device."""

    def setup_module(self, module: nn.Module) -> Forward:
        return Forward(self._sharding.shard(module, self.root_device), module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make the optimizer step shards in place of full parameters, and accept full state dicts."""
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
        return clip_grad_norm_(zero_module(module), max_norm, float(norm_type), error_if_nonfinite)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        if not isinstance(module, Forward):
            return super().get_module_state_dict(module)  # type: ignore[no-any-return]
        return full_model_state_dict(module.model)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        if not isinstance(module, Forward):
            super().load_module_state_dict(module, state_dict, strict)
            return
        module.model.load_state_dict(state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return full_optimizer_state_dict(optimizer, wanted=self.is_global_zero)


class Forward(nn.Module):
    """The module inside Fabric's wrapper, which calls the sharded model.

    When the user calls a method other than forward, Fabric temporarily sets that method as the module's ``forward``.
    """

    def __init__(self, model: ZeroModule, module: nn.Module) -> None:
        super().__init__()
        self.model = model
        # The module cannot be an attribute of Forward: it would become a submodule.
        self._current_forward = partial(vars(module).get, "forward")
        self._first_forward = self._current_forward()

    @torch.compiler.disable  # Fabric applies torch.compile to this if it was applied to the module
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the sharded model. Raise RuntimeError if the user called another method through Fabric's wrapper."""
        if self._current_forward() is not self._first_forward:
            raise RuntimeError(
                f"a method of {type(self.model.plain).__name__} was called through Fabric's wrapper instead of forward "
                f"(mark_forward_method, training_step), but forward alone is compiled; move the method's code "
                f"into forward"
            )
        return self.model(*args, **kwargs)


def zero_module(model: nn.Module) -> ZeroModule:
    """Return the sharded model inside a module that ``Fabric.setup`` returned.

    >>> tz.print_trace(zero_module(model))
    """
    sharded = next((module.model for module in model.modules() if isinstance(module, Forward)), None)
    if sharded is None:
        raise TypeError(
            f"{type(model).__name__} was not set up by a Fabric with ZeroStrategy; give the module that fabric.setup "
            f"or fabric.setup_module returned"
        )
    return sharded


# For the strategies of Fabric and of the Trainer


class Sharding:
    def __init__(
        self,
        policy: Policy | int | None,
        mesh_shape: tuple[int, int] | None,
        jit_options: Mapping[str, Any] | None,
        arguments: Arguments,
    ) -> None:
        for name in SET_BY_LIGHTNING:
            if name in arguments:
                raise TypeError(
                    f"the strategy does not take {name}: Lightning sets it; give Fabric or Trainer accelerator and "
                    f"devices, and the strategy mesh_shape"
                )
        if not isinstance(policy, Policy):
            arguments.setdefault("broadcast_from", 0)
        self.arguments, self.mesh_shape = check_arguments(policy, **arguments), mesh_shape
        refuse_shares(self.arguments.policy, "Lightning")
        self.jit_options = dict(jit_options or {})

    def shard(self, module: nn.Module, device: torch.device) -> ZeroModule:
        """Jit a plain module, or take a jitted module, and return it sharded. This is a collective."""
        if isinstance(module, ZeroModule):
            raise RuntimeError(
                f"{type(module.plain).__name__} is already sharded; give Lightning the plain module, and the strategy "
                f"the arguments of ZeroTransform"
            )
        asked = self.arguments
        policy, sources = asked.policy, asked.sources
        mesh = None if self.mesh_shape is None else hybrid_mesh(self.mesh_shape, device)
        arguments = Arguments(device=device, mesh=mesh, init=sources.init, weights=sources.weights)
        arguments |= Arguments(progress=asked.progress, fuse=asked.fuse, dynamic=asked.dynamic)
        if not isinstance(module, ThunderModule):
            options = dict(self.jit_options)
            transforms = [*options.pop("transforms", ()), ZeroTransform(policy, **arguments)]
            return cast(ZeroModule, thunder.jit(module, transforms=transforms, **options))
        if self.jit_options:
            raise TypeError(
                f"the strategy has jit_options ({', '.join(self.jit_options)}), but the module is already jitted; give "
                f"Lightning the plain module, or the strategy no jit_options"
            )
        model = zero(module, policy, **arguments)
        forget_tensors(module)  # Fabric's wrapper refers to the jitted module, which would keep the full weights
        return cast(ZeroModule, model)


def full_model_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the full state dict on rank 0's CPU, and an empty dict on other ranks. This is a collective."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return decoded_values(model, full)


def require_supported(precision: fabric_plugins.Precision | trainer_plugins.Precision) -> None:
    if type(precision) not in SUPPORTED:
        raise TypeError(
            f"thunder_zero does not support precision={precision.precision!r} ({type(precision).__name__}); choose "
            f"'32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'"
        )
