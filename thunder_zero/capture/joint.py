"""Makes PyTorch's joint graph (forward and backward) of dynamo's graph, with passes over its nodes.

In: dynamo's graph of forward. Out: the joint graph that becomes a trace. Each pass in order, by an example::

    _draw_by_slices       y = aten.native_dropout(y, 0.1, True)   # y is a slice of tensor parallelism
                          state = thunder_zero.generator_of_slice(1, cpu)
                          y = run_with_rng_state(state, aten.native_dropout, y, 0.1, True)

    _recompute            grad = threshold_backward(g, relu)      # relu is under the user's checkpoint
                          relu_again = aten.relu(mm_again)        # right before its first reader in backward
                          grad = threshold_backward(g, relu_again)

    _shorten_view_chains  t = aten.t(w); t_1 = aten.t(t); mm = aten.mm(grad, t_1)
                          mm = aten.mm(grad, w)

    with_early_sums       part_1; ..; part_0; ..; sum_1 = all_reduce(part_1); sum_0 = all_reduce(part_0)
                          part_1; sum_1 = all_reduce(part_1); ..; part_0; sum_0 = all_reduce(part_0); ..
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from thunder_zero.compat import aot
from thunder_zero.compat.aot.joint import Joint, input_of
from thunder_zero.compat.aot.nodes import generator_state, hint, is_backward, users_value
from thunder_zero.compat.private import (
    cleanup_recompute_tags,
    must_recompute,
    run_and_save_rng_state,
    run_with_rng_state,
)
from thunder_zero.compat.slice_generators import GENERATOR_OF_SLICE
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Plan
from thunder_zero.schedule.ops import Work
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.placeholders import is_part, slice_of
from thunder_zero.traces.operators import draws_random_numbers, is_collective, is_view, work_of_operator


def joint_of(graph: fx.GraphModule, inputs: Sequence[Any], paths: Sequence[str | None], plan: Plan) -> Joint:
    """Return the joint graph of dynamo's graph. Its backward recomputes the lines that checkpoints tag.

    ``paths`` has, for each input, the path of a parameter or None.
    """
    joint = aot.export(graph, inputs)
    if plan.mesh.tensor.size > 1:
        _draw_by_slices(joint, graph, paths, plan)
    _recompute(joint)
    _shorten_view_chains(joint.graph.graph)
    return joint


def with_slices(graph: fx.GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    """Change a graph to take local slices in place of parameters that are DTensors, and return the new inputs.

    The graph's first lines convert the slices to DTensors. So parameters and gradients of the joint graph are plain
    tensors. In backward torch redistributes each gradient to the placement of its parameter, even a gradient that sums
    over a part of the sequence.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    first_line = next(node for node in graph.graph.nodes if node.op != "placeholder")
    slices = [slice_of(value) for value in inputs]
    for node, part in zip(nodes, slices, strict=True):
        if part is not None:
            _, whole, args = part
            with graph.graph.inserting_before(first_line):
                dtensor = graph.graph.call_function(whole, (node, *args))
            node.replace_all_uses_with(dtensor, delete_user_cb=lambda user, dtensor=dtensor: user is not dtensor)
            node.meta["example_value"] = local(node.meta["example_value"])
    if any(slices):
        graph.recompile()
    return [value if part is None else part[0] for value, part in zip(inputs, slices, strict=True)]


def _recompute(joint: Joint) -> None:
    """Insert copies of the lines that checkpoints tag, and let backward read the copies.

    This comes before gathers are inserted, so that each copy gets the gathers it needs. Backward reruns a random line
    with the generator's state from forward. If the state takes more bytes than the line's result, the result is saved
    instead. Either way the random masks are equal, as torch promises for checkpoints.
    """
    graph = joint.graph.graph
    cleanup_recompute_tags(joint.graph, is_default_partition=False)  # saves what one checkpoint passes to the next
    nodes = list(graph.nodes)
    tagged = {node for node in nodes if must_recompute(node) and not is_backward(node)}
    for node in readers_of_written_inputs(joint, nodes) & tagged:
        tagged -= {node, *(user for user in node.users if user.target is operator.getitem)}
    draw_args: dict[fx.Node, tuple[Any, ...]] = {}  # result of a random line: arguments that rerun the line
    for node in [node for node in nodes if node in tagged and draws(node)]:
        tagged.remove(node)
        if (state := _state_of(node)) is not None:
            target, args = node.target, node.args
            result, saved_state = _save_state(joint, node, state)
            draw_args[result] = (saved_state, target, *args)
            tagged.add(result)
        else:
            tagged -= {user for user in node.users if user.target is operator.getitem}
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node, before: fx.Node) -> fx.Node:
        """Return a copy of a node, inserted after copies of its inputs, or the node itself if it is saved."""
        if node not in tagged:
            return node
        if node not in copies:
            args = fx.map_arg(draw_args.get(node, node.args), lambda input_node: copy(input_node, before))
            kwargs = fx.map_arg(node.kwargs, lambda input_node: copy(input_node, before))
            target: Any = run_with_rng_state if node in draw_args else node.target
            with graph.inserting_before(before):
                copies[node] = graph.create_node("call_function", target, args, kwargs, f"{node.name}_again")
            copies[node].meta = {**node.meta, "partitioner_tag": "is_backward", "recompute": None}
        return copies[node]

    for node in nodes:
        if node.op == "call_function" and is_backward(node):
            for input_node in node.all_input_nodes:
                if (copied := copy(input_node, node)) is not input_node:
                    node.replace_input_with(input_node, copied)


def readers_of_written_inputs(joint: Joint, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the lines that read an input that forward writes to, as BatchNorm does with its statistics.

    Backward cannot recompute these lines, because it would read the values that forward wrote.
    """
    written = {node for node in nodes if node.op == "placeholder" and input_of(node) in joint.mutated}
    readers = set()
    for node in nodes:
        if node.op == "call_function" and not written.isdisjoint(node.all_input_nodes):
            readers.add(node)
            if is_view(node.target):
                written.add(node)
    return readers


def draws(node: fx.Node) -> bool:
    """Return whether a line draws random numbers."""
    return node.op == "call_function" and draws_random_numbers(node.target, node.args, node.kwargs)


def _state_of(node: fx.Node) -> Tensor | None:
    """Return a fake state of a random line's generator, or None if the line's results are smaller."""
    value = node.meta["val"]
    results = [item for item in (value if isinstance(value, tuple | list) else [value]) if isinstance(item, Tensor)]
    # the bytes of the results in the call that dynamo captured
    nbytes = sum(prod(int(hint(size) or 0) for size in item.shape) * item.element_size() for item in results)
    state = generator_state(results[0]) if results and not node.kwargs else None
    return state if state is not None and state.nbytes < nbytes else None


def _save_state(joint: Joint, node: fx.Node, state: Tensor) -> tuple[fx.Node, fx.Node]:
    """Make a random line also return its generator's state, and return the nodes of the result and of the state."""
    value = node.meta["val"]
    items = []
    with joint.graph.graph.inserting_after(node):
        for position, fake in ((1, value), (0, state)):
            item = joint.graph.graph.call_function(operator.getitem, (node, position))
            item.meta = {**node.meta, "val": fake}
            items.append(item)
    result, saved_state = items
    node.replace_all_uses_with(result, lambda user: user not in items)
    target: Any = node.target
    node.args, node.target = (target, *node.args), run_and_save_rng_state
    node.meta["val"] = (state, value)
    return result, saved_state


JOINS = ("all_reduce", "all_gather", "broadcast")  # collectives after which all ranks have equal values


def _draw_by_slices(joint: Joint, graph: fx.GraphModule, paths: Sequence[str | None], plan: Plan) -> None:
    """Rewrite the random lines of a joint graph whose values are slices: they draw for this rank's slice.

    Tensor-parallel ranks of one replica have generators in equal states, so replicated values get equal dropout masks.
    Different slices need different masks, or their elements would always be dropped together. A slice's generator is
    seeded with the slice's number and a number that all ranks draw, so that ranks stay in step.

    In dynamo's graph, DTensor's placements tell which values are slices. In the joint graph, values computed from
    slices of parameters are slices, up to the collective that joins them.
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
            if draws(node):
                _draw_for_slice(joint.graph.graph, node, plan.mesh.tensor.place)


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
    node.args, node.target = (state, target, *node.args), run_with_rng_state


TRANSPOSES = (torch.ops.aten.t.default, torch.ops.aten.transpose.int)  # a second transpose undoes the first
RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)  # the last of a chain decides the shape


def _shorten_view_chains(graph: fx.Graph) -> None:
    """Let lines read the root of a chain of views where the shapes are equal, and drop views without readers.

    On the host, a view takes as long as the launch of a small product, so an unnecessary view slows every step.
    """
    views = [node for node in graph.nodes if node.target in (*TRANSPOSES, *RESHAPES)]
    for node in views:
        source, root = node.args[0], None
        if node.target in RESHAPES:
            if source.target in RESHAPES:
                node.args = source.args[0], *node.args[1:]
            root = node.args[0] if _shape(node) == _shape(node.args[0]) else None
        elif (source.target, source.args[1:]) == (node.target, node.args[1:]):
            root = source.args[0]
        if root is not None and _is_replaceable(node, root):
            node.replace_all_uses_with(root)
    for node in reversed(views):
        if not node.users:
            graph.erase_node(node)


def _shape(node: fx.Node) -> tuple[int | str, ...]:
    """Return the shape of a node with symbols as strings, since comparing symbols would add a guard to the graph."""
    return tuple(size if type(size) is int else str(size) for size in node.meta["val"].shape)


def _is_replaceable(node: fx.Node, root: fx.Node) -> bool:
    """Return whether all readers of a node can read the root of its chain instead.

    An output of the graph must stay a separate tensor, unless the root is a gradient that the graph does not return.
    """
    is_output = any(user.op == "output" for user in node.users)
    is_returned = any(user.op == "output" for user in root.users)
    return not is_output or (is_backward(root) and root.op == "call_function" and not is_returned)


SUMS = (torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.reduce_scatter_tensor.default)

CHEAP = (Work.VIEW, Work.POINTWISE)  # only such lines of backward move


def with_early_sums(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a joint graph, with sums of gradients as early as their inputs allow.

    Each tensor-parallel rank computes a partial sum of a norm's gradient, and torch all-reduces it over ranks. All
    these all-reduces are at the end of backward, so ZeRO could not reduce a gradient before the end.

    Two kinds of lines move with a sum: lines that only the sum reads, and lines from the sum to the returned gradient.
    """
    moving = _moving_nodes(nodes)
    if not moving:
        return list(nodes)
    missing_inputs = {node: len(node.all_input_nodes) for node in moving}

    def with_ready_users(node: fx.Node) -> Iterator[fx.Node]:
        yield node
        for user in node.users:
            if user in missing_inputs:
                missing_inputs[user] -= 1
                if not missing_inputs[user]:
                    yield from with_ready_users(user)

    return [ready_node for node in nodes if node not in moving for ready_node in with_ready_users(node)]


def _moving_nodes(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that move: sums on which only gradients depend, and nodes that move with these sums."""
    movable: set[fx.Node] = set()  # nodes on which only returned gradients depend
    for node in reversed(nodes):
        if _may_move(node) and all(user.op == "output" or user in movable for user in node.users):
            movable.add(node)
    moving: set[fx.Node] = set()
    for node in nodes:
        if node in movable and (node.target in SUMS or not moving.isdisjoint(node.all_input_nodes)):
            moving.add(node)
    for node in reversed(nodes):
        if node in movable and moving.issuperset(node.users):
            moving.add(node)
    return moving


def _may_move(node: fx.Node) -> bool:
    """Return whether a node reads a value of backward, has no side effect, and is a view, pointwise or a collective."""
    if node.op != "call_function" or not node.users or not any(map(is_backward, node.all_input_nodes)):
        return False
    return is_collective(node.target) or (work_of_operator(node.target) in CHEAP and not node.is_impure())
