"""Lets random lines draw other numbers on each rank of tensor parallelism, where values are slices.

Ranks that compute with slices of one model have generators in the same state, so what all of them have is dropped out
alike. The mask of a slice must not be that of another one, or elements would be dropped together::

    x = aten.native_dropout(x, 0.1, True)         x is replicated: alike on all ranks

    y = aten.mm(x, w)                             w is a slice, so y is one
    y = aten.native_dropout(y, 0.1, True)   ->    state = thunder_zero.generator_of_slice(1, cpu)
                                                  y = run_with_rng_state(state, aten.native_dropout, y, 0.1, True)

A slice's generator is seeded with the number of the slice, and with one that all ranks draw alike, so that they stay in
step. What is a slice follows from DTensor's placements in dynamo's graph, and in the joint graph from parameters that
are slices up to the collectives that join them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from thunder_zero.compat.aot import RUN_WITH_STATE, Joint, generator_state, input_of, is_backward, users_value
from thunder_zero.compat.slice_generators import GENERATOR_OF_SLICE
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Plan
from thunder_zero.sharded.slices import is_part
from thunder_zero.traces.operators import draws_random_numbers, is_collective

JOINS = ("all_reduce", "all_gather", "broadcast")  # collectives after which all ranks have the same


def draw_by_slices(joint: Joint, graph: fx.GraphModule, paths: Sequence[str | None], plan: Plan) -> None:
    """Change the joint graph of a graph of dynamo, so that random lines of slices draw for this rank's; ``paths`` are
    those of the inputs that are parameters."""
    sliced = {at for at, path in enumerate(paths) if path is not None and plan.by_name[path].sliced is not None}
    looks = {
        (id(each.graph), node.name): node.meta.get("example_value")
        for each in graph.modules()
        if isinstance(each, fx.GraphModule)
        for node in each.graph.nodes
    }
    slices: set[fx.Node] = set()
    for node in list(joint.graph.graph.nodes):
        if is_backward(node):
            continue
        source = users_value(node)
        if _is_slice(node, slices, sliced, None if source is None else looks.get(source), plan.mesh):
            slices.add(node)
            if node.op == "call_function" and draws_random_numbers(node.target, node.args, node.kwargs):
                _draw_for_slice(joint.graph.graph, node, plan.mesh.tensor.place)


def draws(joint: Joint) -> bool:
    """Return whether a graph draws random numbers."""
    return any(
        node.op == "call_function"
        and ("rng" in str(node.target) or draws_random_numbers(node.target, node.args, node.kwargs))
        for node in joint.graph.graph.nodes
    )


def _is_slice(node: fx.Node, slices: Collection[fx.Node], sliced: Collection[int], look: object, mesh: Mesh) -> bool:
    """Return whether ranks have different parts of a node's value; ``look`` is what dynamo's value looks like. A
    collective over other ranks than those of slices, a user's own, joins none."""
    if node.op == "placeholder":
        return input_of(node) in sliced
    name = str(node.target)
    if is_collective(node.target) and "wait_tensor" not in name and mesh.joins_slices(node.args[-1]):
        return not any(collective in name for collective in JOINS)
    return any(map(is_part, tree_leaves(look))) or any(each in slices for each in node.all_input_nodes)


def _draw_for_slice(graph: fx.Graph, node: fx.Node, part: int) -> None:
    made = next(each for each in tree_leaves(node.meta["val"]) if isinstance(each, Tensor))
    operator: Any = GENERATOR_OF_SLICE
    with graph.inserting_before(node):
        state = graph.call_function(operator, (part, made.device))
    state.meta = {**node.meta, "val": generator_state(made)}
    state.meta.pop("from_node", None)
    target: Any = node.target
    node.args, node.target = (state, target, *node.args), RUN_WITH_STATE
