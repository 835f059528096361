"""GraphTransform: the hooks for one of a model's graphs, whose parameters are the model's shards."""

from __future__ import annotations

from thunder_zero.frontends.program_transform import ProgramTransform
from thunder_zero.sharded.calls import Calls
from thunder_zero.sharded.state import State

from thunder.core.module import ThunderModule


class GraphTransform(ProgramTransform):
    """Compiles one graph with the shards of a model.

    Args:
        state: the model's.
        runtime: the model's.
        graph: the name of the graph, the same on all ranks.
    """

    def __init__(self, state: State, runtime: Calls, graph: str) -> None:
        super().__init__()
        self._state, self._runtime, self._graph = state, runtime, graph

    def transform_module(self, model: ThunderModule) -> None:
        """Put our executors in front of the others."""
        self.install(model, self._state.plan, self._runtime, self._graph)
