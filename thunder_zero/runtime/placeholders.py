"""Placeholders replace the plain module's parameters: shape, no values; using one raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name

# What may be asked of a placeholder: what it looks like, new tensors that look like it, and itself.
_LOOKS = """
    shape dtype device layout requires_grad is_leaf grad_fn retains_grad ndim names name itemsize nbytes output_nr
    is_cpu is_cuda is_meta is_mps is_xpu is_xla is_ipu is_hpu is_maia is_mtia is_vulkan is_mkldnn is_nested
    is_quantized is_sparse is_sparse_csr _version _base _backward_hooks _post_accumulate_grad_hooks
    size dim ndimension stride numel nelement element_size storage_offset data_ptr get_device __len__ __hash__
    is_contiguous is_floating_point is_complex is_signed is_pinned is_shared is_inference is_conj is_neg is_same_size
    is_set_to is_tensor is_storage is_distributed
    empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros new_ones new_full
    new_empty_strided result_type can_cast
"""
_CONVERSIONS = "to type cpu cuda xpu mps float double half bfloat16 int long short char byte bool cfloat cdouble chalf"
LOOKS, CONVERSIONS = frozenset(_LOOKS.split()), frozenset(_CONVERSIONS.split())
MODULE_TO = "_has_compatible_shallow_copy_type"  # nn.Module's methods ask this of what a conversion returned
NAN = float("nan")
_traced = ContextVar("_traced", default=False)


class ValuesNeeded(RuntimeError):
    """Something computed with a placeholder, or wrote to it.

    Args:
        sentence: what, and what to do instead.
        path: of the parameter.
    """

    def __init__(self, sentence: str, path: str) -> None:
        super().__init__(sentence)
        self.path = path


class Placeholder(nn.Parameter):
    """A parameter of full shape whose values are in the shards; what computes with it, or writes to it, raises.

    Attributes:
        path: of the parameter in the module.
    """

    path: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # traces this as code; in its graph, the parameter is an input
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name, attribute = _name(func)
        with torch.DisableTorchFunctionSubclass():
            if attribute is None and name in CONVERSIONS and _converts_nothing(func, args, kwargs):
                return args[0]
            if (attribute is None or attribute == "__get__") and name in LOOKS:
                return func(*args, **kwargs)
            if attribute == "__get__" and name == "data":
                return args[0]
            if attribute == "__get__" and name == "grad" and _traced.get():
                return None
            if attribute == "__set__" and _sets_nothing(name, *args):
                return None
            if name == "requires_grad_" and args[0].requires_grad is (args[1] if args[1:] else True):
                return args[0]
            raise ValuesNeeded(_refusal(func, args, kwargs), next(_placeholders((args, kwargs))).path)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        with torch.DisableTorchFunctionSubclass():
            copy = _make(self.path, self.shape, self.dtype, self.device, self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch.DisableTorchFunctionSubclass():
            return _make, (self.path, self.shape, self.dtype, self.device, self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch.DisableTorchFunctionSubclass():
            return f"Placeholder({self.path!r}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def placeholder(path: str, param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> Placeholder:
    """The placeholder of a parameter: of the same shape and with its marks, with the memory of one element.

    Thunder traces shapes and dtypes (those of compute) from the plain module; the values are in the shards.
    """
    made = _make(path, param.shape, dtype, device, param.requires_grad)
    for key, value in vars(param).items():
        vars(made).setdefault(key, value)
    return made


@contextmanager
def traced() -> Iterator[None]:
    """Inside the block, placeholders have the gradient None: Thunder asks for it when it traces."""
    token = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(token)


def is_all_nan(tensor: Tensor) -> bool:
    """Whether every element is NaN."""
    if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() == 0:
        return False
    first = tensor.detach()[(0,) * tensor.ndim]
    return bool(first.isnan()) and bool(tensor.detach().isnan().all())


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter or a buffer in its place in the module tree."""
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, tensor)


def _make(path: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Placeholder:
    """NaN, where the dtype has it: kernels of others that pass by ``__torch_function__`` still find no stale values."""
    value = NAN if dtype.is_floating_point or dtype.is_complex else 0
    one = torch.full((), value, dtype=dtype, device=device)
    made = Placeholder(one.expand(shape), requires_grad=requires_grad)
    made.path = path
    return made


def _name(func: Callable[..., Any]) -> tuple[str, str | None]:
    """The name of a function, or of an attribute with the way in which it is used (``__get__``, ``__set__``)."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__, func.__name__  # type: ignore[attr-defined]
    return func.__name__, None


def _converts_nothing(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``func`` returns its first argument as it is; asked of an empty tensor that looks like it."""
    own = args[0]
    probe = torch.empty((0,) * own.ndim, dtype=own.dtype, device=own.device)
    found = func(probe, *args[1:], **kwargs)
    return found is probe or isinstance(found, str)  # Tensor.type() without arguments


def _sets_nothing(name: str, own: Tensor, value: Any) -> bool:
    return (name == "data" and value is own) or (name == "requires_grad" and value is own.requires_grad)


def _refusal(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    name, attribute = _name(func)
    held = next(_placeholders((args, kwargs)))
    what = f"parameter {held.path!r} of the plain module"
    said = f".{name}" if attribute else resolve_name(func) or name
    first = args and any(each is held for each in _placeholders(args[0]))
    if name in ("requires_grad_", "requires_grad"):
        return (
            f"requires_grad of parameter {held.path!r} was set after thunder_zero sharded it, and it was planned as "
            f"{held.requires_grad}; set it on the module before thunder.jit"
        )
    if name == "grad":
        return (
            f"{what} has no gradient: thunder_zero sharded it, and the shard has it; use model.parameters() and "
            f"model.zero_grad() of the sharded model"
        )
    if name == MODULE_TO or (first and name in CONVERSIONS):
        said = "torch.nn.Module.to" if name == MODULE_TO else said
        return (
            f"{what} cannot be moved or cast by {said}: thunder_zero sharded it as {held.dtype} on {held.device}; call "
            f".to() on the module before thunder.jit"
        )
    written = first and (attribute == "__set__" or _is_in_place(name))
    if written or _is_initialiser(func) or _is_out(held, kwargs):
        return (
            f"{said} cannot write to {what}: thunder_zero sharded it, and its values are in the shards; set them "
            f"before thunder.jit, or load full values with load_original_state_dict of the sharded model"
        )
    return (
        f"{said} cannot use {what}: thunder_zero sharded it, its values are in the shards, and only a call of the "
        f"sharded model gathers them; to train, call that model (make the method its forward, or let an argument of "
        f"forward choose it); to compute with the plain module or to read its values, use the module that "
        f"thunder_zero.full_parameters(model) gives"
    )


def _is_initialiser(func: Callable[..., Any]) -> bool:
    return getattr(func, "__module__", None) == "torch.nn.init"


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


def _is_out(held: Placeholder, kwargs: Mapping[str, Any]) -> bool:
    return any(each is held for each in _placeholders(kwargs.get("out")))


def _placeholders(tree: Any) -> Iterator[Placeholder]:
    """Those in the arguments of a function of torch, which are nested in tuples, lists and dicts."""
    if isinstance(tree, Placeholder):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _placeholders(tuple(tree.values()))
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _placeholders(item)
