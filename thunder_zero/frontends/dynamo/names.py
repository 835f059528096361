"""Names values of a trace after the user's code, for people: no code reads what a name says.

::

    q, k = self.qk(x).split(8, -1)          h_0_qk = aten.addmm(h_0_qk_bias, x, h_0_qk_weight_t)
    y = F.silu(q.view(4, 2, 4))       ->    (q, k) = aten.split(h_0_qk, 8, -1); q_view = aten.view(q, [4, 2, 4])
    heads = self.out(y * 2).view(8, 4)      y = aten.silu(q_view); mul = aten.mul(y, 2); heads = aten.addmm(...)

A value has the name of the user's variable. Without one it has that of a view of it that one line reads, since printing
folds the view into that line; or the path of the module of torch's whose call ends with it; or its function's name.
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

UsersValue = tuple[int, str, int | None]  # the graph of dynamo's, its name there, and the position of a part of several
SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # of a value, where nothing is recorded
TAKEN = frozenset(  # by Thunder's traces
    ("torch", "thunder", "Tensor", "C0", "C1", "saved_for_backward", "cotangents", "slice", "float", "complex")
)


def names_of(joint: Joint) -> dict[fx.Node, str]:
    """Return what values are called, with a number where a name occurs again; views without a variable have no name.
    What a checkpoint computes again in backward is called after its original. Of other lines of backward, those that
    make several values are called after the line whose gradient they compute."""
    nodes = [node for node in joint.graph.graph.nodes if node.op == "call_function"]
    forward, again = (_makers([node for node in nodes if is_backward(node) is phase]) for phase in (False, True))
    wanted = _wanted(joint, forward) | {value: value[1] for value in again if value not in forward}
    names: dict[UsersValue, str] = {}
    taken: set[str] = set()
    for value, name in wanted.items():
        names[value] = first_free(name, taken)
        taken.add(names[value])
    made_by = {sequence_number(node): users_value(node) for node in nodes if not is_backward(node)}
    found = {node: names[value] for value, node in forward.items() if value in names}
    found |= {node: f"{names[value]}_again" for value, node in again.items() if value in names}
    for node in nodes:
        if is_backward(node) and users_value(node) is None and isinstance(node.meta.get("val"), tuple | list):
            made = made_by.get(sequence_number(node))
            found |= {node: f"{names[*made, None]}_backward"} if made and (*made, None) in names else {}
    return found


def _makers(nodes: Sequence[fx.Node]) -> dict[UsersValue, fx.Node]:
    """Return the nodes that make the values that dynamo has names for. The last line of a function makes its value; a
    view that one line reads leaves the name to what it is a view of."""
    found: dict[UsersValue, fx.Node] = {}
    for node in nodes:
        name = users_value(node)
        if name is None or node.target in (*SAME, getitem):
            continue
        value = (*name, None)
        if value not in found or is_view(found[value].target) or not _is_folded(node):
            found[value] = node
    parts = [(node, users_value(node)) for node in nodes if node.target is getitem]
    made = {(*name, node.args[1]): node for node, name in parts if name and found.get((*name, None)) is node.args[0]}
    return found | made  # type: ignore[return-value]


def _wanted(joint: Joint, makers: Mapping[UsersValue, fx.Node]) -> dict[UsersValue, str]:
    """Return the name that each value of forward is to have."""
    variables = {value: variable_of(node) for value, node in makers.items() if value[2] is None}
    variables |= {value: joint.parts.get(value) for value in makers if value[2] is not None}
    modules = dict(_modules(makers))
    found: dict[UsersValue, str] = {}
    given: set[UsersValue] = set()  # to what they are views of
    for value, node in makers.items():
        is_view_alone = is_view(node.target) and not isinstance(node.meta.get("val"), tuple | list)
        view = None if variables[value] or is_view_alone else _view_with_name(node, makers)
        if view is not None:
            given.add(view)
        function = None if is_view_alone or value[2] is not None else value[1]
        name = variables[value] or (view and view[1]) or modules.get(value) or function
        if name and value not in given:
            found[value] = name
    return found


def _modules(makers: Mapping[UsersValue, fx.Node]) -> Iterator[tuple[UsersValue, str]]:
    """Yield the last value of each call of a module of torch's, with the module's path."""
    whole = [(value, module_of(node)) for value, node in makers.items() if value[2] is None]
    for path, values in groupby(whole, key=lambda pair: pair[1]):
        if path:
            yield [value for value, _ in values][-1], path


def _view_with_name(node: fx.Node, makers: Mapping[UsersValue, fx.Node]) -> UsersValue | None:
    """Return the user's variable that is a view of a value, reads it alone, and is folded into its reader."""
    while len(readers := _readers(node)) == 1 and _is_folded(readers[0]):
        node = readers[0]
        name = users_value(node)
        if variable_of(node) and name and makers.get((*name, None)) is node:
            return (*name, None)
    return None


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if is_backward(user) is is_backward(node)]


def _is_folded(node: fx.Node) -> bool:
    """Return whether a node is a view that one line of its phase reads."""
    return is_view(node.target) and len(_readers(node)) == 1 and not is_output(node)


def is_output(node: fx.Node) -> bool:
    """Return whether the graph returns a node: autograd wants tensors of their own."""
    return any(user.op == "output" for user in node.users)


def first_free(name: str, names: Collection[str]) -> str:
    """Return the name, with a number if these names, or those that Python or Thunder's traces have, contain it."""
    numbered = (name if number == 0 else f"{name}_{number}" for number in count())
    return next(each for each in numbered if each not in names and each not in TAKEN and not iskeyword(each))
