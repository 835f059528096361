"""Refuses modules that cannot be sharded, and tools of torch that cannot read a sharded model.

An error has the problem, its reason and an action::

    submodule 'emb' of Net (Embedding) has max_norm, and forward writes to the weight, which is sharded; normalise the
    rows in forward

``PARTS`` lists refused kinds of submodules. Submodules are checked before sharding, and before each compilation.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from thunder_zero.compat.dynamo import is_compiled
from thunder_zero.compat.jitted import is_empty, plain_of
from thunder_zero.compat.private import peek_interpreter_stack
from thunder_zero.compat.uncapturable import UNCAPTURABLE, RefusedPart, require_traceable
from thunder_zero.plan.policy import Policy
from thunder_zero.sharded.sharded_model import is_transformed

from thunder import DebugOptions, compile_data
from thunder.core.module import ThunderModule
from thunder.core.options import CACHE_OPTIONS, SHARP_EDGES_OPTIONS
from thunder.core.transform_common import Transform
from thunder.distributed.transforms.ddp_v2 import DDPTransform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform
from thunder.executors.torch_compile import torch_compile_ex
from thunder.extend import get_always_executors, get_default_executors
from thunder.transforms.cudagraph import CUDAGraphTransform
from thunder.transforms.prune_prologue_checks import PrunePrologueChecks

EXPORT = "export inside of: with tz.full_parameters(model) as module: torch.export.export(module, ...)"

PARTS: tuple[RefusedPart, ...] = (
    *UNCAPTURABLE,
    RefusedPart(
        lambda module: isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None,
        "has max_norm",
        "normalise the rows in forward",
        "forward writes to the weight, which is sharded",
    ),
    RefusedPart(
        lambda module: isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse,
        "has sparse=True",
        "use sparse=False",
        "gradients are reduced as dense tensors",
    ),
    RefusedPart(
        lambda module: isinstance(module, nn.DataParallel),
        "is a DataParallel",
        "use the module inside of it",
        "it splits batches in one process",
    ),
    RefusedPart(
        lambda module: isinstance(module, DistributedDataParallel),
        "is a DistributedDataParallel",
        "use the module inside of it",
        "it reduces gradients itself",
    ),
)


EARLY_HOOKS = (
    *("transform_module", "transform_traces_pre_prologue", "transform_state_dict_for_submodule"),
    "reverse_transform_state_dict_for_submodule",
)
INSTEAD_OF_OPTIONS = {
    "cache": "pass dynamic= of ZeroTransform",
    "sharp_edges": "read graph breaks by TORCH_LOGS=graph_breaks",
    "disable_torch_autograd": "call the model under torch.no_grad",
    "debug_options": "use thunder_zero.print_trace",
}


def require_untransformed(model: ThunderModule, transform: Transform) -> None:
    module: nn.Module = plain_of(model)
    name = type(module).__name__
    _refuse_transforms(model, transform, name)
    require_unwrapped(module)
    _refuse_options(model, transform, name)
    _refuse_tensors(module, name)
    require_traceable(module, PARTS)


def require_for_slices(policy: Policy) -> None:
    """Raise ValueError if the policy sets a field that is not supported with torch's tensor parallelism."""
    fields = ("cpu_offload", "frozen_format", "transport")
    used = [name for name in fields if getattr(policy, name)]
    used += ["broadcast_from"] * (policy.broadcast_from is not None)
    for name in used:
        raise ValueError(f"{name} does not work beside torch's tensor parallelism yet; leave it out")


def require_unwrapped(module: nn.Module) -> None:
    """Raise RuntimeError if the class of a module cannot be sharded."""
    name = type(module).__name__
    if isinstance(module, ThunderModule):
        raise RuntimeError(
            f"{type(plain_of(module)).__name__} is already jitted, and was given to thunder.jit again; give "
            f"thunder.jit the plain module, or apply thunder_zero.zero to the jitted one"
        )
    if is_compiled(module):
        raise RuntimeError(
            f"{name} is under torch.compile, which hides forward from thunder_zero; give the module from before "
            f"torch.compile, and thunder_zero.compile(module, fuse='inductor') for inductor's kernels"
        )
    if isinstance(module, DistributedDataParallel):
        raise RuntimeError("DistributedDataParallel already reduces gradients; give the module inside it")
    if vars(module).get("use_ddp") or vars(module).get("use_fsdp"):
        raise RuntimeError(f"{name} is already sharded by thunder.distributed; build a new module for thunder_zero")
    if isinstance(module, torch.fx.GraphModule) and next(module.parameters(), None) is None:
        raise RuntimeError(
            "ZeroTransform was given a graph without parameters, as ThunderFX (thunder.dynamo) makes them, so there is "
            "nothing to shard; compile the module with thunder_zero.compile(module, ...)"
        )


def _refuse_transforms(model: ThunderModule, transform: Transform, name: str) -> None:
    transforms = compile_data(model).transforms
    others = [other for other in transforms if isinstance(other, (type(transform), DDPTransform, FSDPTransform))]
    if transform in others:
        others.remove(transform)  # once only: a list that has it twice is refused
    if others:
        raise RuntimeError(
            f"{name} is transformed by {type(others[0]).__name__} as well, in the same list of transforms; apply one "
            f"of them, once, to the plain module"
        )
    if any(isinstance(other, CUDAGraphTransform) for other in transforms):
        raise RuntimeError(
            f"{name} is transformed by CUDAGraphTransform (the plugin 'reduce-overhead') as well, which would capture "
            f"the collectives and replay them without the code that starts and ends them; leave it out"
        )


def _refuse_options(model: ThunderModule, transform: Transform, name: str) -> None:
    data = compile_data(model)
    for other in data.transforms:
        kind = type(other)
        if other is transform or isinstance(other, PrunePrologueChecks):  # there is no prologue to prune
            continue
        for hook in EARLY_HOOKS:
            if getattr(kind, hook) is not getattr(Transform, hook):
                raise RuntimeError(
                    f"{name} is transformed by {kind.__name__} as well, whose {hook} changes a module or a trace that "
                    f"Thunder's interpreter would make; leave it out, or write it as transform_trace_post_optimization,"
                    f" which gets the traces that run"
                )
    known = {*get_default_executors(), *get_always_executors(), torch_compile_ex}
    for executor in data.executors_list:
        if executor not in known and not is_empty(executor):
            raise RuntimeError(
                f"{name} was jitted with the executor {executor.name!r}, and the lines of a sharded module call "
                f"operators of torch, which it does not take; leave it out, or compile the operators with "
                f"ZeroTransform(fuse='inductor')"
            )
    options = {
        "cache": data.cache_option is not CACHE_OPTIONS.CONSTANT_VALUES,
        "sharp_edges": data.sharp_edges is not SHARP_EDGES_OPTIONS.ALLOW,
        "disable_torch_autograd": data.disable_torch_autograd_support,
        "debug_options": vars(data.debug_options) != vars(DebugOptions()),
        **dict.fromkeys(data.compile_options, True),
    }
    for option in (option for option, is_set in options.items() if is_set):
        raise RuntimeError(
            f"{name} was jitted with {option}=, an option of Thunder's interpreter, which does not run for a sharded "
            f"module; leave it out, and {INSTEAD_OF_OPTIONS.get(option, 'pass fuse= of ZeroTransform')}"
        )


def _refuse_tensors(module: nn.Module, name: str) -> None:
    if any(map(is_transformed, module.parameters())):
        raise RuntimeError(
            f"{name} is already transformed by ZeroTransform; use the model that the first transform returned, or "
            f"build a new module and a new ZeroTransform"
        )
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise RuntimeError(
                f"{path!r} of {name} is a lazy module's and has no shape yet; call the module once with a batch before "
                f"sharding"
            )


def refuse_tools(name: str) -> None:
    """Raise RuntimeError if one of torch's tools that inspect a model or its backward is active."""
    if peek_interpreter_stack() is not None:  # its tensors have no memory that programs could read
        raise RuntimeError(
            f"{name} was called inside of torch.func or vmap, which cannot look into compiled programs; give it "
            f"a whole batch, and use torch.autograd.grad or torch.autograd.functional.jacobian outside of them"
        )
    if torch.compiler.is_exporting():
        raise RuntimeError(f"torch.export cannot look into the compiled programs of {name}; {EXPORT}")
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() and torch.is_grad_enabled():
        raise RuntimeError(
            f"torch.autograd.detect_anomaly cannot read the gradients of {name}, some of which are DTensors or have no "
            f"values; use check_gradients=True, which names the parameter whose gradient is NaN, or check_nan=False"
        )
