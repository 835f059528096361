"""Trains a module under ``tz.compile`` on each rank, and in eager mode for all ranks, and compares every number.

The gradient of a parameter must be the mean over ranks of what eager mode gives for each rank's batch, seed and
buffers; outputs, inputs, their gradients, and buffers must be those of this rank's replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_leaves

import thunder_zero as tz
from tests.harness.as_one_process import assert_near, assert_same_parameters, assert_same_state
from tests.harness.models import fresh


def loss_of(outputs: Any) -> Tensor:
    """Return the sum of the mean sines of all outputs that have gradients: squares of what a norm returns would add up
    to a constant."""
    leaves = [leaf for leaf in tree_leaves(opened(outputs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    parts = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    return torch.stack([part.float().sin().mean() for part in parts]).sum()


def call(model: Any, *inputs: Any) -> Any:
    """Call a model."""
    return model(*inputs)


def differentiate(outputs: Any, inputs: Sequence[Any]) -> None:
    """Run backward for all outputs."""
    loss_of(outputs).backward()


def trains_as_eager(
    rank: int,
    world_size: int,
    make: Callable[[], nn.Module],
    inputs_of: Callable[[int], Sequence[Any]],
    stage: int,
    *,
    forward: Callable[..., Any] = call,
    backward: Callable[[Any, Sequence[Any]], None] = differentiate,
    steps: int = 2,
    tolerance: float | None = None,
) -> Any:
    """Train some steps, and compare after each; returns the model.

    Args:
        make: a module, with the same values after the same seed.
        inputs_of: inputs that a seed decides.
        forward: gets the model and inputs, and returns outputs.
        backward: gets outputs and inputs.
        tolerance: of relative errors, instead of that of the dtype.
    """
    torch._dynamo.reset()  # all models whose class is torch's count as programs of one function of dynamo
    model: Any = tz.compile(_initialized(make, inputs_of), stage=stage)
    replicas = [_initialized(make, inputs_of) for _ in range(world_size)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, *replicas)]
    for step in range(steps):
        results = []
        for each, of in ((model, rank), *((replica, other) for other, replica in enumerate(replicas))):
            inputs = inputs_of(10 * step + of)
            torch.manual_seed(100 * step + of)
            outputs = forward(each, *inputs)
            backward(outputs, inputs)
            grads = [leaf.grad for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_leaf]
            results.append({"output": outputs, "input": inputs, "gradient of input": grads})
        for kind, found in results[0].items():
            assert_same_leaves(found, results[1 + rank][kind], f"{kind} of step {step}", tolerance)
        for params in zip(*(replica.parameters() for replica in replicas), strict=True):
            given = [param.grad for param in params if param.grad is not None]
            mean = torch.stack(given).sum(0) / world_size if given else None
            for param in params:
                param.grad = None if mean is None else mean.clone()
        assert_same_parameters(model, replicas[rank], f" in step {step}", tolerance)
        buffers = zip(model.plain.named_buffers(), replicas[rank].buffers(), strict=True)
        for (name, buffer), right in buffers:
            assert_near(buffer, right, f"buffer {name} after step {step}", tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, replicas[rank], tolerance)
    return model


def assert_same_as_eager(module: nn.Module, *inputs: Any) -> Any:
    """Train a step under tz.compile in stage 3 and in eager mode, with the same random numbers: outputs and all
    gradients are equal. Returns the compiled model."""
    model = tz.compile(deepcopy(module), 3)
    results = []
    for each in (model, module):
        torch.manual_seed(1)
        out = each(*deepcopy(inputs))
        out.float().square().sum().backward()
        results.append(out)
    torch.testing.assert_close(*results)
    for (name, mine), right in zip(model.named_parameters(), module.parameters(), strict=True):
        assert (mine.grad is None) == (right.grad is None), name
        if right.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), right.grad)
    return model


def _initialized(make: Callable[[], nn.Module], inputs_of: Callable[[int], Sequence[Any]]) -> nn.Module:
    """A module, after a call if it is a lazy one."""
    module: nn.Module = fresh(make)
    if any(map(is_lazy, module.parameters())):
        module(*inputs_of(99))
    return module


def opened(tree: Any) -> Any:
    """A tree with dicts in place of dataclasses."""
    if is_dataclass(tree) and not isinstance(tree, type):
        return {
            "class": type(tree).__name__,
            **{field.name: opened(getattr(tree, field.name)) for field in fields(tree)},
        }
    return tree


def assert_same_leaves(found: Any, right: Any, where: str, tolerance: float | None = None) -> None:
    """Structures are the same, and so are tensors, whether they have gradients, and other values."""
    (mine, structure), (theirs, expected) = tree_flatten(opened(found)), tree_flatten(opened(right))
    assert structure == expected, f"{where}: {structure} instead of {expected}"
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(other, Tensor):
            assert one.requires_grad == other.requires_grad, f"{where} {number} needs gradients: {one.requires_grad}"
            assert_near(one.detach(), other.detach(), f"{where} {number}", tolerance)
        else:
            assert (type(one), one) == (type(other), other), f"{where} {number}"
