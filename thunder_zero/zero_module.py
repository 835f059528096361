"""ZeroModule: the sharded model that ``thunder.jit`` with ZeroTransform makes."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
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

    @property
    def compiled(self) -> Compiled:
        """The model's symbols and programs."""
        return self._compiled

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.__call__``; ``torch.compile`` around the model leaves to Thunder what Thunder compiles."""
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            f"a sharded {type(self._model).__name__} cannot be copied, as its copy would hold shards that nobody else "
            f"has; build and shard a second module, then call load_original_state_dict(thunder_zero.full_state_dict("
            f"model)) on it"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Asked for by DistributedDataParallel before it sends rank 0's shards to all ranks as if they were theirs."""
        raise RuntimeError(
            f"DistributedDataParallel was given a sharded {type(self._model).__name__}, whose parameters differ from "
            f"rank to rank and whose backward already averages gradients; train the model without it"
        )


def adopt(model: ThunderModule, state: State, compiled: Compiled) -> None:
    """Make a jitted module a ZeroModule, in place, as torch's ``fully_shard`` does with a module's class."""
    model.__class__ = ZeroModule
    model._state, model._compiled = state, compiled


def zero_module(model: object) -> ZeroModule:
    """The model, if ZeroTransform made it.

    Raises:
        TypeError: it did not.
    """
    sharded = sharded_model(model)
    if not isinstance(sharded, ZeroModule):
        raise TypeError(
            f"expected a module jitted with ZeroTransform, got {type(model).__name__}; make one with "
            f"thunder.jit(module, transforms=[thunder_zero.ZeroTransform(...)])"
        )
    return sharded


def traces_of(model: ThunderModule, synced: bool | None = None) -> Traces:
    """The traces that ran last.

    Args:
        model: a model with ZeroTransform that was called.
        synced: True: the program that reduces gradients. False: the one under ``no_sync``. None: whichever ran last.
            If the other ran last, returns the one compiled last.

    Raises:
        TypeError: not a model with ZeroTransform.
        RuntimeError: the model has not been called, or not in this way.
    """
    compiled, stats = zero_module(model).compiled, compile_stats(model)
    entries = list(reversed(stats.interpreter_cache))
    entries.sort(key=lambda entry: entry.computation_traces is not stats.last_traces)
    for entry in entries:
        if synced in (None, compiled.program_of(entry).synced):
            return compiled.traces(entry)
    if entries:
        where = "outside" if synced else "inside"
        raise RuntimeError(f"the model was not called {where} no_sync yet; call it there once")
    raise RuntimeError("the model was not called yet, so there is no trace; call it once, or use thunder_zero.trace")
