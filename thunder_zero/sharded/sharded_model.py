"""The base class of sharded models, and functions that find the model of a parameter.

ZeroTransform builds instances of a subclass. Training loops, checkpoints and state dicts use this class only.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from traceback import walk_tb
from typing import Any, Self, TypeVar, cast

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.group import destroy_groups_after_error, has_groups, tell_launcher, uncaught
from thunder_zero.compat.torch.groups import at_exit
from thunder_zero.sharded.param import ShardedParam
from thunder_zero.sharded.printed import format_model
from thunder_zero.sharded.state import State

Function = TypeVar("Function", bound=Callable[..., Any])


def _of_plain(method: Function) -> Function:
    """Return a method that calls the plain module's method of this name, which its class may override."""

    @wraps(method)
    def call(self: ShardedModel, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.plain, method.__name__)(*args, **kwargs)

    return cast(Function, call)


class ShardedModel(nn.Module):
    """A model whose parameters are shards.

    Names, submodules, attributes and state dict are the plain module's, so that torch's tools see its tree.
    """

    _state: State
    _model: nn.Module

    @property
    def state(self) -> State:
        return self._state

    @property
    def plain(self) -> nn.Module:
        return self._model

    def __repr__(self) -> str:
        return format_model(type(self).__name__, self.plain, self.state)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer the reduction of gradients. The next backward outside the block reduces their sum.

        As in PyTorch, a backward defers its gradients if its forward ran inside the block.

        Deferred gradients are not in ``.grad``. The model's ``zero_grad`` drops them. As in FSDP2, an optimizer's
        ``zero_grad`` and ``param.grad = None`` do not drop them. Drop deferred gradients at the end of an epoch;
        otherwise they are added to the next gradients.

        >>> with model.no_sync():
        ...     for x in micro_batches[:-1]:
        ...         loss(model(x)).backward()
        >>> loss(model(micro_batches[-1])).backward()
        """
        was_synced, self.state.synced = self.state.synced, False
        try:
            yield
        finally:
            self.state.synced = was_synced

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call ``nn.Module.zero_grad``, and drop the gradients that ``no_sync`` has deferred."""
        super().zero_grad(set_to_none)
        self.state.drop_deferred()

    named_parameters = _of_plain(nn.Module.named_parameters)
    named_buffers = _of_plain(nn.Module.named_buffers)
    named_modules = _of_plain(nn.Module.named_modules)
    named_children = _of_plain(nn.Module.named_children)
    register_buffer = _of_plain(nn.Module.register_buffer)
    register_parameter = _of_plain(nn.Module.register_parameter)  # if it is new and trains, the next forward raises
    add_module = _of_plain(nn.Module.add_module)
    state_dict = _of_plain(nn.Module.state_dict)

    def train(self, mode: bool = True) -> Self:
        self._model.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        self._model.apply(fn)
        return self

    @property
    def training(self) -> bool:
        return self._model.training

    @training.setter
    def training(self, mode: bool) -> None:
        self._model.training = mode

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the plain module, whose forward reads it, unless it is this model's own."""
        if _is_own(self, name):
            super().__setattr__(name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if _is_own(self, name):
            super().__delattr__(name)
        else:
            delattr(self._model, name)


def _is_own(model: ShardedModel, name: str) -> bool:
    """Return whether an attribute is set on the sharded model itself, or defined or declared by its class."""
    kinds = map(vars, type(model).__mro__)
    return name in vars(model) or any(name in kind or name in kind.get("__annotations__", ()) for kind in kinds)


def tagged(name: str) -> Callable[[Function], Function]:
    """Return a decorator for a public function that is a collective. Errors about differing ranks show ``name``."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            models = [value for value in (*args, *kwargs.values()) if isinstance(value, ShardedModel)]
            with doing(name, *(model.state.name for model in models)):
                return function(*args, **kwargs)

        return cast(Function, wrapper)

    return decorate


def sharded_model(model: object) -> ShardedModel:
    if isinstance(model, ShardedModel):
        return model
    raise TypeError(
        f"expected a sharded model, got {type(model).__name__}; pass the model itself, which thunder_zero.compile (or "
        f"thunder.jit with ZeroTransform) returned"
    )


_states: weakref.WeakKeyDictionary[State, None] = weakref.WeakKeyDictionary()  # in the order of their registration
# The model and the path of each shard, and of each parameter that a shard replaced. A plain module or an optimizer may
# keep these tensors longer than the model, and an attribute of a tensor would be copied and pickled with it.
_shards, _replaced = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()


def register(state: State, module: nn.Module) -> None:
    """Register a model's shards, and the parameters that they will replace. Refuse gradients of these parameters."""
    _states[state] = None
    for path, param in state.params.items():
        original = module.get_parameter(path)
        _shards[param.shard] = _replaced[original] = weakref.ref(state), path
        if original.requires_grad:
            original.register_post_accumulate_grad_hook(_refuse_gradient(path, state.name))


def _refuse_gradient(path: str, name: str) -> Callable[[Tensor], None]:
    """Return a hook on a parameter that a shard replaced, whose gradient no optimizer of the model steps."""

    def refuse(original: Tensor) -> None:
        raise RuntimeError(
            f"backward reaches the plain module's parameter {path!r}, which the transform replaced by a shard of "
            f"{name}, so its gradient would be lost; read the parameter from the model when the loss is computed"
        )

    return refuse


MIXED = "mixed torch.Tensor and DTensor"  # a part of torch's error message


def _explain_mixed() -> None:
    """Add advice to an uncaught error of torch, raised in C++, about a plain tensor beside a shard; called at exit."""
    error = uncaught()
    if error is None or MIXED not in str(error) or getattr(error, "__notes__", None) or not states():
        return
    state, param = next(_shards_in(error), (states()[0], None))
    subject = "a parameter" if param is None else f"parameter {param.path!r}"
    error.add_note(
        f"thunder_zero: {subject} of {state.name} was used outside of forward, where it is a DTensor with this rank's "
        f"rows; move the computation into the module's forward, which may return the loss, or read values from the "
        f"module of thunder_zero.full_parameters(model), under torch.no_grad()"
    )
    print(error.__notes__[-1], file=sys.stderr)


def _shards_in(error: BaseException) -> Iterator[tuple[State, ShardedParam]]:
    """Yield the models and parameters of shards among the local variables of an error, the innermost frame first."""
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            tensors = value._parameters.values() if isinstance(value, nn.Module) else (value,)
            yield from filter(None, map(owner_of, (tensor for tensor in tensors if isinstance(tensor, Tensor))))


def _leave_groups() -> None:
    """Drop references to process groups at exit, so that torch joins gloo's threads.

    A gloo thread that frees tensors after the interpreter has ended would abort the process. Groups that the script did
    not destroy are kept, since another exit handler may still save a model. After an error these groups are destroyed.
    """
    _explain_mixed()
    tell_launcher()
    destroy_groups_after_error()
    if not has_groups():
        for state in states():
            state.leave_group()


at_exit(_leave_groups)


def states() -> list[State]:
    return list(_states)


def is_transformed(param: nn.Parameter) -> bool:
    """Return whether a parameter is a shard. The module of a shard has already been transformed."""
    return param in _shards


def owner_of(param: Tensor) -> tuple[State, ShardedParam] | None:
    """Return the model and the parameter of a shard; None for any other tensor."""
    return _owner(_shards, param)


def owner_of_replaced(param: Tensor) -> tuple[State, ShardedParam] | None:
    """Return the model and the parameter of a parameter that a shard replaced; None for any other tensor."""
    return _owner(_replaced, param)


def replaced_among(params: Iterable[Tensor]) -> Iterable[tuple[State, ShardedParam]]:
    """Return the owners of parameters that shards replaced. Usually no replaced parameter is alive."""
    return filter(None, map(owner_of_replaced, params)) if _replaced else ()


def _owner(owners: WeakTensorKeyDictionary, param: Tensor) -> tuple[State, ShardedParam] | None:
    reference, path = owners.get(param, (None, ""))
    state: State | None = reference and reference()
    return None if state is None else (state, state.params[path])
