"""needed while: transformers has no public API to apply plans, and sums gradients in hooks.

:func:`apply_plan` slices a model by its plan, as ``from_pretrained`` does for a given ``DistributedConfig``.

In the style ``replicated_with_grad_allreduce``, transformers replaces a module's forward. When the new forward first
runs, it registers a hook on each parameter, which all-reduces the gradient over the mesh of slices. Our placeholders
would get these hooks, but no gradients. So our programs all-reduce the gradient, and the original forward is restored::

    q_norm.forward   tp_forward of transformers          ->  Qwen3RMSNorm.forward
    q_norm.weight    a hook that all-reduces gradients   ->  zero_all_reduce(..., over='tensor') in the program

The new forward is recognised by its code, not by its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import getclosurevars
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

STYLES = "transformers.distributed.tensor_parallel"
SUM = ("dist", "all_reduce", "grad", "get_group")  # all names that the hook reads, so it only sums

COMPARED = {  # styles whose results tests compare with those of one process
    *("embedding_rowwise", "embedding_colwise", "colwise", "colwise_gather_output", "colwise_rep", "rowwise"),
    *("rowwise_split_input", "rowwise_rep", "replicated_with_grad_allreduce"),
}


def apply_plan(model: Any, mesh: DeviceMesh, plan: Mapping[str, str] | None) -> None:
    """Slice a model of transformers according to the model's plan, in which ``plan`` overrides styles."""
    try:
        from transformers import PreTrainedModel
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise RuntimeError("no transformers with plans for tensor parallelism is installed; 5.24 has them") from error
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise TypeError(f"mesh is {mesh!r}; give one dimension of a mesh, such as mesh['tp']")
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{name} is no model of transformers; call torch's parallelize_module with styles of your own")
    if path := next((path for path, param in model.named_parameters() if isinstance(param, DTensor)), None):
        raise ValueError(f"parameter {path!r} is a DTensor already; slice a model once")
    if path := next((path for path, _ in model.named_modules() if path.endswith(".base_layer")), None):
        raise ValueError(f"layer {path!r} has adapters already; slice the model before get_peft_model adds them")
    if not model.tp_plan and not plan:
        raise ValueError(
            f"{name} has no plan for tensor parallelism; give one as plan=, or slice its layers by torch's "
            f"parallelize_module or distribute_module"
        )
    # for one rank transformers returns no plan
    config = DistributedConfig(tp_size=max(mesh.size(), 2), tp_plan=dict(plan) if plan else None)
    styles, _, _ = model._resolve_parallel_plans(config)
    if wrong := next(((path, style) for path, style in styles.items() if style not in COMPARED), None):
        raise ValueError(
            f"the plan of {name} has the style {wrong[1]!r} for {wrong[0]!r}, which no test compares with one "
            f"process; give plan= with another style, or slice the layer by torch's parallelize_module"
        )
    # as from_pretrained does: peft reads them, and slices the adapters of sliced layers
    model.config.distributed_config, model._device_mesh, model._tp_size = config, mesh, config.tp_size
    tied = {path for path, _ in model.named_parameters(remove_duplicate=False)} - {*dict(model.named_parameters())}
    apply_tensor_parallelism(model, mesh, {path: style for path, style in styles.items() if path not in tied})
    model.tie_weights(recompute_mapping=False)


def meshes_of_sums(module: nn.Module) -> dict[str, DeviceMesh]:
    """Return a mapping from parameter names to the meshes over which hooks of transformers would sum gradients."""
    return {
        f"{path}.{name}".removeprefix("."): getclosurevars(hook).nonlocals["mesh"]
        for path, part, _, hook in _hooking(module)
        for name, _ in part.named_parameters(recurse=False)
    }


def leave_to_plan(module: nn.Module) -> None:
    """Restore the original forward of modules, without hooks on their parameters. Give adapters their whole sizes.

    peft 0.21 gives the sliced adapters of LoRA the sizes of a slice, and transformers takes these for whole sizes.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear) and isinstance(part.weight, DTensor):
            part.out_features, part.in_features = part.weight.shape
    for _, part, forward, _ in list(_hooking(module)):
        del part.forward
        if forward != part.forward:  # replaced before
            part.forward = forward


@contextmanager
def left_to_plan(module: nn.Module) -> Iterator[None]:
    """Restore the original forward of modules inside the block, without hooks on their parameters."""
    hooking = [(part, part.forward) for _, part, _, _ in _hooking(module)]
    leave_to_plan(module)
    try:
        yield
    finally:
        for part, forward in hooking:
            part.forward = forward


def _hooking(module: nn.Module) -> Iterator[tuple[str, nn.Module, Any, FunctionType]]:
    """Yield a (path, module, original forward, hook) tuple for each module whose forward registers hooks."""
    style: Any = getattr(sys.modules.get(STYLES), "ReplicatedWithGradAllReduce", None)
    install = vars(style).get("install_forward") if isinstance(style, type) else None
    if not isinstance(install, FunctionType):
        return  # transformers is not imported, so no module has the style
    known = {code for code in install.__code__.co_consts if isinstance(code, CodeType)}
    for path, part in module.named_modules():
        forward = vars(part).get("forward")
        if isinstance(forward, FunctionType) and forward.__code__ in known:
            closure = getclosurevars(forward).nonlocals
            hook = closure.get("_all_reduce_grad")
            if isinstance(hook, FunctionType) and hook.__code__ in known and hook.__code__.co_names == SUM:
                yield path, part, closure["original_forward"], hook
