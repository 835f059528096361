"""A strategy for Lightning Fabric, so that a Fabric script trains with DDP, ZeRO-1, ZeRO-2 or ZeRO-3 in Thunder.

Nothing else in the package imports Lightning, and ``import thunder_zero`` does not import this file. It takes
``lightning.fabric`` and not the package ``lightning_fabric``: each has classes of its own, and a Fabric accepts its own
strategies only; ``lightning`` is the one that LitGPT uses.

    script -> Fabric's wrapper -> Forward -> ZeroModule -> the plain module, with placeholders
                       \\______________________________________/
                        the wrapper keeps the plain module, too
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thunder_zero.arguments import policy_of
from thunder_zero.comm.group import hybrid_mesh
from thunder_zero.module import ZeroModule
from thunder_zero.plugin import zero
from thunder_zero.policy import Policy
from thunder_zero.runtime.clip import clip_grad_norm_
from thunder_zero.state_dict import full_state
from thunder_zero.state_dict.api import StateDictOptions, get_model_state_dict, set_model_state_dict
from thunder_zero.transform import ZeroTransform

import thunder
from thunder.core.module import ThunderModule

try:
    from lightning.fabric.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.fabric.strategies import DDPStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"thunder_zero.lightning needs Lightning ({error}); install it with pip install 'thunder-zero[lightning]'"
    ) from error

if TYPE_CHECKING:
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from torch.optim import Optimizer

TIMEOUT = timedelta(minutes=30)  # torch's and Fabric's


class ZeroStrategy(DDPStrategy):
    """DDP, ZeRO-1, ZeRO-2 or ZeRO-3 in Thunder, as a strategy of Lightning Fabric.

    >>> fabric = Fabric(accelerator="cpu", devices=2, strategy=ZeroStrategy(stage=3))
    >>> fabric.launch()
    >>> model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))

    Processes, process group and Fabric's own collectives are those of DDPStrategy: with its launcher, or under
    torchrun. An optimizer may be built before ``setup`` or after it; it steps this rank's rows once Fabric has set it
    up. ``Fabric.save`` writes one file with full tensors, of the model and of optimizers, that any number of ranks
    loads, and plain torch, too; all ranks must call it, and ``clip_gradients``. The wrapper's own ``state_dict`` is the
    plain module's, NaN all over.

    Args:
        policy: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        stage: 0 DDP, 1 ZeRO-1, 2 ZeRO-2, 3 ZeRO-3 (default).
        mesh_shape: copies of the model, and ranks that share one (hybrid sharding); all ranks share one if None.
        init, weights: where a module on the meta device gets its values from, as ZeroTransform takes them.
        jit_options: what ``thunder.jit`` takes beside the module, such as ``{"executors": [...]}``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision, process_group_backend, timeout,
            start_method: as DDPStrategy takes them; Fabric sets the first five from its own arguments.
        changes: fields of the policy that differ from it. ``broadcast_from`` is 0 unless a policy or this says
            otherwise: as with DDP, ranks may have built the module with different seeds.

    Raises:
        ValueError: a stage or a field out of range.
        TypeError: not a policy; a field that policies do not have; a precision plugin that is not supported.
    """

    def __init__(
        self,
        policy: Policy | int | None = None,
        *,
        stage: int | None = None,
        mesh_shape: tuple[int, int] | None = None,
        init: Callable[[nn.Module], object] | None = None,
        weights: Mapping[str, Tensor] | None = None,
        jit_options: Mapping[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        start_method: str = "popen",
        **changes: Any,
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
        if not isinstance(policy, Policy):
            changes.setdefault("broadcast_from", 0)
        if stage is not None:
            changes["stage"] = stage
        self.policy = policy_of(policy, changes)
        self.mesh_shape = mesh_shape
        self._sources = {"init": init, "weights": weights}
        self.jit_options = dict(jit_options or {})
        # Private to Fabric: Fabric.no_backward_sync calls this object's one method.
        self._backward_sync_control = NoBackwardSync()

    def setup_environment(self) -> None:
        """Start the process group.

        Raises:
            TypeError: a precision plugin that is not supported.
        """
        require_supported(self.precision)
        super().setup_environment()

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """For ``Fabric.init_module``: full modules are built on the CPU, for only shards go to the device.

        Raises:
            ValueError: ``empty_init=True``: there would be no values to shard.
        """
        if empty_init:
            raise ValueError(
                "ZeroStrategy shards values, and empty_init=True leaves none; build the module with empty_init=False"
            )
        stack = ExitStack()
        stack.enter_context(super().module_init_context(empty_init))
        stack.enter_context(torch.device("cpu"))  # the innermost counts
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: ``setup_module`` brings the shards to the device, and the full module need not fit there."""

    def setup_module(self, module: nn.Module) -> Forward:
        """Jit the module with ZeroTransform, or shard a jitted one; a collective.

        Raises:
            TypeError: ``jit_options`` and a module that is jitted already.
            ValueError, RuntimeError: it is sharded already; and what ZeroTransform raises.
        """
        if isinstance(module, ZeroModule):
            raise RuntimeError(
                f"{type(module._model).__name__} is sharded already; give Fabric the plain module, and ZeroStrategy "
                f"what ZeroTransform was given"
            )
        if not isinstance(module, ThunderModule):
            options = dict(self.jit_options)
            ours = ZeroTransform(self.policy, **self._where())
            return Forward(thunder.jit(module, transforms=[*options.pop("transforms", ()), ours], **options), module)
        if self.jit_options:
            raise TypeError(
                f"ZeroStrategy has jit_options ({', '.join(self.jit_options)}) and was given a module that is jitted "
                f"already; give it the plain module, or no jit_options"
            )
        model = zero(module, self.policy, **self._where())
        module._overrides_parameters.clear()  # Fabric's wrapper keeps it, and with these the full weights
        return Forward(model, module)

    def _where(self) -> dict[str, Any]:
        """What ZeroTransform takes beside the policy; a collective, where there is a mesh."""
        mesh = None
        if self.mesh_shape is not None:
            mesh = hybrid_mesh(self.mesh_shape, self.root_device)
        return {"device": self.root_device, "mesh": mesh, **self._sources}

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let the optimizer step the shards, whichever parameters it was built on, and load full state dicts."""
        full_state.step_shards(optimizer)
        optimizer.register_load_state_dict_pre_hook(full_state.shard_optimizer_state_dict)
        return optimizer

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the global norm of all of the module's gradients, as :func:`~thunder_zero.clip_grad_norm_`."""
        return clip_grad_norm_(zero_module(module), max_norm, float(norm_type), error_if_nonfinite)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The full state dict on rank 0, on the CPU, and an empty one on others; a collective."""
        if not isinstance(module, Forward):
            return super().get_module_state_dict(module)  # type: ignore[no-any-return]
        return get_model_state_dict(module.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a plain module's full state dict into the shards.

        Raises:
            RuntimeError: ``strict``, and names that are missing or not known.
            ValueError: a parameter of another shape.
        """
        if not isinstance(module, Forward):
            super().load_module_state_dict(module, state_dict, strict)
            return
        set_model_state_dict(module.model, state_dict, options=StateDictOptions(strict=strict))

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's full state dict on rank 0, on the CPU, and an empty one on others; a collective."""
        return full_state.full_optimizer_state_dict(optimizer, wanted=self.is_global_zero)


class NoBackwardSync:
    """Behind ``Fabric.no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """``no_sync`` of the sharded model, where it is enabled."""
        return zero_module(module).no_sync() if enabled else nullcontext()


class Forward(nn.Module):
    """What stands in Fabric's wrapper: calls the sharded model, and shows its shards as its parameters.

    Modules that hold others look for parameters with ``named_modules``, and would find the placeholders in the plain
    module. So this yields a view of each of the plain module's modules instead, with shards as parameters, and hides
    the plain module, which the wrapper holds beside it.

    Args:
        model: the sharded model.
        given: what Fabric was given. Fabric sets another method as its ``forward`` to have that called.
    """

    def __init__(self, model: ZeroModule, given: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._forward_of = partial(vars(given).get, "forward")  # and not the module itself, which would be listed
        self._forward_then = self._forward_of()

    @torch.compiler.disable  # Fabric puts torch.compile around this, if it was around the module
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the sharded model.

        Raises:
            RuntimeError: another method stands in the place of forward; Thunder has compiled forward.
        """
        if self._forward_of() is not self._forward_then:
            raise RuntimeError(
                f"a method of {type(self.model.plain).__name__} was called through Fabric's wrapper in the place of "
                f"forward (mark_forward_method, training_step), and Thunder compiles forward alone; let forward do "
                f"what the method does"
            )
        return self.model(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module, and views of the plain module's modules, whose parameters are the shards."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        plain = self.model.plain
        memo.update((self, self.model, *plain.modules()))
        yield prefix, self
        root = f"{prefix}.model" if prefix else "model"
        for path, module in plain.named_modules(remove_duplicate=remove_duplicate):
            yield f"{root}.{path}" if path else root, view(module, path, self.model)


def view(module: nn.Module, path: str, model: ZeroModule) -> nn.Module:
    """A plain module's submodule with the sharded model's parameters and buffers: of its class, for ``isinstance``."""

    def own(names: Mapping[str, Tensor | None], get: Any) -> dict[str, Any]:
        return {name: None if old is None else get(f"{path}.{name}" if path else name) for name, old in names.items()}

    parameters, buffers = own(module._parameters, model.get_parameter), own(module._buffers, model.get_buffer)
    seen: nn.Module = object.__new__(type(module))
    vars(seen).update({**vars(module), "_parameters": parameters, "_buffers": buffers})
    return seen


def zero_module(model: nn.Module) -> ZeroModule:
    """The sharded model inside of what ``Fabric.setup`` returned, for ``print_trace``, ``global_mean`` and others.

    >>> tz.print_trace(zero_module(model))

    Raises:
        TypeError: there is none.
    """
    found = next((module.model for module in model.modules() if isinstance(module, Forward)), None)
    if found is None:
        raise TypeError(
            f"{type(model).__name__} is no model that Fabric has set up with ZeroStrategy; give the one that "
            f"fabric.setup or fabric.setup_module returned"
        )
    return found


def require_supported(precision: Precision) -> None:
    """Raise where a plugin wraps what Thunder compiles.

    Raises:
        TypeError: the plugin is none of torch's own dtypes.
    """
    if type(precision) not in (Precision, HalfPrecision, DoublePrecision, MixedPrecision):
        raise TypeError(
            f"ZeroStrategy does not support precision={precision.precision!r} ({type(precision).__name__}); choose "
            f"'32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'"
        )
