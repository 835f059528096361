"""Trains a module under ``tz.compile`` on each rank, and an eager replica for each rank, and compares every number.

The gradient of a parameter must be the mean of the replicas' gradients. Each replica has its rank's batch, seed and
buffers. Outputs, inputs, their gradients, and buffers must be equal to those of this rank's replica.
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
    """Return the sum of the mean sines of all outputs that have gradients."""
    # Squares would not do: the squares of a norm's output add up to a constant.
    leaves = [leaf for leaf in tree_leaves(opened(outputs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    parts = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    return torch.stack([part.float().sin().mean() for part in parts]).sum()


def call(model: Any, *inputs: Any) -> Any:
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
    """Train some steps, and compare after each. Return the model.

    Args:
        make: builds a module, with equal values after equal seeds.
        inputs_of: returns inputs for a seed.
        forward: maps the model and inputs to outputs.
        backward: differentiates outputs; also gets the inputs.
        tolerance: limit of relative errors, instead of the dtype's.
    """
    torch._dynamo.reset()  # dynamo counts all models of a class as programs of one function, with a limit
    model: Any = tz.compile(_initialized(make, inputs_of), stage=stage)
    replicas = [_initialized(make, inputs_of) for _ in range(world_size)]
    optimizers = [torch.optim.SGD(module.parameters(), 0.1, momentum=0.9) for module in (model, *replicas)]
    for step in range(steps):
        results = []
        for part, module in ((rank, model), *enumerate(replicas)):
            inputs = inputs_of(10 * step + part)
            torch.manual_seed(100 * step + part)
            outputs = forward(module, *inputs)
            backward(outputs, inputs)
            grads = [leaf.grad for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_leaf]
            results.append({"output": outputs, "input": inputs, "gradient of input": grads})
        for kind, result in results[0].items():
            assert_same_leaves(result, results[1 + rank][kind], f"{kind} of step {step}", tolerance)
        for params in zip(*(replica.parameters() for replica in replicas), strict=True):
            local = [param.grad for param in params if param.grad is not None]
            mean = torch.stack(local).sum(0) / world_size if local else None
            for param in params:
                param.grad = None if mean is None else mean.clone()
        assert_same_parameters(model, replicas[rank], f" in step {step}", tolerance)
        buffers = zip(model.plain.named_buffers(), replicas[rank].buffers(), strict=True)
        for (name, buffer), expected in buffers:
            assert_near(buffer, expected, f"buffer {name} after step {step}", tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, replicas[rank], tolerance)
    return model


def assert_same_as_eager(module: nn.Module, *inputs: Any) -> Any:
    """Check outputs and gradients of a step under ``tz.compile`` in stage 3 against eager mode. Return the model."""
    model = tz.compile(deepcopy(module), 3)
    results = []
    for side in (model, module):
        torch.manual_seed(1)
        out = side(*deepcopy(inputs))
        out.float().square().sum().backward()
        results.append(out)
    torch.testing.assert_close(*results)
    for (name, param), expected in zip(model.named_parameters(), module.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    return model


def _initialized(make: Callable[[], nn.Module], inputs_of: Callable[[int], Sequence[Any]]) -> nn.Module:
    """Build a module; call it if it is lazy."""
    module: nn.Module = fresh(make)
    if any(map(is_lazy, module.parameters())):
        module(*inputs_of(99))
    return module


def opened(tree: Any) -> Any:
    """Return the tree, or a dict of its fields if it is a dataclass."""
    if is_dataclass(tree) and not isinstance(tree, type):
        return {
            "class": type(tree).__name__,
            **{field.name: opened(getattr(tree, field.name)) for field in fields(tree)},
        }
    return tree


def assert_same_leaves(result: Any, expected: Any, where: str, tolerance: float | None = None) -> None:
    """Check that two trees have equal structures, tensors, ``requires_grad`` and other values."""
    (leaves, structure), (expected_leaves, expected_structure) = map(tree_flatten, map(opened, (result, expected)))
    assert structure == expected_structure, f"{where}: {structure} instead of {expected_structure}"
    for index, (leaf, other) in enumerate(zip(leaves, expected_leaves, strict=True)):
        if isinstance(other, Tensor):
            assert leaf.requires_grad == other.requires_grad, f"{where} {index} needs gradients: {leaf.requires_grad}"
            assert_near(leaf.detach(), other.detach(), f"{where} {index}", tolerance)
        else:
            assert (type(leaf), leaf) == (type(other), other), f"{where} {index}"
