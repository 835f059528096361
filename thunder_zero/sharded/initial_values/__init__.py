"""Gives a plain module's parameters and buffers their initial values, before they are sharded.

A module on the meta device has shapes and no values. Its values are drawn, as construction draws them (``drawn.py``),
read from a state dict (``make.py``) or sent by one rank; a module on a real device has its own. However large the model
is, a rank holds its shards and one module's own parameters in full. The door is ``initial_values`` (``make.py``); it
leaves the module as it is.
"""

from thunder_zero.sharded.initial_values.data import InitialValues, Other, Sources
from thunder_zero.sharded.initial_values.make import initial_values

__all__ = ["InitialValues", "Other", "Sources", "initial_values"]
