"""Finds tied parameters that ``parallelize_module`` made two of, which would train apart unnoticed.

It gives each module that it slices a new parameter. A tie is known from the module if that is one of Hugging Face's, or
else from the values: those of an embedding are never those of another kind of module by chance::

    head.weight = embed.weight     one parameter
    parallelize_module             head.weight: a DTensor, Shard(0); embed.weight: as before    -> ValueError
    head.weight = embed.weight     one parameter again, if both were sliced
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thunder_zero.plan.params import Param, Plan


def require_whole_ties(module: nn.Module, plan: Plan) -> None:
    """Refuse a tie of which slicing has made two parameters.

    Raises:
        ValueError: naming the two.
    """
    of_embeddings = {param.path for param in plan.params if isinstance(_owner(module, param), nn.Embedding)}
    others = [param for param in plan.params if param.path not in of_embeddings]
    for one, other in product((plan.by_name[path] for path in sorted(of_embeddings)), others):
        if _was_tied(module, plan, one, other):
            raise ValueError(_split(one.path, other.path))
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    if (tie := _of_hugging_face(module)) is not None and tie[0] is not tie[1]:
        raise ValueError(_split(*(names[id(tensor)] for tensor in tie)))


def _split(one: str, other: str) -> str:
    return (
        f"parameters {one!r} and {other!r} were tied, and parallelize_module has made two of them, which would train "
        f"apart; slice both modules alike and tie them again afterwards, or untie them before, with values of their own"
    )


def _owner(module: nn.Module, param: Param) -> nn.Module:
    return module.get_submodule(param.path.rpartition(".")[0])


def _was_tied(module: nn.Module, plan: Plan, one: Param, other: Param) -> bool:
    """Return whether two parameters have the same values, as far as this rank has both."""
    tensors = [module.get_parameter(param.path) for param in (one, other)]
    alike = plan.whole_shape(one) == plan.whole_shape(other) and one.dtype == other.dtype
    if not alike or not any(isinstance(tensor, DTensor) for tensor in tensors) or any(t.is_meta for t in tensors):
        return False
    first = _common(tensors[0], one, other, plan)
    second = _common(tensors[1], other, one, plan)
    return first.equal(second) and bool((first != first.flatten()[:1]).any())


@torch.no_grad()
def _common(tensor: Tensor, param: Param, other: Param, plan: Plan) -> Tensor:
    """Return the part of a parameter of which this rank has values of the other one, too."""
    part, axis, dim = tensor.to_local() if isinstance(tensor, DTensor) else tensor, plan.mesh.tensor, other.sliced
    if dim is not None and dim != param.sliced:
        size = part.shape[dim] // axis.size
        part = part.narrow(dim, axis.place * size, size)
    return part.detach()


def _of_hugging_face(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return the weights that the configuration of a model of Hugging Face ties; None if it ties none."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    first, last = module.get_input_embeddings(), module.get_output_embeddings()
    if first is None or last is None or not module.config.get_text_config().tie_word_embeddings:
        return None
    return first.weight, last.weight
