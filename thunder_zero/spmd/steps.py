"""Runs one step of the plain module in float64, and of a parallel model on each rank.

::

    batch  ----------------------> plain module    -> Step: loss, gradients
    part 0 -> rank 0, a thread --> parallel model  -> RankStep: Step, values before it, norm
    part 1 -> rank 1, a thread --> parallel model  -> RankStep
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

NOISE = 0.1  # of the root mean square of a parameter
WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")  # in paths of parameters
Loss = Callable[[Any, Any], Tensor]  # of model and batch
Clip = Callable[[Any, float], Any]  # of model and max_norm; returns the norm
Parallelize = Callable[[Any, DeviceMesh], Any]  # of model and mesh; returns the parallel model, or None


@dataclass(frozen=True)
class Step:
    """What one forward and backward gave: full tensors. The plain module has zeros in place of missing gradients."""

    loss: Tensor
    grads: dict[str, Tensor]


@dataclass(frozen=True)
class RankStep(Step):
    """What one rank has of a parallel model."""

    params: Mapping[str, Tensor]
    values: dict[str, Tensor]  # the full parameters before the step
    norm: Tensor | None
    note: str  # why there is no norm


@dataclass(frozen=True)
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
        """Run the plain module's step on the whole batch. Raise if it is not finite, or has another loss again."""
        cut(self.batch, 0, self.data_ranks)  # raises before ranks start
        step = self._plain_step(self.batch)
        for name, value in {"the loss": step.loss, **step.grads}.items():
            if not value.isfinite().all():
                raise ValueError(f"the plain module gives no finite values: {name}; give another batch or loss=")
        with torch.no_grad():
            again = full(self.loss(deepcopy(self.module), self.batch)).reshape(())
        if not torch.equal(step.loss, again):
            losses = f"{float(step.loss):.6g}, then {float(again):.6g}"
            raise ValueError(f"the plain module's loss is random: {losses}; turn that off")
        return step

    def run_parts(self) -> list[Step]:
        """Run the plain module's step on each part of the batch."""
        return [self._plain_step(cut(self.batch, index, self.data_ranks)) for index in range(self.data_ranks)]

    def _plain_step(self, batch: Any) -> Step:
        module = deepcopy(self.module)
        loss, params = self._backward(module, batch), names_of(module)
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()}
        return Step(loss, grads)

    def _backward(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"the loss is {getattr(loss, 'shape', loss)!r}; return a tensor with one element")
        loss.backward()
        return full(loss).reshape(())

    def run_rank(self, rank: int) -> RankStep:
        """Run the parallel model's step on this thread's rank."""
        everyone = dist.new_group([*range(prod(self.axes.values()))])  # so that no collective of the user meets ours
        mesh = init_device_mesh("cpu", tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))
        plain = deepcopy(self.module)
        model = self.parallelize(plain, mesh)
        model = plain if model is None else model
        dist.barrier(everyone)
        params = names_of(model)
        values = {name: full(param) for name, param in params.items()}
        loss = self._backward(model, cut(self.batch, self.part_of(rank), self.data_ranks))
        grads = self._gradients(names_of(model), everyone)
        norm, note = self._clip(model)
        dist.barrier(everyone)
        return RankStep(loss, grads, params, values, norm, note)

    def _gradients(self, params: Mapping[str, nn.Parameter], everyone: dist.ProcessGroup) -> dict[str, Tensor]:
        """Return full gradients. Gradients that some ranks lack are not gathered: the others would wait forever."""
        grads = {name: param.grad for name, param in params.items() if param.grad is not None}
        names = [*names_of(self.module)]
        on_all = torch.tensor([name in grads for name in names]).int()
        dist.all_reduce(on_all, dist.ReduceOp.MIN, group=everyone)
        gathered = {name: full(grads[name]) for name, is_on_all in zip(names, on_all, strict=True) if is_on_all}
        return grads | gathered

    def _clip(self, model: nn.Module) -> tuple[Tensor | None, str]:
        """Clip the gradients. Return their norm before, or why there is none."""
        if self.clip is not None:
            return full(torch.as_tensor(self.clip(model, self.max_norm))), ""
        try:
            return full(nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)), ""
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            return None, f"the norm is not compared: torch's clip_grad_norm_ raises {type(error).__name__}: {reason}"


def names_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by their names in the plain module. A tied parameter has several names."""
    params = {WRAPPERS.sub("", name): param for name, param in model.named_parameters(remove_duplicate=False)}
    is_wrapped = all(name.startswith("module.") for name in params)  # as DistributedDataParallel does
    return {name.removeprefix("module.") if is_wrapped else name: param for name, param in params.items()}


def full(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, or of the full tensor of a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()  # a replica is not copied


# the plain module, and its batch in parts


def plain_module(build: Callable[[], nn.Module], batch: Any) -> tuple[nn.Module, Any, list[str]]:
    """Return a copy of the module and the batch in float64, and notes on what was changed."""
    module = build()
    if not isinstance(module, nn.Module):
        raise TypeError(f"build returns {type(module).__name__}; return the plain nn.Module")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta or isinstance(tensor, DTensor):
            where = "on the meta device" if tensor.is_meta else "a DTensor already"
            raise ValueError(f"{name!r} is {where}; let build() return a plain module with values")
    module = deepcopy(module).to("cpu", torch.float64)
    notes = list(_turn_dropout_off(module))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():  # noise, so that zeros and ones hide no error
            if param.is_floating_point():
                scale = NOISE * (float(param.square().mean().sqrt()) or 1.0)
                param.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype), alpha=scale)
    return module, tree_map_only(Tensor, _to_float64, batch), notes


def _to_float64(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.double() if tensor.is_floating_point() else tensor


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

    def part(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or len(tensor) % count:
            raise ValueError(
                f"a tensor of the batch has the shape {tuple(tensor.shape)}, which {count} ranks with different parts "
                f"cannot divide along the first dimension; give a larger batch, or make constants in loss="
            )
        return tensor.chunk(count)[index]

    return tree_map_only(Tensor, part, batch)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """Call the model. Return ``.loss`` of its output, or the mean square of an output tensor."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, list | tuple) else model(batch)
    output = getattr(output, "loss", output)
    if not isinstance(output, Tensor):
        raise TypeError(f"the model returns {type(output).__name__}; give a function of model and batch as loss=")
    output = output.full_tensor() if isinstance(output, DTensor) else output
    return output if output.ndim == 0 else output.square().mean()
