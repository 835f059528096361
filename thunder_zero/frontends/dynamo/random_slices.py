"""Makes random lines draw different numbers for each slice of tensor parallelism.

Tensor-parallel ranks of one replica have generators in equal states, so replicated values get equal dropout masks.
Different slices need different masks, or their elements would always be dropped together::

    x = aten.native_dropout(x, 0.1, True)         x is replicated: equal on all ranks

    y = aten.mm(x, w)                             w is a slice, and so is y
    y = aten.native_dropout(y, 0.1, True)   ->    state = thunder_zero.generator_of_slice(1, cpu)
                                                  y = run_with_rng_state(state, aten.native_dropout, y, 0.1, True)

A slice's generator is seeded with the slice's number and a number that all ranks draw, so that ranks stay in step.
In dynamo's graph, DTensor's placements tell which values are slices. In the joint graph, values computed from slices of
parameters are slices, up to the collective that joins them.
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

JOINS = ("all_reduce", "all_gather", "broadcast")  # collectives after which all ranks have equal values


def draw_by_slices(joint: Joint, graph: fx.GraphModule, paths: Sequence[str | None], plan: Plan) -> None:
    """Rewrite the random lines of a joint graph whose values are slices: they draw for this rank's slice.

    ``graph`` is dynamo's graph. ``paths`` has, for each of its inputs, the path of a parameter or None.
    """
    sliced = {
        position for position, path in enumerate(paths) if path is not None and plan.by_name[path].sliced is not None
    }
    fakes = {
        (id(inner.graph), node.name): node.meta.get("example_value")
        for inner in graph.modules()
        if isinstance(inner, fx.GraphModule)
        for node in inner.graph.nodes
    }
    slices: set[fx.Node] = set()
    for node in list(joint.graph.graph.nodes):
        if is_backward(node):
            continue
        source = users_value(node)
        if _is_slice(node, slices, sliced, None if source is None else fakes.get(source), plan.mesh):
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


def _is_slice(node: fx.Node, slices: Collection[fx.Node], sliced: Collection[int], fake: object, mesh: Mesh) -> bool:
    """Return whether each tensor-parallel rank has a different part of a node's value.

    ``fake`` is dynamo's fake value of the node. A user's collective over other ranks does not join slices.
    """
    if node.op == "placeholder":
        return input_of(node) in sliced
    name = str(node.target)
    if is_collective(node.target) and "wait_tensor" not in name and mesh.joins_slices(node.args[-1]):
        return not any(collective in name for collective in JOINS)
    return any(map(is_part, tree_leaves(fake))) or any(input_node in slices for input_node in node.all_input_nodes)


def _draw_for_slice(graph: fx.Graph, node: fx.Node, slice_index: int) -> None:
    result = next(leaf for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, Tensor))
    operator: Any = GENERATOR_OF_SLICE
    with graph.inserting_before(node):
        state = graph.call_function(operator, (slice_index, result.device))
    state.meta = {**node.meta, "val": generator_state(result)}
    state.meta.pop("from_node", None)
    target: Any = node.target
    node.args, node.target = (state, target, *node.args), RUN_WITH_STATE
