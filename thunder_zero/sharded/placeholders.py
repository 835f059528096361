"""Placeholders for parameters while forward runs: they have shapes and dtypes, but no values.

Dynamo reads the module tree, and would trace DTensors as tensor subclasses. So in each forward::

    module.h[0].weight    at rest, DTensor (10, 8)  ->  while forward runs, Placeholder (10, 8)  ->  DTensor (10, 8)
                                                        full shape, dtype of compute
                                                        plain Python that computes with it raises

Programs get rows from the model's state, not from the tree. As in torch's tensor parallelism, code that dynamo captures
must compute with DTensors. Programs compute with a slice as with a plain parameter::

    module.up.weight    DTensor (16, 8), Shard(0)      at rest: rows, on the whole mesh
                        DTensor (16, 8), Shard(0)      while forward runs: no values, on the mesh of slices
    graph's input       Placeholder (8, 8)             the graph's first lines build a DTensor from it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import resolve_name
from torch.utils._pytree import tree_iter, tree_map_only

from thunder_zero.compat.private import DTensorSpec, make_wrapper_subclass, skip_frame
from thunder_zero.sharded.dtensors import as_dtensor, contiguous, local

# Names that work on a placeholder: some read its metadata, others create tensors like it.
_READ_METADATA = """
    shape dtype device layout requires_grad grad is_leaf grad_fn retains_grad ndim names name itemsize nbytes output_nr
    is_cpu is_cuda is_meta is_mps is_xpu is_xla is_ipu is_hpu is_maia is_mtia is_vulkan is_mkldnn is_nested
    is_quantized is_sparse is_sparse_csr _version _base _backward_hooks _post_accumulate_grad_hooks
    size dim ndimension stride numel nelement element_size storage_offset data_ptr get_device __len__ __hash__
    is_contiguous is_floating_point is_complex is_signed is_pinned is_shared is_inference is_conj is_neg is_same_size
    is_set_to is_tensor is_storage is_distributed
"""
_CREATE_TENSORS = """
    empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros new_ones new_full
    new_empty_strided result_type can_cast
"""
READ_METADATA, CREATE_TENSORS = frozenset(_READ_METADATA.split()), frozenset(_CREATE_TENSORS.split())
ADD_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})


class ValuesNeeded(RuntimeError):
    """Raised when code computes with a placeholder, or writes to it. ``path`` is the parameter's path."""

    def __init__(self, sentence: str, path: str) -> None:
        super().__init__(sentence)
        self.path = path


class Placeholder(nn.Parameter):
    """A parameter of full shape without values. Computing with it, or writing to it, raises."""

    path: str  # the path of the parameter

    @classmethod
    @skip_frame  # dynamo does not guard which attribute is read
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name, attribute = _name(func)
        with torch.DisableTorchFunctionSubclass():
            # During capture, dynamo reads further metadata, such as _is_view, but no values.
            if torch.compiler.is_compiling() or (name in READ_METADATA and attribute in (None, "__get__")):
                return func(*args, **kwargs)
            if name in CREATE_TENSORS:

                def expanded_zero(param: Placeholder) -> Tensor:  # in the memory of one element
                    return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)

                return func(*tree_map_only(Placeholder, expanded_zero, args), **kwargs)
        if name in ADD_HOOKS:
            raise RuntimeError(hook_message(args[0].path))
        if attribute == "__get__":
            return _compute(_attribute, (args[0], name), {}, f".{name}")
        return _compute(func, args, kwargs, f".{name}" if attribute else resolve_name(func) or name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch.DisableTorchFunctionSubclass():
            return f"Placeholder({self.path!r}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _compute(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], operation: str) -> Any:
    """Call a function of placeholders, in a graph: dynamo compiles this frame where it runs forward without capturing.

    Dynamo does so around a graph break in a loop. Where dynamo does not capture, raise ValuesNeeded.
    """
    if torch.compiler.is_compiling():
        return func(*args, **kwargs)
    param = next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Placeholder))
    raise ValuesNeeded(cannot_use(operation, param.path), param.path)


def _attribute(param: Tensor, name: str) -> Tensor:
    # An operator, since dynamo reads the attribute of an input outside of the graph.
    return torch.ops.aten.alias(getattr(param, name))  # type: ignore[no-any-return]


def cannot_use(operation: str, path: str) -> str:
    return (
        f"{operation} cannot use parameter {path!r}: thunder_zero sharded it, its values are in the shards, and only "
        f"what is compiled of the model's forward gathers them; to compute with the plain module or to read its "
        f"values, use the module that thunder_zero.full_parameters(model) gives"
    )


def hook_message(path: str) -> str:
    return (
        f"forward registers a hook on the gradient of parameter {path!r}, which backward does not make there; register "
        f"it on the sharded model's parameter, or place the parameter's module by torch's SequenceParallel, whose "
        f"gradient is reduced without a hook"
    )


class _WithoutMemory(nn.Parameter):
    """The class with which torch creates a tensor without memory. :func:`without_memory` then replaces the class.

    Dynamo rejects tensor classes with ``__torch_dispatch__``, so the final class must differ.
    """

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:  # never called
        raise AssertionError("no operator has one")


AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def without_memory(
    kind: type[AnyTensor], like: Tensor, dtype: torch.dtype, device: torch.device, requires_grad: bool | None = None
) -> AnyTensor:
    """Return a contiguous tensor without memory, with the shape and (by default) ``requires_grad`` of ``like``."""
    requires_grad = like.requires_grad if requires_grad is None else requires_grad
    strides = torch.empty(like.shape, device="meta").stride()
    options: Any = {"dtype": dtype, "device": device, "requires_grad": requires_grad, "storage_size": 0}
    tensor: Any = make_wrapper_subclass(_WithoutMemory, like.shape, strides, **options)
    tensor.__class__ = kind
    return tensor  # type: ignore[no-any-return]


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, tensor)


def _name(func: Callable[..., Any]) -> tuple[str, str | None]:
    """Return a function's name and None, or an attribute's name and its access (``__get__``, ``__set__``)."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__, func.__name__  # type: ignore[attr-defined]
    return func.__name__, None


# Of tensor-parallel parameters: DTensors for dynamo, slices for dynamo's graph


class _SliceWithoutValues(Tensor):
    """The local tensor of a placeholder that is a DTensor."""

    path: str  # the path of the parameter

    @classmethod
    @torch.compiler.disable  # or dynamo would report that it ends a graph
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        part = next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, _SliceWithoutValues))
        raise ValuesNeeded(cannot_use(str(func), part.path), part.path)


def placeholder_of(path: str, param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return the placeholder of a parameter. For a DTensor, return a DTensor without memory, with equal placements."""
    if not isinstance(param, DTensor):
        stand_in = without_memory(Placeholder, param, dtype, device)
        vars(stand_in).update(vars(param), path=path)
        return stand_in
    rows = without_memory(_SliceWithoutValues, local(param), dtype, device)
    rows.path = path
    spec = DTensorSpec(param.device_mesh, param.placements, contiguous(tuple(param.shape), dtype))
    dtensor: Any = DTensor.__new__(DTensor, rows, spec, requires_grad=param.requires_grad)
    vars(dtensor).update(vars(param))  # including the attribute that marks a parameter
    return cast(nn.Parameter, dtensor)


def as_slice(values: Tensor, stand_in: Tensor) -> Tensor:
    """Return local values as a DTensor that is placed as a placeholder, or unchanged if the placeholder is plain."""
    if not isinstance(stand_in, DTensor):
        return values
    whole = contiguous(tuple(stand_in.shape), values.dtype)
    return as_dtensor(values, DTensorSpec(stand_in.device_mesh, stand_in.placements, whole))


def path_of(value: object) -> str | None:
    """Return the path of the parameter that a placeholder stands for; None for any other value."""
    if isinstance(value, Placeholder):
        return value.path
    part = local(value) if isinstance(value, DTensor) else None
    return part.path if isinstance(part, _SliceWithoutValues) else None


def slice_of(value: object) -> tuple[Placeholder, Callable[..., DTensor], tuple[Any, ...]] | None:
    """Return what replaces a graph's input; None if the input is not a DTensor placeholder.

    The new input is a placeholder with the shape of this rank's slice. A function builds the DTensor from it and
    further arguments, on which the graph is specialised. torch redistributes the DTensor's gradient to the parameter's
    placements. This also reduces partial gradients, such as those of sequence parallelism.
    """
    if not isinstance(value, DTensor) or (path := path_of(value)) is None:
        return None
    taken = without_memory(Placeholder, local(value), value.dtype, value.device, value.requires_grad)
    taken.path, mesh, stride = path, value.device_mesh, value.stride()

    def whole_of_slice(rows: Tensor, placements: Any, shape: tuple[int, ...]) -> DTensor:
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    return taken, whole_of_slice, (value.placements, tuple(value.shape))


def is_part(value: object) -> bool:
    return isinstance(value, DTensor) and any(not isinstance(placement, Replicate) for placement in value.placements)


def require_unhooked(placeholders: Iterable[Tensor]) -> None:
    """Raise RuntimeError if forward has registered hooks on a placeholder, as Hugging Face's plans may do."""
    for tensor in placeholders:
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise RuntimeError(hook_message(path_of(tensor) or ""))


def require_plain_tensors(module: nn.Module) -> None:
    """Raise RuntimeError if a parameter is a DTensor, since tracing a DTensor needs its mesh."""
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise RuntimeError(
                f"parameter {name!r} is a DTensor, and a trace without a mesh does not know which dimension slices it; "
                f"give mesh=, as to tz.compile"
            )
