"""The plain module and the batch of a comparison: float64, no dropout, parts of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

NOISE = 0.1  # of the root mean square of a parameter
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")  # in paths of wrapped modules


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
