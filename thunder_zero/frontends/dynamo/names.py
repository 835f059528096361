"""Names values of a trace after the user's code, for readers: no code depends on a name.

::

    q, k = self.qk(x).split(8, -1)          h_0_qk = aten.addmm(h_0_qk_bias, x, h_0_qk_weight_t)
    y = F.silu(q.view(4, 2, 4))       ->    (q, k) = aten.split(h_0_qk, 8, -1); q_view = aten.view(q, [4, 2, 4])
    heads = self.out(y * 2).view(8, 4)      y = aten.silu(q_view); mul = aten.mul(y, 2); heads = aten.addmm(...)

A value has the name of the user's variable, if there is one. Otherwise it has the first available name of this list:

- the variable of a view of the value, if a single line reads the view, since printing folds the view into its reader
- the path of the torch module whose call returns it
- the function that computes it
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count, groupby
from keyword import iskeyword
from operator import getitem

import torch
from torch import fx

from thunder_zero.compat.aot import Joint, is_backward, module_of, sequence_number, users_value, variable_of
from thunder_zero.traces.operators import is_view

UsersValue = tuple[int, str, int | None]  # dynamo's graph, name of a value, index of an item if it is a tuple
SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # operators that return their input
TAKEN = frozenset(  # names that Thunder's traces use
    ("torch", "thunder", "Tensor", "C0", "C1", "saved_for_backward", "cotangents", "slice", "float", "complex")
)


def names_of(joint: Joint) -> dict[fx.Node, str]:
    """Return a mapping from nodes to names. Repeated names are numbered. Views without a variable have no name.

    A value that a checkpoint recomputes in backward is named after its original. Any other line of backward has a name
    only if it returns several values: the name of the line of forward whose gradient it computes.
    """
    nodes = [node for node in joint.graph.graph.nodes if node.op == "call_function"]
    forward = _producers([node for node in nodes if not is_backward(node)])
    recomputed = _producers([node for node in nodes if is_backward(node)])
    unnumbered = _unnumbered_names(joint, forward) | {value: value[1] for value in recomputed if value not in forward}
    names: dict[UsersValue, str] = {}
    used: set[str] = set()
    for value, name in unnumbered.items():
        names[value] = first_free(name, used)
        used.add(names[value])
    values_by_sequence = {sequence_number(node): users_value(node) for node in nodes if not is_backward(node)}
    result = {node: names[value] for value, node in forward.items() if value in names}
    result |= {node: f"{names[value]}_again" for value, node in recomputed.items() if value in names}
    for node in nodes:
        if is_backward(node) and users_value(node) is None and isinstance(node.meta.get("val"), tuple | list):
            original = values_by_sequence.get(sequence_number(node))
            if original and (*original, None) in names:
                result[node] = f"{names[*original, None]}_backward"
    return result


def _producers(nodes: Sequence[fx.Node]) -> dict[UsersValue, fx.Node]:
    """Return the node that computes each value that dynamo names.

    If a function becomes several lines, the last line computes its value. Any other line is preferred to a view that
    printing folds into its reader.
    """
    producers: dict[UsersValue, fx.Node] = {}
    for node in nodes:
        name = users_value(node)
        if name is None or node.target in (*SAME, getitem):
            continue
        value = (*name, None)
        if value not in producers or is_view(producers[value].target) or not _is_folded(node):
            producers[value] = node
    getters = [(node, users_value(node)) for node in nodes if node.target is getitem]
    parts = {
        (*name, node.args[1]): node for node, name in getters if name and producers.get((*name, None)) is node.args[0]
    }
    return producers | parts  # type: ignore[return-value]


def _unnumbered_names(joint: Joint, producers: Mapping[UsersValue, fx.Node]) -> dict[UsersValue, str]:
    """Return a mapping from values of forward to names, before repeated names are numbered."""
    variables = {value: variable_of(node) for value, node in producers.items() if value[2] is None}
    variables |= {value: joint.parts.get(value) for value in producers if value[2] is not None}
    modules = dict(_modules(producers))
    unnumbered: dict[UsersValue, str] = {}
    lending: set[UsersValue] = set()  # views that lend their name to their base
    for value, node in producers.items():
        is_view_alone = is_view(node.target) and not isinstance(node.meta.get("val"), tuple | list)
        view = None if variables[value] or is_view_alone else _view_with_name(node, producers)
        if view is not None:
            lending.add(view)
        function = None if is_view_alone or value[2] is not None else value[1]
        name = variables[value] or (view and view[1]) or modules.get(value) or function
        if name and value not in lending:
            unnumbered[value] = name
    return unnumbered


def _modules(producers: Mapping[UsersValue, fx.Node]) -> Iterator[tuple[UsersValue, str]]:
    """Yield (last value of a call, path of the module) for each call of a torch module."""
    whole = [(value, module_of(node)) for value, node in producers.items() if value[2] is None]
    for path, values in groupby(whole, key=lambda pair: pair[1]):
        if path:
            yield [value for value, _ in values][-1], path


def _view_with_name(node: fx.Node, producers: Mapping[UsersValue, fx.Node]) -> UsersValue | None:
    """Follow the folded views of a node. Return the value of the first view that has a variable, or None."""
    while len(readers := _readers(node)) == 1 and _is_folded(readers[0]):
        node = readers[0]
        name = users_value(node)
        if variable_of(node) and name and producers.get((*name, None)) is node:
            return (*name, None)
    return None


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if is_backward(user) is is_backward(node)]


def _is_folded(node: fx.Node) -> bool:
    """Return whether printing folds a node: a view that a single line of its phase reads."""
    return is_view(node.target) and len(_readers(node)) == 1 and not is_output(node)


def is_output(node: fx.Node) -> bool:
    """Return whether the graph returns a node."""
    return any(user.op == "output" for user in node.users)


def first_free(name: str, names: Collection[str]) -> str:
    """Return the name, with a number if it is in ``names``, is a keyword, or is used by Thunder's traces."""
    candidates = (name if number == 0 else f"{name}_{number}" for number in count())
    return next(free for free in candidates if free not in names and free not in TAKEN and not iskeyword(free))
