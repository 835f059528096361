"""The arguments of ZeroTransform, ``zero`` and Zero, and their checks.

In: a policy or a stage, and keyword arguments. Out: :class:`CheckedArguments`. Arguments that are fields of Policy
change the policy. The other arguments set the ranks, the device and the initial values::

    ZeroTransform(tz.ZERO3, prefetch=2, device="cuda")   ->   policy = replace(tz.ZERO3, prefetch=2)
                                                              device = torch.device("cuda")

"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch

from thunder_zero.plan.formats import Formats
from thunder_zero.plan.from_fsdp2 import INSTEAD
from thunder_zero.plan.policy import Policy, Times
from thunder_zero.plan.precision import MixedPrecision
from thunder_zero.safetensors_files import SafetensorsWeights
from thunder_zero.sharded.initial_values import Sources

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims

Fuser = Literal["inductor"]


class Arguments(TypedDict, total=False):
    """Keyword arguments. Arguments that are not listed here are fields of :class:`~thunder_zero.Policy`."""

    process_group: dist.ProcessGroup | None  # the ranks that share the model (default: torch's default group)
    # a mesh instead of a group. A mesh of one dimension shards the model over all ranks. A mesh (replicate, shard) has
    # a replica for each rank of its first dimension (hybrid sharding). A tensor-parallel dimension may follow ``"dp"``,
    # or ``"dp_replicate"`` and ``"dp_shard"``. Torch's ``parallelize_module`` has sliced parameters along this
    # dimension
    mesh: DeviceMesh | None
    # other names for ``"dp"``, ``"dp_replicate"`` and ``"dp_shard"``, in FSDP2's form
    # (``torch.distributed.fsdp.DataParallelMeshDims``)
    dp_mesh_dims: DataParallelMeshDims | None
    # the device of the shards (default: the parameters' device). For a module on the meta device, the default is the
    # CPU, or the current device if the group carries no CPU tensors
    device: torch.device | str | None
    # a function that initialises parameters and buffers on the meta device. It is called with each submodule, as by
    # ``module.apply(init)``, after the submodule's ``reset_parameters``. At that time the submodule's own parameters
    # are full
    init: Callable[[torch.nn.Module], object] | None
    # a full state dict, such as ``torch.load(..., mmap=True)``. Its tensors become the values of parameters and
    # buffers, and are read one at a time. A path is also accepted: a safetensors file, or a folder that
    # ``save_pretrained`` wrote
    weights: Mapping[str, torch.Tensor] | str | os.PathLike[str] | None
    # True if rank 0 reports each compilation of more than a second on standard error, with input shapes and the
    # duration, and how far a load of more than five seconds has come (default: True)
    progress: bool
    # "inductor" to compile the operators between two lines of the schedule into kernels. Equal regions are compiled
    # once, and inductor keeps its kernels on disk for the next process. This needs a C++ compiler on the CPU, and
    # Triton on a GPU. By default torch runs each operator on its own
    fuse: Fuser | None
    # see ``torch.compile``. None: a size or number that changes in a later call becomes a symbol, and one program
    # serves all its values. ``torch._dynamo.mark_dynamic`` makes a size a symbol from the first call on. True: all
    # sizes are symbols where possible. False: each shape has a program
    dynamic: bool | None
    stage: int
    unit_of: Callable[[torch.nn.Module], tuple[str, ...]] | None
    ignored: tuple[str, ...]
    replicated: tuple[str, ...]
    replicate_below_bytes: int
    mixed_precision: MixedPrecision
    bucket_bytes: int | None
    prefetch: int | None
    in_flight_bytes: int | None
    times: Times | None
    gather_per_unit: bool
    reshard_after_forward: bool | None
    reshard_after_backward: bool
    keep_unsharded: tuple[str, ...]
    recompute: str
    recompute_units: tuple[str, ...]
    cpu_offload: bool
    broadcast_from: int | None
    check_gradients: bool
    materialize_grads: bool
    gather_format: Formats
    reduce_format: Formats
    frozen_format: Formats
    shares: tuple[float, ...]
    passes: tuple[Callable[[Any], Any], ...]
    transport: Callable[[Any, int], Any] | None


@dataclass(frozen=True, slots=True)
class CheckedArguments:
    """The checked arguments. ``process_group``, ``mesh`` or both are None."""

    policy: Policy
    process_group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    dp_mesh_dims: DataParallelMeshDims | None
    device: torch.device | None
    sources: Sources
    progress: bool = True
    fuse: Fuser | None = None
    dynamic: bool | None = None


def check_arguments(policy: Policy | int | None, **arguments: Unpack[Arguments]) -> CheckedArguments:
    changes: dict[str, Any] = dict(arguments)
    groups = {name: changes.pop(name, None) for name in ("process_group", "mesh", "dp_mesh_dims")}
    device = changes.pop("device", None)
    try:
        device = None if device is None else torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device is {device!r}, which torch does not know; give one such as 'cpu' or 'cuda:0'"
        ) from None
    sources = sources_of(changes.pop("init", None), changes.pop("weights", None))
    options = {name: changes.pop(name) for name in ("progress", "fuse", "dynamic") if name in changes}
    require_known(options.get("fuse"))
    return CheckedArguments(policy_of(policy, changes), **groups, device=device, sources=sources, **options)


def require_known(fuse: object) -> None:
    if fuse not in (None, "inductor"):
        raise ValueError(
            f"fuse is {fuse!r}; choose 'inductor', which compiles the operators between two lines of the schedule, or "
            f"None, by which torch computes each"
        )


def policy_of(policy: Policy | int | None, changes: Mapping[str, Any]) -> Policy:
    """Return a policy, or the policy of a stage, with some fields changed."""
    known = [field.name for field in fields(Policy)]
    for name, value in changes.items():
        if name in INSTEAD and name not in known:
            raise TypeError(f"{name} is an argument of FSDP2; here: {INSTEAD[name]}")
        if name not in known:
            hint = did_you_mean(name, known) or "thunder_zero.Policy lists its fields"
            raise TypeError(f"{name}={value!r} is not a field of Policy; {hint}")
    if policy is None:
        return Policy(**changes)
    if isinstance(policy, bool) or not isinstance(policy, Policy | int):
        raise TypeError(
            f"policy is {policy!r}; give a thunder_zero.Policy, such as thunder_zero.ZERO3, or a stage 0 to 3"
        )
    chosen = policy if isinstance(policy, Policy) else Policy(stage=policy)
    stage = changes.get("stage", chosen.stage)
    if stage != chosen.stage:
        raise ValueError(f"stage is {stage!r} and the policy's stage is {chosen.stage}; give one of the two")
    return replace(chosen, **changes)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the known names that are similar to ``name``; "" if there are none."""
    similar = get_close_matches(name.lower(), known, n=3)
    return f"did you mean {' or '.join(similar)}?" if similar else ""


def sources_of(init: object, weights: object) -> Sources:
    if init is not None and (not callable(init) or isinstance(init, torch.nn.Module)):
        raise TypeError(f"init is {init!r}; give a function of a module that writes its parameters, or None")
    if isinstance(weights, str | os.PathLike):
        weights = SafetensorsWeights(Path(weights))
    if weights is not None and not isinstance(weights, Mapping):
        raise TypeError(
            f"weights is a {type(weights).__name__}; give a mapping of names to tensors, such as a state dict from "
            f"torch.load(path, mmap=True), a folder of safetensors files, or None"
        )
    return Sources(init, weights)
