"""The runtime of a model of several graphs: what is once a backward comes after all of them."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_zero.compat.torch_gaps import at_end_of_backward, running_backward
from thunder_zero.sharded.calls import Calls
from thunder_zero.sharded.state import State


class GraphCalls(Calls):
    """The functions that the traces of all graphs of one model call.

    Args:
        state: the model's.
    """

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._at_end_of = -1  # the last backward that will reduce at its end, by autograd's number

    def reduce_deferred(self, paths: Sequence[str]) -> None:
        """Reduce the deferred gradients of parameters that no graph of this backward reaches, once it ends: until then
        nobody knows which those are."""
        backward = running_backward()
        if backward != self._at_end_of:
            self._at_end_of = backward
            at_end_of_backward(self._reduce_rest)

    def _reduce_rest(self) -> None:
        super().reduce_deferred([param.path for param in self._state.plan.params if param.requires_grad])
