"""ZeroModule: the sharded model that ``thunder.jit`` with ZeroTransform makes.

``transform.py`` calls :func:`adopt`, which changes a ThunderModule's class to this one. Names, tree and state dict are
the plain module's, whose parameters are the shards. In a call::

    model(x)    _before_forward (transform.py)     nothing was changed; inputs are cast
                ParameterSlots.traced              placeholders take the places of shards
                _forward_fn                        Thunder takes a program, or compiles one, and runs it
                guard (sharded/accumulation.py)    its backward will raise where it would be wrong
                                                   the shards are back

What would move, cast, wrap or pickle the model, or compute with shards as if they were full, is refused, with what to
do instead. :func:`traces_of` gives the program that ran last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from thunder_zero.compat import thunder as room
from thunder_zero.compat.jitted import BACKWARD_NODES, plain_of
from thunder_zero.compat.torch.fully_shard import refuse_fully_shard
from thunder_zero.compat.uncapturable import require_traceable
from thunder_zero.frontends.compilations import Compilations
from thunder_zero.frontends.compiled import Entry, Traces
from thunder_zero.frontends.failed_line import note_failed_line
from thunder_zero.frontends.from_fsdp2 import INSTEAD
from thunder_zero.frontends.refusals import EXPORT, PARTS
from thunder_zero.sharded.accelerate import (
    dtype_of_accelerate,
    in_float32,
    refuse_model_file,
    refuse_plain_trainer,
)
from thunder_zero.sharded.accumulation import guard
from thunder_zero.sharded.dtensors import load_parts, refuse_to_compute
from thunder_zero.sharded.frozen import encoded_values
from thunder_zero.sharded.full_state_dict import full_state_dict
from thunder_zero.sharded.placeholders import ParameterSlots, set_tensor
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.sharded.sharded_model import ShardedModel, sharded_model
from thunder_zero.sharded.state import State

from thunder import compile_stats
from thunder.core.module import ThunderModule

OF_FULL_PARAMETERS = {  # functions of Hugging Face's models: what to call instead
    "generate": "call it on all ranks inside of: with tz.full_parameters(model) as module: module.generate(...)",
    "save_pretrained": "tz.save_pretrained(model, folder), on all ranks, writes the same folder",
    "push_to_hub": "tz.save_pretrained(model, folder), on all ranks, writes a folder to upload",
}


class ZeroModule(ShardedModel, ThunderModule):
    """A jitted module whose parameters are sharded; ``ZeroTransform`` turns a ThunderModule into one.

    Thunder's own ``no_sync`` reduces once more at its end; this one does not.
    """

    _forward_fn: Callable[..., Any]
    _calls: ModelRuntime
    _entry: Callable[[Any], Entry]  # of Thunder's cache, as a program of ours
    _slots: ParameterSlots
    _compilations: Compilations

    def graphs(self) -> Sequence[Sequence[Entry]]:
        """The programs that Thunder compiled, with the entries of its cache: in the order in which it did, but the one
        that ran last at the end. For each graph, where forward is not one."""
        stats = compile_stats(self)
        entries = sorted(stats.interpreter_cache, key=lambda entry: entry.computation_traces is stats.last_traces)
        return [[self._entry(entry) for entry in entries]]

    def guard(self, output: Any) -> None:
        """Make the backward of what a program returned raise where it would be wrong."""
        guard(output, BACKWARD_NODES, type(self.plain).__name__, self.state.accumulation)

    def load_original_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load full tensors by the plain module's names; names that are missing keep their values.

        Raises:
            RuntimeError: names that the module does not have, or inside ``EMA.applied``; nothing has changed.
            ValueError: a parameter has another shape.
        """
        own = self.state_dict()
        if unexpected := [name for name in state_dict if name not in own]:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self.plain).__name__}: Unexpected key(s) in state_dict: "
                f"{', '.join(map(repr, unexpected))}; leave them out, or call torch's set_model_state_dict, which "
                f"skips other names if strict=False"
            )
        self.load_state_dict(state_dict, strict=False)

    def original_state_dict(self, **options: Any) -> dict[str, Any]:
        """:func:`thunder_zero.full_state_dict`, by Thunder's name."""
        return full_state_dict(self)

    # The tree, the names and the state dict are the plain module's: torch's tools walk them.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The plain module's, which are the shards."""
        return self._model.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The plain module's."""
        return self._model.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The plain module's; the first of them is the plain module itself."""
        modules: Iterator[tuple[str, nn.Module]] = self._model.named_modules(*args, **kwargs)
        return modules

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The plain module's."""
        return self._model.named_children()

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Register a buffer of the plain module."""
        self._model.register_buffer(*args, **kwargs)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a submodule to the plain module; the next forward refuses it."""
        self._model.add_module(name, module)

    def train(self, mode: bool = True) -> Self:
        """As the plain module's, which may have a ``train`` of its own."""
        self._model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module's, of shards and buffers."""
        if self.state.specs:
            refuse_model_file(type(self.plain).__name__)
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load DTensors, full tensors and buffers; of a full tensor this rank takes its rows. Not a collective.

        Values are always copied, even with ``assign=True``: the optimizer and the programs hold the parameters. Modules
        may rename, split or join entries while they load, as in ``_load_from_state_dict``.

        Raises:
            RuntimeError: ``strict``, and names are missing or unexpected; or inside ``EMA.applied``.
            ValueError: a full tensor has another shape; nothing has changed.
        """
        self._state.require_own_values("load a state dict")
        return load_parts(self._model, encoded_values(self._model, state_dict), self.state_dict(), strict)

    @property
    def training(self) -> bool:
        """The plain module's, which the traces read."""
        return self._model.training

    @training.setter
    def training(self, mode: bool) -> None:
        self._model.training = mode

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function with each module of the plain one."""
        self._model.apply(fn)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device, precision = self.state.device, self.state.plan.policy.mixed_precision
        if (dtype := dtype_of_accelerate(type(self.plain).__name__, precision, device)) is None:
            return self._call_programs(*args, **kwargs)
        with torch.autocast(device.type, dtype):
            return in_float32(self._call_programs(*args, **kwargs))

    def _call_programs(self, *args: Any, **kwargs: Any) -> Any:
        watched = self._compilations.watched(self._programs_made, args, kwargs)
        with self._slots.traced(self._state.placeholders), watched:
            try:
                return self._run(*args, **kwargs)
            except Exception as error:
                note_failed_line(error, chain.from_iterable(self.graphs()))
                raise
            finally:
                self._state.labels.end()

    def _programs_made(self) -> int:
        return len(compile_stats(self).interpreter_cache)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.guards.form = room.form_of_call(args, kwargs)
        room.forget_autocast(self)
        try:
            output = self._forward_fn(*args, **kwargs)
        except Exception as error:  # where Thunder failed, its words name neither the module nor a way out
            require_traceable(self._model, (*room.UNTRACEABLE, *PARTS))
            name = type(self._model).__name__
            if (what := room.not_returned(error)) is not None:
                raise TypeError(
                    f"Thunder cannot trace {name}, which returns {what}; use a dict or a dataclass"
                ) from error
            if (why := room.not_traced(error)) is None:
                raise
            raise NotImplementedError(
                f"Thunder cannot trace {name}: {why}; thunder_zero.compile(module, ...) trains it: dynamo captures it, "
                f"and runs what fits into no graph as Python"
            ) from error
        self.guard(output)
        return output

    def get_buffer(self, name: str) -> Tensor:
        """A buffer of the plain module; programs ask for each, in every call."""
        parent, _, key = name.rpartition(".")
        found: Tensor | None = self.get_submodule(parent)._buffers.get(key)
        return super().get_buffer(name) if found is None else found  # which raises

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Set a buffer of the plain module; Thunder calls this with what forward assigned to one.

        As in eager, nothing but the value stays: Thunder's version has the gradient of all that forward returns, which
        the next forward refuses.
        """
        set_tensor(self.plain, name.removeprefix("."), value.detach())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ZeroModule:
        """What ``to``, ``half`` or ``cuda`` call. They may change nothing: shards and traces have their dtypes."""
        ignored = ((name, param) for name, param in self.named_parameters() if name not in self.state.plan.by_name)
        for name, tensor in chain(self.state.rows.items(), ignored, self.named_buffers()):
            if place_of(fn(tensor)) != place_of(tensor):
                raise RuntimeError(
                    f"{name!r} cannot be moved or cast after thunder_zero sharded the module: it is {tensor.dtype} on "
                    f"{tensor.device}; call .to() on the module before sharding"
                )
        return self

    @torch.compiler.disable(reason=f"a sharded model has compiled programs of its own; {EXPORT}")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.__call__``; ``torch.compile`` around the model leaves its programs as they are."""
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the plain module with its shards, which holds values and computes nothing: what ``AveragedModel``
        averages, and state dicts load into."""
        copied: nn.Module = deepcopy(self._model, memo)
        copied.register_forward_pre_hook(refuse_to_compute)
        return copied

    def __getattr__(self, name: str) -> Any:
        """Thunder's: the plain module's. Not its functions that would compute with shards, or write them as a model.

        Raises:
            AttributeError: naming what to call instead; also of the names of FSDP2's methods.
        """
        kind = type(self._modules["_model"]).__name__
        if name in INSTEAD and not hasattr(self._modules["_model"], name):
            raise AttributeError(f"{kind} has no {name}, which is a name of FSDP2; here: {INSTEAD[name]}")
        if name in OF_FULL_PARAMETERS and hasattr(self._modules["_model"], name):
            raise AttributeError(
                f"{name} of {kind} needs full parameters, and thunder_zero sharded them; {OF_FULL_PARAMETERS[name]}"
            )
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """What ``torch.save(model)``, ``pickle`` and ``copy`` call."""
        raise TypeError(
            f"cannot pickle a {type(self.plain).__name__} that thunder_zero trains: it has process groups and compiled "
            f"programs; tz.save(path, model, optimizer) writes a checkpoint, and "
            f"torch.save(tz.full_state_dict(model), path) the full values"
        )

    @property
    def __jit_ignored_attributes__(self) -> NoReturn:
        """Asked for by ``torch.jit`` before it reads the attributes, those of DistributedDataParallel among them."""
        raise RuntimeError(
            f"torch.jit cannot look into the compiled programs of {type(self._model).__name__}; give it the plain "
            f"module inside of: with tz.full_parameters(model) as module"
        )

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Asked for by Accelerate, which wraps a model that is not prepared into DistributedDataParallel."""
        refuse_plain_trainer(type(self.plain).__name__)
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        """Set by Accelerate after it prepared a model; it stays as it is."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Asked for by DistributedDataParallel before it sends rank 0's shards to all ranks as if they were theirs."""
        raise RuntimeError(
            f"DistributedDataParallel was given a {type(self._model).__name__} that thunder_zero trains: its backward "
            f"already averages gradients, and from stage 1 on ranks hold different rows; train the model without it "
            f"(docs/hugging-face.md has the loops of Accelerate and Trainer)"
        )


def place_of(tensor: Tensor) -> tuple[torch.dtype, str, int]:
    """Dtype and device; ``cpu:0`` is the CPU."""
    return tensor.dtype, tensor.device.type, tensor.device.index or 0


def adopt(model: ThunderModule, kind: type[ZeroModule], state: State, progress: bool) -> None:
    """Make a jitted module a ZeroModule, in place, as torch's ``fully_shard`` does with a module's class."""
    plain, says = plain_of(model), progress and state.group.rank() == 0
    model.__class__ = kind
    model._state = state
    refuse_fully_shard(model, plain)
    model._non_persistent_buffers_set = plain._non_persistent_buffers_set  # torch's state dicts ask the root
    model._compilations = Compilations(type(plain).__name__, plain.forward, says)
    model._slots = ParameterSlots(plain, state.plan, state.shards)


def zero_module(model: object) -> ZeroModule:
    """The model, if ZeroTransform made it."""
    sharded = sharded_model(model)
    assert isinstance(sharded, ZeroModule), "there is no other class"
    return sharded


def traces_of(model: ThunderModule, synced: bool | None = None, graph: int | None = None) -> Traces:
    """The traces that ran last.

    Args:
        model: a model with ZeroTransform that was called.
        synced: True: the program that reduces gradients. False: the one under ``no_sync``. None: whichever ran last.
            If the other ran last, returns the one compiled last.
        graph: which of the graphs that the last forward ran, from 0 on; None if it ran one.

    Raises:
        TypeError: not a model with ZeroTransform.
        RuntimeError: the model has not been called, or not in this way.
        ValueError: the last forward ran several graphs, and none was chosen; or not as many.
    """
    graphs = zero_module(model).graphs()
    if graphs and ((graph is None and len(graphs) > 1) or not 0 <= (graph or 0) < len(graphs)):
        raise ValueError(f"graph is {graph}, and the last forward ran {len(graphs)}; choose 0 to {len(graphs) - 1}")
    entries = graphs[graph or 0] if graphs else []
    for entry in reversed(entries):
        if synced in (None, entry.synced):
            return entry.traces()
    if entries:
        where = "outside" if synced else "inside"
        raise RuntimeError(f"the model was not called {where} no_sync yet; call it there once")
    raise RuntimeError("the model was not called yet, so there is no trace; call it once, or use thunder_zero.trace")
