"""What each collective of torch reads and writes, and what it does to the types of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thunder_zero.compat.private import resolve_process_group
from thunder_zero.spmd.laws import Outcome, P, R, V, X, filled, halves, letters

KINDS = {  # parts of operators' names
    **dict.fromkeys(("allreduce", "all_reduce"), "all_reduce"),
    **dict.fromkeys(("allgather", "all_gather"), "all_gather"),
    "reduce_scatter": "reduce_scatter",
    **dict.fromkeys(("alltoall", "all_to_all"), "all_to_all"),
    "broadcast": "broadcast",
    "scatter": "scatter",
    "reduce_": "reduce",
}
OPS = ("sum", "avg", "product", "min", "max")
DEALT = "all_to_all deals out slices whole: of one dimension, then of another, and back"
NO_SHARE = "of a value that is no share of a sum"
Pair = tuple[list[Any], list[Any]]  # inputs and outputs of one collective


@dataclass(frozen=True)
class Collective:
    """A collective: its kind, its reduction or "", its number of ranks, and the axes that its group spans."""

    kind: str
    op: str
    size: int
    axes: tuple[str, ...]
    rank: int = 0

    def __str__(self) -> str:
        """Return text such as ``all_reduce(sum) over dp``."""
        name = f"{self.kind}({self.op})" if self.op else self.kind
        return f"{name} over {' and '.join(self.axes) or 'no axis'}"

    def pairs(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Any]) -> list[Pair]:
        """Return the inputs and outputs, which may be tensors or the refs of a line."""
        if operator.namespace != "c10d":
            inputs = _as_list(args[0])
            outputs = inputs if operator.overloadpacket.__name__.endswith("_") else _as_list(kwargs.get("out", results))
            return [([item], [output]) for item, output in zip(inputs, outputs, strict=False)]
        if self.kind in ("all_reduce", "reduce", "broadcast"):
            return [([item], [item]) for item in _as_list(args[0])]
        if operator.overloadpacket.__name__ == "alltoall_":
            return [(list(args[1]), list(args[0]))]
        outputs, inputs = _as_list(args[0]), _as_list(args[1])
        inputs = inputs or [[] for _ in outputs]
        return [(_as_list(item), _as_list(output)) for item, output in zip(inputs, outputs, strict=False)]


def collective_kind(name: str) -> str | None:
    """Return the kind of collective of an operator, such as ``c10d.allreduce_.default``, or None."""
    namespace, _, name = name.partition(".")
    if namespace not in ("c10d", "_c10d_functional", "c10d_functional"):
        return None
    return next((kind for part, kind in KINDS.items() if part in name), None)


def collective_of(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], mesh: DeviceMesh) -> Collective | None:
    """Return the collective that an operator launches, or None."""
    if (kind := collective_kind(str(operator))) is None:
        return None
    given = {item.name: value for item, value in zip(operator._schema.arguments, args, strict=False)} | kwargs
    group = _group(given.get("process_group", given.get("group_name")))
    ranks = sorted(dist.get_process_group_ranks(group))
    op = _op(given.get("reduce_op")) if "reduce" in kind else ""
    axes = axes_of(mesh, ranks, within=kind == "all_gather")  # FSDP2's reshard_after_forward=2 gathers on a part
    return Collective(kind, op, group.size(), axes, dist.get_rank(group))


def _group(group: Any) -> dist.ProcessGroup:
    if isinstance(group, str):
        return resolve_process_group(group)  # type: ignore[no-any-return]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _op(op: Any) -> str:
    text = op if isinstance(op, str) else str(op.op()).rpartition(".")[2].lower()
    return text if not text.isdigit() else OPS[int(text)] if int(text) < len(OPS) else "sum"


def axes_of(mesh: DeviceMesh, ranks: Sequence[int], *, within: bool = False) -> tuple[str, ...]:
    """Return the axes of the mesh that a group of this rank spans, or is ``within``; () if there are none."""
    names, here = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
    for count in range(1, len(names) + 1):
        for chosen in combinations(range(len(names)), count):
            index = tuple(slice(None) if dim in chosen else here[dim] for dim in range(len(names)))
            spanned = set(mesh.mesh[index].reshape(-1).tolist())
            if spanned == set(ranks) or (within and spanned > set(ranks)):
                return tuple(names[dim] for dim in chosen if mesh.size(dim) > 1) or (names[chosen[0]],)
    return ()


def fill(collective: Collective, pairs: Sequence[Pair]) -> None:
    """Fill the outputs of a collective that sent nothing with this rank's values."""
    for inputs, outputs in pairs:
        if collective.kind == "scatter":
            for output in outputs:
                _fill_scattered(collective, inputs, output)
        elif inputs and outputs[0] is not inputs[0]:
            whole = torch.cat([item.reshape(-1) for item in inputs])
            if collective.kind == "all_gather":
                whole = torch.cat([_as_of_rank(whole, rank) for rank in range(collective.size)])
            sizes = [item.numel() for item in outputs]
            whole = whole.repeat(-(-sum(sizes) // max(len(whole), 1)))[: sum(sizes)]
            for output, part in zip(outputs, whole.split(sizes), strict=True):
                output.copy_(part.reshape(output.shape))


def _as_of_rank(item: Tensor, rank: int) -> Tensor:
    """Return values as another rank may have them: equal parts of a table would hide faults."""
    return item.roll(rank) * (1 + 0.1 * rank) if item.is_floating_point() and rank else item


def _fill_scattered(collective: Collective, inputs: Sequence[Tensor], output: Tensor) -> None:
    if len(inputs) == collective.size and inputs[collective.rank].shape == output.shape:
        output.copy_(inputs[collective.rank])
    elif output.is_floating_point():
        dice = torch.Generator().manual_seed(output.numel())
        output.copy_(torch.randn(output.shape, generator=dice))


def effect(
    collective: Collective,
    axis: str,
    size: int,
    codes: list[Tensor],
    shapes: Sequence[tuple[int, ...]],
    *,
    counts: bool,
) -> list[Outcome]:
    """Return the outcome of each output on an axis. A fault stands at each.

    Args:
        collective: the collective.
        axis, size: the axis, and its number of ranks.
        codes: of the inputs.
        shapes: of the outputs.
        counts: whether equal inputs may be summed: zeros, or what follows from no parameter, as counts of tokens do.
    """
    kind, flat = collective.kind, torch.cat([item.reshape(-1) for item in codes])
    types = letters(flat)
    if axis not in collective.axes:
        return [Outcome(item) for item in _elsewhere(collective, flat, shapes)]
    whole = [filled(shape, R) for shape in shapes]
    if "reduce" in kind:
        fault = _fault_of_reduction(collective, size, types, counts)
        factor = float(size) if fault and types == "R" else 1.0
        if not fault and "P" in types and collective.op == "avg":
            factor = 1 / size
        results = [halves(shapes[0])] if kind == "reduce_scatter" else whole
        if kind == "reduce" and not fault:
            return [Outcome(filled(shapes[0], V), "reduce gives the sum to one rank only", "note", factor)]
        return [Outcome(item, fault, factor=factor) for item in results]
    if kind in ("all_gather", "broadcast"):
        fault = f"{kind} of shares of a sum: reduce them first" if "P" in types else ""
        if fault and kind == "all_gather":  # they may be summed after it
            return [Outcome(filled(shape, V), fault, "note") for shape in shapes]
        return [Outcome(item, fault) for item in whole]
    if kind == "all_to_all" and types in ("P", "V"):
        return [Outcome(filled(shape, P if types == "P" else V)) for shape in shapes]
    if kind == "all_to_all" and types == "R":  # a sum of what is dealt counts it on each rank
        return [Outcome(halves(shape), factor=float(size)) for shape in shapes]
    if kind == "all_to_all" and types in ("S", "X"):  # cut along another dimension, which the next lines show
        return [Outcome(filled(shape, X), DEALT, "assumed") for shape in shapes]
    if kind == "all_to_all":
        return [Outcome(filled(shape, V), f"what {kind} deals out is not typed", "unknown") for shape in shapes]
    return [Outcome(halves(shape)) for shape in shapes]


def _fault_of_reduction(collective: Collective, size: int, types: str, counts: bool) -> str:
    """Return what is wrong with a reduction of values with these types, or an empty string."""
    if collective.op not in ("sum", "avg"):
        return f"{collective} of shares of a sum: sum them" if types == "P" else ""
    if "V" in types:
        return f"{collective} {NO_SHARE}"
    if "N" in types:
        return f"{collective} of norms: square them first"
    if "S" in types or "X" in types:
        return f"{collective} adds slices of different elements"
    if types == "R" and collective.op == "sum" and not counts:
        return f"{collective} of a value that is already equal on all ranks multiplies it by {size}"
    return ""


def _elsewhere(collective: Collective, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Move the codes of another axis with the elements."""
    if collective.kind == "all_gather":
        copies = 1 if len(shapes) > 1 else collective.size
        return [torch.cat([flat] * copies).reshape(shape) for shape in shapes]
    if collective.kind in ("all_to_all", "scatter"):
        alike = len(flat) > 0 and bool((flat == flat[0]).all())
        return [filled(shape, int(flat[0])) if alike else halves(shape) for shape in shapes]
    return [flat[: torch.Size(shapes[0]).numel()].reshape(shapes[0])]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
