"""A strategy for Lightning Fabric.

This is the only module that imports Lightning, and ``import thunder_zero`` does not import it. It uses the package
``lightning``, as LitGPT does, and not ``lightning_fabric``: a Fabric accepts only strategies of its own package.

    script -> Fabric's wrapper -> Forward -> ZeroModule -> the plain module, with shards
                       \\______________________________________/
                        the wrapper refers to the plain module, too
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)

from thunder_zero.comm.group import hybrid_mesh
from thunder_zero.frontends.arguments import Arguments, check_arguments
from thunder_zero.frontends.plugin import zero
from thunder_zero.frontends.transform import ZeroTransform
from thunder_zero.frontends.zero_module import ZeroModule
from thunder_zero.optim.global_numbers import clip_grad_norm_
from thunder_zero.plan.policy import Policy
from thunder_zero.sharded.dtensors import parts_of
from thunder_zero.sharded.full_state_dict import (
    full_optimizer_state_dict,
    shard_optimizer_state_dict,
    step_shards,
)

import thunder
from thunder.core.module import ThunderModule

try:
    from lightning.fabric.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.fabric.strategies import DDPStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"thunder_zero.lightning needs Lightning ({error}); run pip install -e '.[lightning]' in a checkout"
    ) from error

if TYPE_CHECKING:
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from torch.optim import Optimizer

TIMEOUT = timedelta(minutes=30)  # the default of torch and Fabric
SET_BY_FABRIC = ("process_group", "mesh", "device")


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
        jit_options: further arguments of ``thunder.jit``, such as ``{"executors": [...]}``.
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
        require_left_to_fabric(arguments)
        if not isinstance(policy, Policy):
            arguments.setdefault("broadcast_from", 0)
        self._given = check_arguments(policy, **arguments)
        self.mesh_shape = mesh_shape
        self.jit_options = dict(jit_options or {})
        # An attribute of Fabric's strategies: Fabric.no_backward_sync calls this object's method.
        self._backward_sync_control = NoBackwardSync()

    @property
    def policy(self) -> Policy:
        """The policy that the arguments ask for."""
        return self._given.policy

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
        if isinstance(module, ZeroModule):
            raise RuntimeError(
                f"{type(module._model).__name__} is already sharded; give Fabric the plain module, and ZeroStrategy "
                f"the arguments of ZeroTransform"
            )
        if not isinstance(module, ThunderModule):
            options = dict(self.jit_options)
            ours = ZeroTransform(self.policy, **self._where())
            return Forward(thunder.jit(module, transforms=[*options.pop("transforms", ()), ours], **options), module)
        if self.jit_options:
            raise TypeError(
                f"ZeroStrategy has jit_options ({', '.join(self.jit_options)}), but the module is already jitted; give "
                f"Fabric the plain module, or ZeroStrategy no jit_options"
            )
        model = zero(module, self.policy, **self._where())
        module._overrides_parameters.clear()  # Fabric's wrapper refers to it, and these are the full weights
        return Forward(model, module)

    def _where(self) -> Arguments:
        """The arguments of ZeroTransform besides the policy; a collective if there is a mesh."""
        mesh, sources = None, self._given.sources
        if self.mesh_shape is not None:
            mesh = hybrid_mesh(self.mesh_shape, self.root_device)
        return Arguments(device=self.root_device, mesh=mesh, init=sources.init, weights=sources.weights)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make the optimizer step the shards, whichever parameters it was built on, and load full state dicts."""
        step_shards(optimizer)
        optimizer.register_load_state_dict_pre_hook(shard_optimizer_state_dict, prepend=True)
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
        return get_model_state_dict(module.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a plain module's full state dict into the shards.

        Raises:
            RuntimeError: ``strict``, and names are missing or unexpected.
            ValueError: a parameter has another shape.
        """
        if not isinstance(module, Forward):
            super().load_module_state_dict(module, state_dict, strict)
            return
        module.model.load_state_dict(parts_of(state_dict, module.model.state_dict()), strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's full state dict on rank 0, on the CPU, and an empty one on other ranks; a collective."""
        return full_optimizer_state_dict(optimizer, wanted=self.is_global_zero)


class NoBackwardSync:
    """Implements ``Fabric.no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """The sharded model's ``no_sync``, if enabled."""
        return zero_module(module).no_sync() if enabled else nullcontext()


class Forward(nn.Module):
    """The module inside Fabric's wrapper: calls the sharded model.

    Args:
        model: the sharded model.
        module: the module that Fabric was given. Fabric sets another method as its ``forward`` to call that method.
    """

    def __init__(self, model: ZeroModule, module: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._current_forward = partial(vars(module).get, "forward")  # and not the module itself, a submodule then
        self._own_forward = self._current_forward()

    @torch.compiler.disable  # Fabric applies torch.compile to this if it was applied to the module
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the sharded model.

        Raises:
            RuntimeError: Fabric has replaced forward by another method, which Thunder has not compiled.
        """
        if self._current_forward() is not self._own_forward:
            raise RuntimeError(
                f"a method of {type(self.model.plain).__name__} was called through Fabric's wrapper instead of forward "
                f"(mark_forward_method, training_step), but Thunder compiles forward alone; move the method's code "
                f"into forward"
            )
        return self.model(*args, **kwargs)


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


def require_left_to_fabric(arguments: Arguments) -> None:
    """Raise if an argument of ZeroTransform is one that Fabric sets.

    Raises:
        TypeError: naming the argument.
    """
    for name in SET_BY_FABRIC:
        if name in arguments:
            raise TypeError(
                f"ZeroStrategy does not take {name}: Fabric sets it; give Fabric accelerator and devices, and "
                f"ZeroStrategy mesh_shape"
            )


def require_supported(precision: Precision) -> None:
    """Raise if a plugin would wrap modules that Thunder compiles.

    Raises:
        TypeError: the plugin is not one of those for torch's own dtypes.
    """
    if type(precision) not in (Precision, HalfPrecision, DoublePrecision, MixedPrecision):
        raise TypeError(
            f"ZeroStrategy does not support precision={precision.precision!r} ({type(precision).__name__}); choose "
            f"'32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'"
        )
