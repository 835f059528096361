"""ZeroModule: the sharded model that ``thunder.jit`` makes with ZeroTransform.

``transform.py`` calls :meth:`ZeroModule.adopt`, which changes the class of a ThunderModule. A call has these steps::

    model(x)    _before_forward                    check that nothing was changed, cast inputs
                State.holding                      replace shards by placeholders
                CapturedForward (forward.py)       let dynamo look up or capture graphs, and run their programs
                State.holding                      put the shards back

Calls raise if they would move, cast, wrap or pickle the model, or compute with shards as full values. The errors name
an alternative. :func:`traces_of` returns the program that ran last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from thunder_zero.capture.compilations import Compilations
from thunder_zero.capture.forward import CapturedForward
from thunder_zero.capture.placement import Placement
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


class Refusals(nn.Module):
    """What pickle, torch and Accelerate ask of a model before they would copy or wrap it: an error says what to call.

    The attributes are those that each reads first.
    """

    _model: nn.Module
    _wrapper: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None  # set by a sharded accelerator

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"cannot pickle a {type(self._model).__name__} that thunder_zero trains: it has process groups and "
            f"compiled programs; tz.save(path, model, optimizer) writes a checkpoint, and "
            f"torch.save(tz.full_state_dict(model), path) the full values"
        )

    @property
    def __jit_ignored_attributes__(self) -> NoReturn:
        raise RuntimeError(
            f"torch.jit cannot look into the compiled programs of {type(self._model).__name__}; give it the plain "
            f"module inside of: with tz.full_parameters(model) as module"
        )

    @property
    def _is_accelerate_prepared(self) -> bool:
        if self._wrapper is None:
            raise RuntimeError(
                f"Accelerate, or a Trainer, was given a {type(self._model).__name__} that thunder_zero trains, of "
                f"which it would save one rank's rows; make it by thunder_zero.hugging_face.sharded(Accelerator)(...) "
                f"or sharded(Trainer)(model=model, ...) (docs/hugging-face.md)"
            )
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        """Do nothing. Accelerate sets this attribute after it has prepared a model."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        raise RuntimeError(
            f"DistributedDataParallel was given a {type(self._model).__name__} that thunder_zero trains: its backward "
            f"already averages gradients, and from stage 1 on ranks hold different rows; train the model without it "
            f"(docs/hugging-face.md has the loops of Accelerate and Trainer)"
        )


class ZeroModule(Refusals, ShardedModel, ThunderModule):
    """A jitted module whose parameters are sharded. ``ZeroTransform`` turns a ThunderModule into a ZeroModule.

    Thunder's ``no_sync`` reduces gradients once more at its end. ZeroModule's ``no_sync`` does not.
    """

    _forward_fn: CapturedForward
    _placement: Placement
    _compilations: Compilations

    @classmethod
    def adopt(cls, model: ThunderModule, forward: CapturedForward, state: State, *, progress: bool) -> None:
        """Change the class of a jitted module to ZeroModule in place, as torch's ``fully_shard`` changes a class."""
        plain, reports = plain_of(model), progress and state.group.rank() == 0
        model.__class__ = cls
        model._state, model._forward_fn = state, forward
        model._placement = Placement(plain, state.params)
        model._compilations = Compilations(type(plain).__name__, plain.forward, reports)
        model._non_persistent_buffers_set = plain._non_persistent_buffers_set  # torch's state dicts ask the root
        forget_tensors(model)
        refuse_fully_shard(model, plain)
        model.register_forward_pre_hook(cls._before_forward, with_kwargs=True)
        model.register_forward_hook(lambda model, args, output: model._after_forward())

    def load_original_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load some full tensors. If a name is unknown or a shape differs, raise, and change no value."""
        current = self.state_dict()
        if unexpected := [name for name in state_dict if name not in current]:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self._model).__name__}: Unexpected key(s) in state_dict: "
                f"{', '.join(map(repr, unexpected))}; leave them out, or call torch's set_model_state_dict, which "
                f"skips other names if strict=False"
            )
        self.load_state_dict(state_dict, strict=False)

    def original_state_dict(self, **options: Any) -> dict[str, Any]:
        return full_state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load DTensors, full tensors and buffers. This rank copies only its rows of a full tensor.

        This is not a collective. Values are always copied, even with ``assign=True``, because the optimizer and the
        programs hold the parameters. A module's ``_load_from_state_dict`` may rename, split or join entries. If shapes
        differ, no value is changed.
        """
        self._state.require_own_values("load a state dict")
        return load_parts(self._model, encoded_values(self._model, state_dict), self.state_dict(), strict)

    def wrap_forward(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Run forward inside of a wrapper, such as an autocast, from now on."""
        self._wrapper = wrapper

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call_programs if self._wrapper is None else self._wrapper(self._call_programs)
        return call(*args, **kwargs)

    def _before_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Check the model, and return the arguments of forward in the dtypes of compute."""
        name = type(self._model).__name__
        if is_tracing():
            raise TypeError(
                f"thunder.jit was given a function that calls {name}, which ZeroTransform "
                f"sharded; call the jitted module from a function that is not jitted"
            )
        refuse_tools(name)
        self._state.require_at_rest()
        self._state.transport.drain()  # ends the collectives of a failed step
        self._placement.require()
        follow_requires_grad(self._state)
        self._state.same_batch.compare(args, kwargs)
        agree_on_stale(self._state)
        return cast_inputs(name, args, kwargs, self._state.plan.policy.mixed_precision)

    def _after_forward(self) -> None:
        self._state.training_forwards += self.training and torch.is_grad_enabled()
        if self._state.plan.policy.cpu_offload:
            self._state.copies.wait()  # the host may now write to the shards, also without a backward

    def _call_programs(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._forward_fn
        watched = self._compilations.watched(lambda: forward.program_count, forward.shapes_by_kind, args, kwargs)
        with self._state.holding(), watched:
            try:
                return self._forward_fn(*args, **kwargs)
            except Exception as error:
                executables = chain.from_iterable(self._forward_fn.ran)
                note_failed_line(error, ((executable.computation_fn, executable.traces) for executable in executables))
                raise
            finally:
                self._state.labels.end()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ZeroModule:
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

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze all parameters. The next forward compiles a program for it."""
        for param in self.state.plan.params:
            if requires_grad and param.frozen_format:
                raise RuntimeError(
                    f"parameter {param.path!r} cannot be unfrozen: frozen_format stores it as {param.frozen_format!r}, "
                    f"which no optimizer can step; unfreeze other modules, or shard the model without frozen_format"
                )
        return super().requires_grad_(requires_grad)


def place_of(tensor: Tensor) -> tuple[torch.dtype, str, int]:
    return tensor.dtype, tensor.device.type, tensor.device.index or 0


def zero_module(model: object) -> ZeroModule:
    sharded = sharded_model(model)
    assert isinstance(sharded, ZeroModule), "all sharded models are ZeroModules"
    return sharded


def captured_forward(model: object) -> CapturedForward:
    """Return the captured forward of a sharded model: its graphs and programs."""
    return zero_module(model)._forward_fn


def traces_of(model: ThunderModule, synced: bool | None = None, graph: int | None = None) -> Traces:
    """Return the traces that ran last.

    Args:
        model: a sharded model that was called.
        synced: True for the program that reduces gradients, False for the program under ``no_sync``, None for the
            program that ran last. If several programs match, and none of these ran last, the newest is returned.
        graph: the index of a graph of the last forward. None if there was one graph.
    """
    graphs = captured_forward(model).ran
    if graphs and ((graph is None and len(graphs) > 1) or not 0 <= (graph or 0) < len(graphs)):
        raise ValueError(f"graph is {graph}, and the last forward ran {len(graphs)}; choose 0 to {len(graphs) - 1}")
    executables = graphs[graph or 0] if graphs else []
    for executable in reversed(executables):
        if synced in (None, executable.synced):
            return replace(executable.traces(), outer=zero_module(model).state.outer)
    if executables:
        where = "outside" if synced else "inside"
        raise RuntimeError(f"the model was not called {where} no_sync yet; call it there once")
    raise RuntimeError("the model was not called yet, so there is no trace; call it once, or use thunder_zero.trace")


def as_traces(model_or_traces: ThunderModule | Traces) -> Traces:
    """Return traces unchanged, or the traces of a model that ran last."""
    return model_or_traces if isinstance(model_or_traces, Traces) else traces_of(model_or_traces)
