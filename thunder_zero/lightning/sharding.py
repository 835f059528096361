"""Shards a module as the arguments of a strategy ask, for Fabric and the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
from lightning.fabric import plugins as fabric_plugins
from lightning.pytorch import plugins as trainer_plugins
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from thunder_zero.capture.arguments import Arguments, check_arguments
from thunder_zero.capture.plugin import zero
from thunder_zero.capture.transform import ZeroTransform
from thunder_zero.capture.zero_module import ZeroModule
from thunder_zero.comm.group import hybrid_mesh
from thunder_zero.compat.jitted import forget_tensors
from thunder_zero.plan.policy import Policy
from thunder_zero.sharded.frozen import decoded_values

import thunder
from thunder.core.module import ThunderModule

TIMEOUT = timedelta(minutes=30)  # the default of torch and Fabric
SET_BY_LIGHTNING = ("process_group", "mesh", "device")
SUPPORTED = [  # these plugins do not wrap modules
    kind
    for plugins in (fabric_plugins, trainer_plugins)
    for kind in (plugins.Precision, plugins.HalfPrecision, plugins.DoublePrecision, plugins.MixedPrecision)
]


class Sharding:
    """The checked arguments of a strategy. See :class:`~thunder_zero.lightning.ZeroStrategy` for errors."""

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
    """Raise TypeError if a plugin would wrap modules."""
    if type(precision) not in SUPPORTED:
        raise TypeError(
            f"thunder_zero does not support precision={precision.precision!r} ({type(precision).__name__}); choose "
            f"'32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'"
        )
