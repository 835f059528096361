"""Wraps AOTAutograd: a joint graph, and a function that runs two phases.

In: a graph of dynamo. Out: a :class:`Joint`, which has forward and backward in one graph (:func:`export`).
:func:`compiled` makes a function for which PyTorch handles autograd, writes to inputs, and outputs that are views::

    export.py      traces a graph of dynamo; rewrites.py changes it before and after
    joint.py       the joint graph, its inputs, outputs, tangents and gradients
    nodes.py       the origin of a node: the user's variable, a module, a checkpoint, backward
    runtime.py     the function that runs forward(inputs) and backward(saved values, tangents)
"""

from thunder_zero.compat.aot.export import Untraced as Untraced
from thunder_zero.compat.aot.export import export as export
from thunder_zero.compat.aot.joint import Joint as Joint
from thunder_zero.compat.aot.nodes import hint as hint
from thunder_zero.compat.aot.runtime import Phases as Phases
from thunder_zero.compat.aot.runtime import compiled as compiled
