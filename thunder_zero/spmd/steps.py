"""Runs one step of the plain module in float64, and of a parallel model on each rank.

::

    batch  ----------------------> plain module    -> Step: loss, gradients
    part 0 -> rank 0, a thread --> parallel model  -> RankValues: Step, values before it, norm
    part 1 -> rank 1, a thread --> parallel model  -> RankValues
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

NOISE = 0.1  # of the root mean square of a parameter
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")  # in paths of wrapped modules
Loss = Callable[[Any, Any], Tensor]  # of model and batch
Clip = Callable[[Any, float], Any]  # of model and max_norm; returns the norm
Parallelize = Callable[[Any, DeviceMesh], Any]  # of model and mesh; returns the parallel model, or None


@dataclass(frozen=True)
class Step:
    """What one forward and backward gave: full tensors."""

    loss: Tensor
    grads: dict[str, Tensor | None]


@dataclass(frozen=True)
class RankValues:
    """What one rank has of a parallel model. ``values`` are the parameters before the step."""

    step: Step
    values: dict[str, Tensor]
    norm: Tensor | None
    note: str  # why there is no norm
    untied: dict[str, str]  # pairs of names that are one parameter in the plain module, and two here
    whole_along: dict[str, set[str]]  # the axes along which each rank has the whole parameter


@dataclass
class Steps:
    """One plain module, one batch and a function that makes the module parallel. Ranks call :meth:`run_rank`."""

    module: nn.Module
    batch: Any
    axes: Mapping[str, int]
    data_axes: Sequence[str]  # ranks along them have different parts of the batch
    loss: Loss
    parallelize: Parallelize
    clip: Clip | None
    max_norm: float
    lock: Any = field(default_factory=Lock)
    has_grad: list[set[str]] = field(default_factory=list)  # of each rank, in any order

    @property
    def data_ranks(self) -> int:
        """The number of parts of the batch."""
        return prod(self.axes[name] for name in self.data_axes)

    def part_of(self, rank: int) -> int:
        """Return the index of the part of the batch that a rank has."""
        shape = [size if name in self.data_axes else 1 for name, size in self.axes.items()]
        parts = torch.arange(self.data_ranks).reshape(shape).expand(*self.axes.values())
        return int(parts.flatten()[rank])

    def run_plain(self) -> Step:
        """Run the plain module's step on the whole batch.

        Raises:
            ValueError: ranks cannot divide the batch, or the step is not finite, or another call gives another loss.
        """
        cut(self.batch, 0, self.data_ranks)  # raises before ranks start
        step = self._plain_step(self.batch)
        finite = {name: bool(grad.isfinite().all()) for name, grad in step.grads.items() if grad is not None}
        if wrong := [
            name for name, is_finite in {"the loss": bool(step.loss.isfinite()), **finite}.items() if not is_finite
        ]:
            raise ValueError(f"the plain module gives no finite values: {wrong[0]}; give another batch or loss=")
        with torch.no_grad():
            again = full(self.loss(deepcopy(self.module), self.batch)).reshape(())
        if not torch.equal(step.loss, again):
            first, second = float(step.loss), float(again)
            raise ValueError(f"the plain module's loss is random: {first:.6g}, then {second:.6g}; turn that off")
        return step

    def run_parts(self) -> list[Step]:
        """Run the plain module's step on each part of the batch."""
        return [self._plain_step(cut(self.batch, index, self.data_ranks)) for index in range(self.data_ranks)]

    def _plain_step(self, batch: Any) -> Step:
        module = deepcopy(self.module)
        loss = self._backward(module, batch)
        return Step(loss, {name: param.grad for name, param in names_of(module).items()})

    def _backward(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"the loss is {getattr(loss, 'shape', loss)!r}; return a tensor with one element")
        loss.backward()
        return full(loss).reshape(())

    def run_rank(self, rank: int) -> RankValues:
        """Run the parallel model's step on this thread's rank."""
        everyone = dist.new_group([*range(prod(self.axes.values()))])  # so that no collective of the user meets ours
        mesh = init_device_mesh("cpu", tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))
        with self.lock:
            plain = deepcopy(self.module)
        model = self.parallelize(plain, mesh)
        model = plain if model is None else model
        dist.barrier(everyone)
        params = names_of(model)
        values = {name: full(param) for name, param in params.items()}
        loss = self._backward(model, cut(self.batch, self.part_of(rank), self.data_ranks))
        step = Step(loss, self._gradients(names_of(model), everyone))
        norm, note = self._clip(model)
        dist.barrier(everyone)
        plain_params = names_of(self.module)
        whole = {
            name: _whole_along(params[name], param, mesh) for name, param in plain_params.items() if name in params
        }
        return RankValues(step, values, norm, note, _untied(plain_params, params), whole)

    def _gradients(self, params: Mapping[str, nn.Parameter], everyone: dist.ProcessGroup) -> dict[str, Tensor | None]:
        """Return full gradients. Gradients that some ranks lack are not gathered: the others would wait forever."""
        with self.lock:
            self.has_grad.append({name for name, param in params.items() if param.grad is not None})
        dist.barrier(everyone)
        everywhere = set.intersection(*self.has_grad)
        grads: dict[str, Tensor | None] = {}
        for name, param in params.items():
            if param.grad is not None:
                grads[name] = full(param.grad) if name in everywhere else param.grad
        return grads

    def _clip(self, model: nn.Module) -> tuple[Tensor | None, str]:
        """Clip the gradients. Return their norm before, or why there is none."""
        if self.clip is not None:
            return full(torch.as_tensor(self.clip(model, self.max_norm))), ""
        try:
            return full(nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)), ""
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            return None, f"the norm is not compared: torch's clip_grad_norm_ raises {type(error).__name__}: {reason}"


def first_names(params: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return a mapping from names to the first name of the parameter. A tied parameter has several names."""
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(param), name) for name, param in params.items()}


def _untied(plain: Mapping[str, nn.Parameter], params: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return pairs of names that are one parameter in the plain module, and several in the parallel model."""
    return {
        first: name
        for name, first in first_names(plain).items()
        if name in params and first in params and params[name] is not params[first]
    }


def _whole_along(param: Tensor, plain: Tensor, mesh: DeviceMesh) -> set[str]:
    """Return the axes along which each rank has the whole parameter."""
    axes = set(mesh.mesh_dim_names or ())
    if not isinstance(param, DTensor):
        return axes if param.shape == plain.shape else set()
    placements = zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=False)
    return axes - {name for name, placement in placements if placement.is_shard()}


# the plain module, and its batch in parts


def plain_module(build: Callable[[], nn.Module], batch: Any) -> tuple[nn.Module, Any, list[str]]:
    """Return a copy of the module and the batch in float64, and notes on what was changed.

    Noise is added to parameters, so that zeros and ones hide no error.
    """
    module = build()
    if not isinstance(module, nn.Module):
        raise TypeError(f"build returns {type(module).__name__}; return the plain nn.Module")
    if name := next((name for name, tensor in _tensors(module) if tensor.is_meta), None):
        raise ValueError(f"{name!r} is on the meta device; let build() return a module with values")
    if name := next((name for name, tensor in _tensors(module) if isinstance(tensor, DTensor)), None):
        raise ValueError(f"{name!r} is a DTensor already; let build() return the plain module")
    module = deepcopy(module).to("cpu", torch.float64)
    notes = list(_turn_dropout_off(module))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            if param.is_floating_point():
                scale = NOISE * (float(param.square().mean().sqrt()) or 1.0)
                param.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype), alpha=scale)
    return module, tree_map(_to_float64, batch), notes


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _to_float64(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value


def _turn_dropout_off(module: nn.Module) -> Iterator[str]:
    """Set the probabilities of dropout to zero, also those that modules pass to functions."""
    paths = []
    for path, part in module.named_modules():
        names = [name for name, value in vars(part).items() if "drop" in name and isinstance(value, float) and value]
        names += ["p"] if "drop" in type(part).__name__.lower() and getattr(part, "p", None) else []
        for name in names if part.training else []:
            setattr(part, name, 0.0)
            paths.append(path)
    if paths:
        yield f"dropout is set to 0 in {len(paths)} module{'s' if paths[1:] else ''}, such as {paths[0]!r}"


def cut(batch: Any, index: int, count: int) -> Any:
    """Return part ``index`` of ``count`` equal parts of a batch, along the first dimension of each tensor."""
    for tensor in tree_leaves(batch):
        if isinstance(tensor, Tensor) and (tensor.ndim == 0 or len(tensor) % count):
            raise ValueError(
                f"a tensor of the batch has the shape {tuple(tensor.shape)}, which {count} ranks with different parts "
                f"cannot divide along the first dimension; give a larger batch, or make constants in loss="
            )
    return tree_map(lambda value: value.chunk(count)[index] if isinstance(value, Tensor) else value, batch)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """Call the model. Return ``.loss`` of its output, or the mean square of an output tensor."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, list | tuple) else model(batch)
    for name in ("loss", "logits"):
        if isinstance(getattr(output, name, None), Tensor):
            output = getattr(output, name)
            break
    if not isinstance(output, Tensor):
        raise TypeError(f"the model returns {type(output).__name__}; give a function of model and batch as loss=")
    output = output.full_tensor() if isinstance(output, DTensor) else output
    return output if output.ndim == 0 else output.square().mean()


def names_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by their names in the plain module. A tied parameter has several names."""
    result = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        result[name] = param
    is_wrapped = all(name.startswith("module.") for name in result)  # as DistributedDataParallel does
    return {name.removeprefix("module.") if is_wrapped else name: param for name, param in result.items()}


def full(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, or of the full tensor of a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()  # a replica is not copied
