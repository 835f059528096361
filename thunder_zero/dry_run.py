"""``trace``: the traces of any rank of any world, in one process, without a process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from thunder_zero.compiled import Traces
from thunder_zero.plan import Plan, make_plan
from thunder_zero.policy import ZERO3, Policy
from thunder_zero.runtime.placeholders import placeholder, set_tensor, traced
from thunder_zero.trace.casts import cast_inputs, casting_borders
from thunder_zero.trace.symbols import DryRuntime
from thunder_zero.transform import ZeroTransform

import thunder
from thunder import compile_data, compile_stats
from thunder.core import langctxs
from thunder.core.module import ThunderModule
from thunder.extend import Executor, TemporaryExecutor

CPU = torch.device("cpu")


class _DryRun(ZeroTransform):
    """Plans for a rank of a world that does not exist, and does not change the module."""

    def __init__(self, policy: Policy | int, synced: bool, *world: int) -> None:
        super().__init__(policy)
        self._world = world
        self._synced = synced

    def transform_module(self, model: ThunderModule) -> None:
        self.plan = make_plan(model._model, self.policy, *self._world)
        self.install(model, self.plan, DryRuntime(self._synced))


def trace(
    module: nn.Module,
    *args: Any,
    policy: Policy | int = ZERO3,
    world_size: int = 8,
    rank: int = 0,
    replicas: int = 1,
    synced: bool = True,
    executors: Sequence[Executor] | None = None,
    **kwargs: Any,
) -> Traces:
    """The traces that one rank of ``world_size`` would run for these arguments.

    Needs no process group, no other process and no GPU, allocates no parameters, and does not change
    ``torch.distributed`` or the module.

    Args:
        module: a plain module. If it is on the meta device, the traces are those of a run on the CPU, and only shapes
            and dtypes of tensors among the arguments count. Traces for CUDA need a module on a CUDA device: which
            kernels attention and a fuser take there is asked of the device.
        args, kwargs: the arguments of its forward.
        policy: how to shard: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        world_size: number of ranks that share one copy of the model.
        rank: the rank to trace.
        replicas: copies of the sharded model, each with ``world_size`` ranks (hybrid sharding).
        synced: True: the program outside ``no_sync``; False: the program inside, which defers gradients.
        executors: those of ``thunder.jit``, such as ``[torch_compile_ex]`` (default: Thunder's).

    Returns:
        The forward and backward traces, their timeline and the plan.

    Raises:
        TypeError: not a plain module; not a policy; a field of the policy among the arguments of forward, which does
            not take it.
        ValueError: the stage, ``world_size``, ``rank`` or ``replicas`` is out of range; the module has no parameters.
    """
    if not isinstance(module, nn.Module) or isinstance(module, ThunderModule):
        raise TypeError(
            f"trace takes a plain torch module, got {type(module).__name__}; pass the module before thunder.jit"
        )
    _refuse_policy_fields(module, kwargs)
    transform = _DryRun(policy, synced, world_size, rank, replicas)
    jitted = thunder.jit(module, transforms=[transform], executors=executors)
    args, kwargs = tree_map_only(Tensor, _without_memory, (args, kwargs))
    with _as_computed(module, transform.plan):
        args, kwargs = cast_inputs(type(module).__name__, args, kwargs, transform.plan.policy.mixed_precision)
        with traced():
            return transform.compiled.traces(_compile(jitted, args, kwargs))


def _refuse_policy_fields(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse a field of Policy that forward does not take: Thunder's error would not say where it belongs."""
    parameters = signature(module.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in [field.name for field in fields(Policy) if field.name in kwargs and field.name not in parameters]:
        change = f"{name}={kwargs[name]!r}"
        policy = repr(kwargs[name]) if name == "stage" else f"dataclasses.replace(thunder_zero.ZERO3, {change})"
        raise TypeError(
            f"{type(module).__name__}.forward does not take {change}, which is a field of Policy; pass policy={policy}"
        )


@contextmanager
def _as_computed(module: nn.Module, plan: Plan) -> Iterator[None]:
    """Inside the block, the module has parameters in the dtypes of compute, and casts its inputs and outputs. What is
    on the meta device stands on the CPU instead, without memory, so that the trace is that of a run."""
    originals: list[tuple[str, nn.Parameter | Tensor]] = list(module.named_parameters(remove_duplicate=False))
    originals += module.named_buffers(remove_duplicate=False)
    made: dict[int, Tensor] = {}  # by original: a tied parameter stays one
    with casting_borders(module, plan.policy.mixed_precision):
        for name, original in originals:
            if id(original) not in made:
                made[id(original)] = _computed(name, original, plan)
            set_tensor(module, name, made[id(original)])
        try:
            yield
        finally:
            for name, original in originals:
                set_tensor(module, name, original)


def _computed(name: str, original: nn.Parameter | Tensor, plan: Plan) -> Tensor:
    """A tensor of the module as compute sees it: itself, if it needs no cast and is on a real device."""
    param = plan.by_name.get(name)
    dtype = original.dtype if param is None else param.compute_dtype
    if dtype is original.dtype and not original.is_meta:
        return original
    device = CPU if original.is_meta else original.device
    if isinstance(original, nn.Parameter):
        return placeholder(name, original, dtype, device)
    return _without_memory(original)


def _without_memory(tensor: Tensor) -> Tensor:
    """A tensor on the CPU that looks like one on the meta device, with the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if tensor.is_meta else tensor


def _compile(jitted: ThunderModule, args: Any, kwargs: Any) -> Any:
    """Thunder's cache entry for these arguments: a call without its run."""
    data, stats = compile_data(jitted), compile_stats(jitted)
    (ad_hoc,) = (executor for executor in data.executors_list if isinstance(executor, TemporaryExecutor))

    @langctxs.langctx(data.langctx)
    @thunder._with_cache_info_ctx
    def compile_entry() -> Any:
        info = thunder._get_cache_info()
        data.populate_cache_info(info, *args, **kwargs)
        info["alias_tensor_indices"] = ""  # arguments without memory may share addresses, but are no aliases
        traces = data.acquire_initial_trace(data.fn, args, kwargs, data, stats, ad_hoc)
        return data.apply_transforms_and_build_cache_entry(data, stats, info, *traces)

    return compile_entry()
