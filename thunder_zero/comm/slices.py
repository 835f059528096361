"""Finds parameters that tensor parallelism has sliced; raises for other DTensors and split ties.

::

    parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    up.weight    DTensor (16, 8), Shard(0)     {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    down.bias    DTensor (8,), Replicate()     sliced along no dimension: each rank has all of it

    head.weight = embed.weight     one parameter
    parallelize_module             head.weight: a DTensor, Shard(0); embed.weight: unchanged    -> ValueError
    head.weight = embed.weight     one parameter again, if both were sliced
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Replicate, Shard

from thunder_zero.comm.group import Ranks, ranks_of
from thunder_zero.compat.plans_of_transformers import meshes_of_sums
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Param, Plan


def mesh_and_slices(
    module: nn.Module, mesh: DeviceMesh | None, dp_mesh_dims: DataParallelMeshDims | None = None
) -> tuple[Mesh, dict[str, int], frozenset[str]]:
    """Return the last three arguments of ``make_plan``: this rank's mesh, :func:`slices_of`, and :func:`partial_of`."""
    ranks = ranks_of(None, mesh, dp_mesh_dims)
    return ranks.planned, slices_of(module, ranks), partial_of(module, ranks)


def slices_of(module: nn.Module, ranks: Ranks) -> dict[str, int]:
    """Return a mapping from the names of sliced parameters, aliases included, to dimensions; empty without slices."""
    mesh = ranks.tensor
    if mesh is None:
        return {}
    names = mesh.mesh_dim_names or ()
    params = dict(module.named_parameters(remove_duplicate=False))
    dtensors = {name: param for name, param in params.items() if isinstance(param, DTensor)}
    if not dtensors:
        raise ValueError(
            f"mesh has the dimension {names[0]!r}, and no parameter of {type(module).__name__} is a DTensor on it; "
            f"call torch's parallelize_module first, or give the mesh without this dimension"
        )
    for name, buffer in module.named_buffers():
        if isinstance(buffer, DTensor):
            raise ValueError(f"buffer {name!r} is a DTensor, which no program takes; keep it a plain tensor")
    slices = {}
    for name, param in dtensors.items():
        if param.device_mesh != mesh:
            raise ValueError(
                f"parameter {name!r} is a DTensor on {param.device_mesh}, which is not the dimension {names[0]!r} of "
                f"the given mesh, {mesh}; give parallelize_module mesh[{names[0]!r}] of the same mesh"
            )
        if (dim := _dimension_of(name, param)) is not None:
            slices[name] = dim
    return slices


def partial_of(module: nn.Module, ranks: Ranks) -> frozenset[str]:
    """Return the names, aliases included, of parameters whose gradients are sums of parts from all ranks of ``tensor``.

    Hugging Face's tensor-parallel plans mark modules with these parameters as ``replicated_with_grad_allreduce``.
    """
    if ranks.tensor is None:
        return frozenset()
    meshes = meshes_of_sums(module)
    for name, mesh in meshes.items():
        if mesh != ranks.tensor or isinstance(module.get_parameter(name), DTensor):
            raise ValueError(
                f"the plan of parameter {name!r} sums its gradient over {mesh}, and the model is sliced over "
                f"{ranks.tensor}; give the plan this dimension of the mesh, and leave the parameter whole"
            )
    ids = {id(module.get_parameter(name)) for name in meshes}
    return frozenset(name for name, param in module.named_parameters(remove_duplicate=False) if id(param) in ids)


def _dimension_of(name: str, param: DTensor) -> int | None:
    (placement,) = param.placements
    if isinstance(placement, Replicate):
        return None
    if not isinstance(placement, Shard) or type(placement) is not Shard:
        raise ValueError(
            f"parameter {name!r} is a DTensor placed by {placement}; thunder_zero takes Shard and Replicate, by which "
            f"torch's ColwiseParallel, RowwiseParallel and SequenceParallel place parameters"
        )
    return placement.dim % param.ndim


def require_planned(module: nn.Module, plan: Plan) -> None:
    """Raise ValueError if a parameter has hooks on its gradient, or an adapter of the size of a slice is whole."""
    require_in_plan(module, plan)
    for path, part in module.named_modules():
        if "base_layer" in dict(part.named_children()):
            _require_placed_adapters(path, part)
    for name, param in module.named_parameters(remove_duplicate=False):
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name!r} has hooks on its gradient, which are not its rows' hooks; register them on the "
                f"parameters of the model that thunder_zero.compile returns"
            )


def _is_sliced(param: Any) -> TypeGuard[DTensor]:
    return isinstance(param, DTensor) and any(placement.is_shard() for placement in param.placements)


def _require_placed_adapters(path: str, layer: nn.Module) -> None:
    """Raise ValueError if the adapters of a sliced layer would have the gradient of a slice, which nothing sums."""
    params = dict(layer.named_parameters())
    base = [param for name, param in params.items() if name.startswith("base_layer.") and _is_sliced(param)]
    adapters = {name: param for name, param in params.items() if not name.startswith("base_layer.")}
    if any(map(_is_sliced, adapters.values())):
        return
    for weight, (name, adapter) in product(base, adapters.items()):
        sizes = zip(weight.to_local().shape, weight.shape, adapter.shape, strict=False)
        if any(part != whole and part == size for part, whole, size in sizes):
            raise ValueError(
                f"parameter {name!r} of layer {path!r} has the size of a slice and is not placed as one, so its "
                f"gradient would be that of one rank; slice the model by thunder_zero.hugging_face.parallelize, on a "
                f"dimension named 'tp', before get_peft_model, and target layers of the styles colwise, rowwise and "
                f"embedding_rowwise"
            )


def require_in_plan(module: nn.Module, plan: Plan) -> None:
    """Raise ValueError if the policy ignores a DTensor, or has a ``reduce_format`` for a sum of parts."""
    for planned in plan.params:
        if planned.is_partial and planned.reduce_format:
            raise ValueError(
                f"reduce_format does not sum the parts of the gradient of parameter {planned.path!r} that ranks of "
                f"tensor parallelism make; leave it out with a pattern for it, {{..., {planned.path!r}: None}}"
            )
    for name, param in module.named_parameters(remove_duplicate=False):
        if isinstance(param, DTensor) and name not in plan.by_name:
            raise ValueError(
                f"parameter {name!r} is a DTensor and the policy ignores it, so nothing would reduce its gradient; "
                f"leave it out of ignored"
            )


def require_whole_ties(module: nn.Module, plan: Plan) -> None:
    """Raise ValueError if slicing has separated two tied parameters, which would diverge.

    A Hugging Face configuration tells which parameters are tied. In other models, an embedding and another parameter
    are taken as tied if their values are equal.
    """
    owners = {param.path: module.get_submodule(param.path.rpartition(".")[0]) for param in plan.params}
    embeddings = {path for path, owner in owners.items() if isinstance(owner, nn.Embedding)}
    non_embeddings = [param for param in plan.params if param.path not in embeddings]
    for embedding, param in product((plan.by_name[path] for path in sorted(embeddings)), non_embeddings):
        if _was_tied(module, plan, embedding, param):
            raise ValueError(_split_error(embedding.path, param.path))
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    if (pair := _tied_by_hugging_face(module)) is not None and pair[0] is not pair[1]:
        raise ValueError(_split_error(*(names[id(tensor)] for tensor in pair)))


def _split_error(first: str, second: str) -> str:
    return (
        f"parameters {first!r} and {second!r} were tied, and parallelize_module has made two of them, which would "
        f"train apart; slice both modules alike and tie them again afterwards, or untie them before, with values of "
        f"their own"
    )


def _was_tied(module: nn.Module, plan: Plan, first: Param, second: Param) -> bool:
    """Return whether two parameters have equal values in the elements that this rank has of both."""
    tensors = [module.get_parameter(param.path) for param in (first, second)]
    fits = plan.whole_shape(first) == plan.whole_shape(second) and first.dtype == second.dtype
    if not fits or not any(isinstance(tensor, DTensor) for tensor in tensors) or any(t.is_meta for t in tensors):
        return False
    first_values = _common(tensors[0], first, second, plan)
    second_values = _common(tensors[1], second, first, plan)
    return first_values.equal(second_values) and bool((first_values != first_values.flatten()[:1]).any())


@torch.no_grad()
def _common(tensor: Tensor, param: Param, other: Param, plan: Plan) -> Tensor:
    """Return the elements of ``param`` on this rank that it also has of ``other``."""
    part, dim = tensor.to_local() if isinstance(tensor, DTensor) else tensor, other.sliced
    if dim is not None and dim != param.sliced:
        start, stop = plan.geometry(other).part
        part = part.narrow(dim, start, stop - start)
    return part.detach()


def _tied_by_hugging_face(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    first, last = module.get_input_embeddings(), module.get_output_embeddings()
    if first is None or last is None or not module.config.get_text_config().tie_word_embeddings:
        return None
    return first.weight, last.weight
