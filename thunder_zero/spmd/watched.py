"""Follows a model that runs: the module that computes, placements, and optimizers' steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from thunder_zero.compat.private import StridedShard, disable_current_modes, peek_interpreter_stack
from thunder_zero.spmd.collectives import axes_of
from thunder_zero.spmd.lines import Parameter
from thunder_zero.spmd.tape import Tape


class WatchedModel:
    """What modules and optimizers do to values of a tape.

    Attributes:
        modules: the ``id`` of those that compute, the innermost one last.
        outermost: modules that were called while none computed. Checkpoints call modules inside again.
        is_active: whether a forward has begun.
    """

    def __init__(self, tape: Tape, mesh: DeviceMesh) -> None:
        self._tape, self._mesh = tape, mesh
        self.modules: list[int] = []
        self.outermost: list[nn.Module] = []
        self.is_active = False
        self._perturbed = dict[int, int]()  # storages of parameters, by their ``id``
        self._slices: dict[int, Parameter] = {}
        self._optimized: list[Tensor] = []
        self._gradients: dict[int, tuple[Tensor, int]] = {}  # by parameter, and the line at which an optimizer reads it

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Follow modules and optimizers inside the block."""
        handles = [
            register_module_forward_pre_hook(torch.compiler.disable(self._before_forward)),
            register_module_forward_hook(torch.compiler.disable(self._after_forward)),
            register_optimizer_step_pre_hook(torch.compiler.disable(self._before_step)),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        with torch.no_grad(), disable_current_modes():
            for item in module.parameters() if peek_interpreter_stack() is None else ():  # torch.func wraps them
                self._perturb(item)
        self.is_active = True
        if not self.modules:
            self.outermost.append(module)
        self.modules.append(id(module))
        self._note_slices(module)

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self.modules:  # modules inside may have been left by an exception, as checkpoints do
            del self.modules[self.modules.index(id(module)) :]
        self._note_slices(module)

    def _perturb(self, item: nn.Parameter) -> None:
        """Add noise to a parameter once: zeros and ones would hide faults."""
        local = local_of(item)
        is_off = nn.parameter.is_lazy(item) or local.is_meta or not local.is_floating_point()
        if is_off or id(item) in self._perturbed or self._tape.lines:
            return
        self._perturbed[id(item)] = self._tape.ref(local).storage
        dice = torch.Generator().manual_seed(len(self._perturbed))
        noise = 0.1 * torch.randn(local.shape, generator=dice)
        usual = local.isfinite() & (local.abs() < 1e3)
        local.data.copy_(torch.where(usual, local, torch.zeros((), dtype=local.dtype)) + noise.to(local.dtype))

    def _note_slices(self, module: nn.Module) -> None:
        """Note how gathered parameters of FSDP2 are sliced on the other axes."""
        for item in module.parameters(recurse=False):
            if isinstance(item, DTensor):
                part = self._placed("", item)
                is_cut = any(isinstance(dim, int) for dim in part.placements.values())
                if is_cut and len(part.placements) < self._mesh.ndim:
                    self._slices[part.ref.storage] = part

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for item in group["params"]:
                self._optimized.append(item)
                if item.grad is not None:
                    self._gradients[id(item)] = item.grad, len(self._tape.lines)

    def facts(self, model: nn.Module) -> Mapping[str, Any]:
        """Return what a ``StepRecord`` has of the model, by its names."""
        named = dict(model.named_parameters())
        held, stepped = {id(item) for item in named.values()}, {id(item) for item in self._optimized}
        end = len(self._tape.lines)
        grads = ((path, *self._gradients.get(id(item), (item.grad, end))) for path, item in named.items())
        return {
            "parameters": tuple(self._placed(path, item) for path, item in named.items() if not local_of(item).is_meta),
            "gradients": tuple(self._placed(path, grad, line) for path, grad, line in grads if grad is not None),
            "buffers": tuple(self._placed(*item) for item in model.named_buffers() if not local_of(item[1]).is_meta),
            "slices": tuple(self._slices.values()),
            "stepped": frozenset(path for path, item in named.items() if id(item) in stepped),
            "foreign": sum(id(item) not in held for item in self._optimized),
            "units": _units_of(model),
        }

    def _placed(self, path: str, item: Tensor, line: int = 0) -> Parameter:
        """Return a parameter, a gradient or a buffer, with its placements on the axes of a mesh."""
        placements: dict[str, int | str] = {}
        pieces: dict[str, int] = {}
        local = local_of(item)
        if isinstance(item, DTensor):
            dims = [placement.dim for placement in item.placements if isinstance(placement, Shard | StridedShard)]
            on_axes = [
                (axis, placement)
                for index, placement in enumerate(item.placements)
                for axis in axes_of(self._mesh, dist.get_process_group_ranks(item.device_mesh.get_group(index)))
            ]  # a flattened mesh has several axes in one dimension
            for axis, placement in on_axes:
                if isinstance(placement, Replicate | Partial):
                    placements[axis] = "replicate" if isinstance(placement, Replicate) else "partial"
                else:
                    placements[axis] = placement.dim % max(local.dim(), 1)  # type: ignore[attr-defined]
                if isinstance(placement, StridedShard) and dims.count(placement.dim) == 1:  # else FSDP2's own rows
                    pieces[axis] = int(placement.split_factor)
        return Parameter(path, self._tape.ref(local), placements, line, pieces, self._perturbed.get(id(item), -1))


def _units_of(model: nn.Module) -> dict[int, str]:
    """Return the outermost block that each module is in: a child of a list or of a sequence of modules."""
    result = {id(model): ""}
    for path, module in model.named_modules():
        for name, child in module.named_children():
            is_block = isinstance(module, nn.ModuleList | nn.Sequential) and not result[id(module)]
            result[id(child)] = f"{path}.{name}".lstrip(".") if is_block else result[id(module)]
    return result


def local_of(item: Tensor) -> Tensor:
    return item._local_tensor if isinstance(item, DTensor) else item
