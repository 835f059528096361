"""ZeroModule: the sharded model that ``thunder.jit`` with ZeroTransform makes."""

from __future__ import annotations

from torch import nn

from thunder_zero.compiled import Compiled, Traces
from thunder_zero.runtime.sharded_model import ShardedModel, sharded_model
from thunder_zero.runtime.state import State

from thunder import compile_stats
from thunder.core.module import ThunderModule


class ZeroModule(ShardedModel, ThunderModule):
    """A jitted module whose parameters are sharded; ``ZeroTransform`` turns a ThunderModule into one.

    Thunder's own ``no_sync`` reduces once more at its end; this one does not.
    """

    _model: nn.Module
    _state: State
    _compiled: Compiled

    @property
    def state(self) -> State:
        """This rank's share of the model."""
        return self._state

    @property
    def plain(self) -> nn.Module:
        """The module that was jitted; its parameters are placeholders."""
        return self._model


def adopt(model: ThunderModule, state: State, compiled: Compiled) -> None:
    """Make a jitted module a ZeroModule, in place, as torch's ``fully_shard`` does with a module's class."""
    model.__class__ = ZeroModule
    model._state, model._compiled = state, compiled


def traces_of(model: ThunderModule, synced: bool | None = None) -> Traces:
    """The traces that ran last.

    Args:
        model: a model with ZeroTransform that was called.
        synced: of the kind that reduces gradients, or (False) of the one that runs under ``no_sync``: if another kind
            ran last, what was compiled last of it.

    Raises:
        TypeError: not a model with ZeroTransform.
        RuntimeError: the model was not called yet, or not so.
    """
    sharded_model(model)
    compiled, stats = model._compiled, compile_stats(model)
    entries = list(reversed(stats.interpreter_cache))
    entries.sort(key=lambda entry: entry.computation_traces is not stats.last_traces)
    for entry in entries:
        if synced in (None, compiled.program_of(entry).synced):
            return compiled.traces(entry)  # type: ignore[no-any-return]
    if entries:
        raise RuntimeError(f"the model was not called {'outside' if synced else 'inside'} of no_sync yet; call it so")
    raise RuntimeError("the model was not called yet, so there is no trace; call it once, or use thunder_zero.trace")
