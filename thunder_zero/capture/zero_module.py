"""ZeroModule: the sharded model that ``thunder.jit`` makes with ZeroTransform.

``transform.py`` calls :meth:`ZeroModule.adopt`, which changes the class of a ThunderModule. Names, submodules and
state dict come from the plain module, whose parameters are the shards. A call has these steps::

    model(x)    _before_forward                    check that nothing was changed, cast inputs
                State.holding                      replace shards by placeholders
                CapturedForward (forward.py)       let dynamo look up or capture graphs, and run their programs
                State.holding                      put the shards back

Calls raise if they would move, cast, wrap or pickle the model, or compute with shards as full values. The errors name
an alternative. :func:`traces_of` returns the program that ran last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from thunder_zero.capture.compilations import Compilations
from thunder_zero.capture.forward import CapturedForward
from thunder_zero.capture.graphs import Captured
from thunder_zero.capture.placement import Check, module_checks, require_intact
from thunder_zero.capture.programs import Entry
from thunder_zero.capture.refusals import EXPORT, refuse_tools
from thunder_zero.compat.jitted import forget_tensors, plain_of
from thunder_zero.compat.torch.fully_shard import refuse_fully_shard
from thunder_zero.plan.from_fsdp2 import INSTEAD
from thunder_zero.sharded.casts import cast_inputs
from thunder_zero.sharded.dtensors import load_parts, refuse_to_compute
from thunder_zero.sharded.frozen import encoded_values
from thunder_zero.sharded.full_state_dict import full_state_dict
from thunder_zero.sharded.gather import agree_on_stale
from thunder_zero.sharded.reduce import follow_requires_grad
from thunder_zero.sharded.sharded_model import ShardedModel, sharded_model
from thunder_zero.sharded.state import State
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.failed_line import note_failed_line

from thunder.core.module import ThunderModule
from thunder.core.trace import is_tracing

NEED_FULL_PARAMETERS = {  # functions of Hugging Face's models, with their replacements
    "generate": "call it on all ranks inside of: with tz.full_parameters(model) as module: module.generate(...)",
    "save_pretrained": "tz.save_pretrained(model, folder), on all ranks, writes the same folder",
    "push_to_hub": "tz.save_pretrained(model, folder), on all ranks, writes a folder to upload",
}


class ZeroModule(ShardedModel, ThunderModule):
    """A jitted module whose parameters are sharded. ``ZeroTransform`` turns a ThunderModule into a ZeroModule.

    Thunder's ``no_sync`` reduces gradients once more at its end. ZeroModule's ``no_sync`` does not.
    """

    _forward_fn: CapturedForward
    _checks: list[Check]
    _compilations: Compilations
    _wrapper: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None  # set by a sharded accelerator

    @classmethod
    def adopt(cls, model: ThunderModule, forward: CapturedForward, state: State, *, progress: bool) -> None:
        """Change the class of a jitted module to ZeroModule in place, as torch's ``fully_shard`` changes a class."""
        plain, reports = plain_of(model), progress and state.group.rank() == 0
        model.__class__ = cls
        model._state, model._forward_fn = state, forward
        model._checks = module_checks(model, state)
        model._compilations = Compilations(type(plain).__name__, plain.forward, reports)
        model._non_persistent_buffers_set = plain._non_persistent_buffers_set  # torch's state dicts ask the root
        forget_tensors(model)
        refuse_fully_shard(model, plain)
        model.register_forward_pre_hook(cls._before_forward, with_kwargs=True)
        model.register_forward_hook(lambda model, args, output: model._after_forward())

    def graphs(self) -> Sequence[Sequence[Entry]]:
        """Return the programs of each graph of the last forward. A graph's last program is the one that ran last."""
        return self._forward_fn.ran

    @property
    def captured(self) -> Mapping[int, Captured]:
        """The graphs that dynamo captured and that are kept, least recently used first."""
        return self._forward_fn.graphs.captured

    def load_original_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load full tensors under the plain module's names. Tensors that ``state_dict`` lacks keep their values.

        If a name is unknown or a shape differs, no value changes, and an error names it.
        """
        current = self.state_dict()
        if unexpected := [name for name in state_dict if name not in current]:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self.plain).__name__}: Unexpected key(s) in state_dict: "
                f"{', '.join(map(repr, unexpected))}; leave them out, or call torch's set_model_state_dict, which "
                f"skips other names if strict=False"
            )
        self.load_state_dict(state_dict, strict=False)

    def original_state_dict(self, **options: Any) -> dict[str, Any]:
        """Return the full state dict, as :func:`thunder_zero.full_state_dict` does."""
        return full_state_dict(self)

    # Submodules, names and state dict come from the plain module, so that torch's tools see its tree.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the shards, which are the plain module's parameters."""
        return self._model.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the plain module's buffers."""
        return self._model.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the plain module and its submodules."""
        modules: Iterator[tuple[str, nn.Module]] = self._model.named_modules(*args, **kwargs)
        return modules

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the plain module's children."""
        return self._model.named_children()

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Register a buffer of the plain module."""
        self._model.register_buffer(*args, **kwargs)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter of the plain module. The next forward raises if it is new and trains."""
        self._model.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a submodule to the plain module. The next forward raises if it has parameters that train."""
        self._model.add_module(name, module)

    def train(self, mode: bool = True) -> Self:
        """Call ``train`` of the plain module, whose class may override ``train``."""
        self._model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the plain module, with shards and buffers."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load DTensors, full tensors and buffers. This rank copies only its rows of a full tensor.

        This is not a collective. Values are always copied, even with ``assign=True``, because the optimizer and the
        programs hold the parameters. A module's ``_load_from_state_dict`` may rename, split or join entries.

        Raises:
            RuntimeError: ``strict`` is True and names are missing or unexpected, or the call is inside ``EMA.applied``.
            ValueError: a full tensor and its parameter have different shapes. No value was changed.
        """
        self._state.require_own_values("load a state dict")
        return load_parts(self._model, encoded_values(self._model, state_dict), self.state_dict(), strict)

    @property
    def training(self) -> bool:
        """True if the plain module is in training mode. Traces read this flag."""
        return self._model.training

    @training.setter
    def training(self, mode: bool) -> None:
        self._model.training = mode

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function with the plain module and each of its submodules."""
        self._model.apply(fn)
        return self

    def wrap_forward(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Run the programs of forward inside of a wrapper, such as an autocast, from now on."""
        self._wrapper = wrapper

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the programs of forward, inside of the last wrapper."""
        call = self._call_programs if self._wrapper is None else self._wrapper(self._call_programs)
        return call(*args, **kwargs)

    def _before_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Check the model, and return the arguments of forward in the dtypes of compute.

        The collectives of a failed step end here, and ranks agree on stale rows.
        """
        name = type(self.plain).__name__
        if is_tracing():
            raise TypeError(
                f"thunder.jit was given a function that calls {name}, which ZeroTransform "
                f"sharded; call the jitted module from a function that is not jitted"
            )
        refuse_tools(name)
        self._state.require_at_rest()
        self._state.transport.drain()  # ends the collectives of a failed step
        require_intact(self._checks)
        follow_requires_grad(self._state)
        self._state.same_batch.compare(args, kwargs)
        agree_on_stale(self._state)
        return cast_inputs(name, args, kwargs, self._state.plan.policy.mixed_precision)

    def _after_forward(self) -> None:
        """Count the forward, and wait for copies of offloaded shards, so that the host may write to the shards.

        Backward would also wait for the copies, but a forward may have no backward.
        """
        self._state.training_forwards += self.training and torch.is_grad_enabled()
        if self._state.plan.policy.cpu_offload:
            self._state.copies.wait()

    def _call_programs(self, *args: Any, **kwargs: Any) -> Any:
        graphs = self._forward_fn.graphs
        watched = self._compilations.watched(lambda: graphs.program_count, graphs.shapes_by_kind, args, kwargs)
        with self._state.holding(), watched:
            try:
                return self._forward_fn(*args, **kwargs)
            except Exception as error:
                entries = chain.from_iterable(self.graphs())
                note_failed_line(error, ((entry.computation_fn, entry.traces) for entry in entries))
                raise
            finally:
                self._state.labels.end()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ZeroModule:
        """Raise RuntimeError if a call such as ``to`` or ``half`` would move or cast a tensor, else do nothing."""
        ignored = ((name, param) for name, param in self.named_parameters() if name not in self.state.plan.by_name)
        rows = ((path, param.rows) for path, param in self.state.params.items())
        for name, tensor in chain(rows, ignored, self.named_buffers()):
            if place_of(fn(tensor)) != place_of(tensor):
                raise RuntimeError(
                    f"{name!r} cannot be moved or cast after thunder_zero sharded the module: it is {tensor.dtype} on "
                    f"{tensor.device}; call .to() on the module before sharding"
                )
        return self

    @torch.compiler.disable(reason=f"a sharded model has compiled programs of its own; {EXPORT}")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. An outer ``torch.compile`` does not compile the model's programs again."""
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the plain module with its shards. A forward of the copy raises.

        ``AveragedModel`` averages into such a copy, and state dicts load into it.
        """
        copied: nn.Module = deepcopy(self._model, memo)
        copied.register_forward_pre_hook(refuse_to_compute)
        return copied

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the plain module. Raise for names of FSDP2 and functions that need full values."""
        class_name = type(self._modules["_model"]).__name__
        if name in INSTEAD and not hasattr(self._modules["_model"], name):
            raise AttributeError(f"{class_name} has no {name}, which is a name of FSDP2; here: {INSTEAD[name]}")
        if name in NEED_FULL_PARAMETERS and hasattr(self._modules["_model"], name):
            raise AttributeError(
                f"{name} of {class_name} needs full parameters, and thunder_zero sharded them; "
                f"{NEED_FULL_PARAMETERS[name]}"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the plain module, whose forward reads it, as a module of ``torch.compile`` does."""
        if _is_own(self, name):
            super().__setattr__(name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the plain module, unless it is one of this model."""
        if _is_own(self, name):
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze all parameters. The next forward compiles a program for it.

        Raises:
            RuntimeError: a ``frozen_format`` stores a parameter that would be unfrozen. No parameter was changed.
        """
        for param in self.state.plan.params:
            if requires_grad and param.frozen_format:
                raise RuntimeError(
                    f"parameter {param.path!r} cannot be unfrozen: frozen_format stores it as {param.frozen_format!r}, "
                    f"which no optimizer can step; unfreeze other modules, or shard the model without frozen_format"
                )
        return super().requires_grad_(requires_grad)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise TypeError. ``torch.save(model)``, ``pickle`` and ``copy.copy`` call this method."""
        raise TypeError(
            f"cannot pickle a {type(self.plain).__name__} that thunder_zero trains: it has process groups and compiled "
            f"programs; tz.save(path, model, optimizer) writes a checkpoint, and "
            f"torch.save(tz.full_state_dict(model), path) the full values"
        )

    @property
    def __jit_ignored_attributes__(self) -> NoReturn:
        """Raise RuntimeError. ``torch.jit`` reads this attribute first, so the error can name ``torch.jit``."""
        raise RuntimeError(
            f"torch.jit cannot look into the compiled programs of {type(self._model).__name__}; give it the plain "
            f"module inside of: with tz.full_parameters(model) as module"
        )

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True in a sharded accelerator. Accelerate asks before it would wrap the model."""
        if self._wrapper is None:
            raise RuntimeError(
                f"Accelerate, or a Trainer, was given a {type(self.plain).__name__} that thunder_zero trains, of which "
                f"it would save one rank's rows; make it by thunder_zero.hugging_face.sharded(Accelerator)(...) or "
                f"sharded(Trainer)(model=model, ...) (docs/hugging-face.md)"
            )
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        """Do nothing. Accelerate sets this attribute after it has prepared a model."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Raise RuntimeError. DistributedDataParallel reads this before it would send rank 0's shards to all ranks."""
        raise RuntimeError(
            f"DistributedDataParallel was given a {type(self._model).__name__} that thunder_zero trains: its backward "
            f"already averages gradients, and from stage 1 on ranks hold different rows; train the model without it "
            f"(docs/hugging-face.md has the loops of Accelerate and Trainer)"
        )


def _is_own(model: ZeroModule, name: str) -> bool:
    """Return whether an attribute belongs to the sharded model itself: set on it, or defined or declared by a class."""
    kinds = map(vars, type(model).__mro__)
    return name in vars(model) or any(name in kind or name in kind.get("__annotations__", ()) for kind in kinds)


def place_of(tensor: Tensor) -> tuple[torch.dtype, str, int]:
    """Return the dtype, device type and device index (default: 0) of a tensor."""
    return tensor.dtype, tensor.device.type, tensor.device.index or 0


def zero_module(model: object) -> ZeroModule:
    """Return a model as a ZeroModule, or raise TypeError if it is no sharded model."""
    sharded = sharded_model(model)
    assert isinstance(sharded, ZeroModule), "all sharded models are ZeroModules"
    return sharded


def traces_of(model: ThunderModule, synced: bool | None = None, graph: int | None = None) -> Traces:
    """Return the traces that ran last.

    Args:
        model: a sharded model that was called.
        synced: True for the program that reduces gradients, False for the program under ``no_sync``, None for the
            program that ran last. If several programs match, and none of these ran last, the newest is returned.
        graph: the index of a graph of the last forward. None if there was one graph.

    Raises:
        TypeError: ``model`` is not a sharded model.
        RuntimeError: the model has not been called, or only with the other value of ``synced``.
        ValueError: ``graph`` is None and the last forward ran several graphs, or there is no such graph.
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
