"""Finds tied parameters that ``parallelize_module`` has separated, and that would silently diverge.

``parallelize_module`` gives each module that it slices a new parameter. A Hugging Face configuration tells which
parameters are tied. In other models, an embedding and another parameter are taken as tied if their values are equal::

    head.weight = embed.weight     one parameter
    parallelize_module             head.weight: a DTensor, Shard(0); embed.weight: unchanged    -> ValueError
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
    """Raise ValueError if slicing has separated two tied parameters."""
    embeddings = {param.path for param in plan.params if isinstance(_owner(module, param), nn.Embedding)}
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


def _owner(module: nn.Module, param: Param) -> nn.Module:
    return module.get_submodule(param.path.rpartition(".")[0])


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
    """Return the elements of ``param`` on this rank whose counterparts in ``other`` are also on this rank."""
    part, dim = tensor.to_local() if isinstance(tensor, DTensor) else tensor, other.sliced
    if dim is not None and dim != param.sliced:
        start, stop = plan.geometry(other).part
        part = part.narrow(dim, start, stop - start)
    return part.detach()


def _tied_by_hugging_face(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return the two weights that a Hugging Face model's configuration ties, or None."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    first, last = module.get_input_embeddings(), module.get_output_embeddings()
    if first is None or last is None or not module.config.get_text_config().tie_word_embeddings:
        return None
    return first.weight, last.weight
