"""Formats ``print(model)``: stage, ranks and bytes, then torch's tree with the shapes of rows.

::

    ZeroModule of Net: stage 3, 2 ranks, 3 units, 1.09 KiB of parameters at rest on this rank
    Net(
      (blocks): ModuleList(
        (0-1): 2 x Linear(in_features=8, out_features=8, bias=True, weight: [8, 8] rows [4, 8], bias: [8] rows [4])
      )
    )
"""

from __future__ import annotations

from torch import nn

from thunder_zero.plan.amounts import size
from thunder_zero.plan.params import Plan
from thunder_zero.sharded.state import State


def format_model(kind: str, module: nn.Module, state: State) -> str:
    """Return a summary of a sharded model, then the tree of its plain module. ``kind`` is the name of the class."""
    plan, copies = state.plan, state.plan.mesh.replicate.size
    ignored = [param for name, param in module.named_parameters() if name not in plan.by_name]
    held = [tensor for param in state.params.values() for tensor in (param.rows, param.full) if tensor is not None]
    storages = [tensor.untyped_storage() for tensor in (*held, *ignored)]
    at_rest = sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # count each storage once
    ranks = _count(plan.ranks, "rank") + f" ({copies} copies of the model)" * (copies > 1)
    return (
        f"{kind} of {type(module).__name__}: stage {plan.policy.stage}, {ranks}, {_count(len(plan.units), 'unit')}, "
        f"{size(at_rest)} of parameters at rest on this rank\n{_tree(module, plan, '')!r}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


class _Printed(nn.Module):
    """A module that prints another module's line, with the shapes of that module's rows."""

    def __init__(self, module: nn.Module, rows: str) -> None:
        super().__init__()
        self._name: str = module._get_name()
        self._line = ", ".join(filter(None, [module.extra_repr(), rows]))

    def _get_name(self) -> str:
        return self._name

    def extra_repr(self) -> str:
        return self._line


class _PrintedList(_Printed, nn.ModuleList):
    """A list that prints equal blocks once, as ``nn.ModuleList`` does."""


def _tree(module: nn.Module, plan: Plan, prefix: str) -> nn.Module:
    params = ((name, param) for name, param in module._parameters.items() if param is not None)
    shapes = ", ".join(f"{name}: {_shapes(f'{prefix}{name}', param, plan)}" for name, param in params)
    tree = _PrintedList(module, shapes) if isinstance(module, nn.ModuleList) else _Printed(module, shapes)
    for name, child in module._modules.items():
        tree.add_module(name, None if child is None else _tree(child, plan, f"{prefix}{name}."))
    return tree


def _shapes(name: str, tensor: nn.Parameter, plan: Plan) -> str:
    if (param := plan.by_name.get(name)) is None:
        return f"{list(tensor.shape)} ignored"
    suffix = f" as {param.frozen_format}" if param.frozen_format else ""
    whole = "replicated" if param.owner is None else f"owned by rank {param.owner}"
    rows = f"rows {list(plan.shard_shape(param))}{suffix}" if param.sharded else whole
    return f"{list(param.shape)} {rows}"
