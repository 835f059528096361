"""The subject of a plan: a module with inputs and alike blocks, and the schedules of a few blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._pytree import tree_iter

from thunder_zero.capture.compilations import uncollected
from thunder_zero.comm.slices import mesh_and_slices
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.policy import STAGES, Policy, is_count
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.dry_run import ProgramSource, fake_mesh
from thunder_zero.tools.forecast.fold import Fold
from thunder_zero.tools.forecast.for_loss import for_loss
from thunder_zero.tools.forecast.recorder import Recorder
from thunder_zero.tools.from_file import module_and_inputs
from thunder_zero.tools.models import MODELS, NamedModel
from thunder_zero.tools.plan.repeat import NotPeriodic, WholeStep, whole_step
from thunder_zero.tools.plan.training_plan import MeshShape
from thunder_zero.traces.compiled import Traces

Slicing = Mapping[str, ParallelStyle] | Callable[[nn.Module, DeviceMesh], object]
TRACED = (5, 6, 8)  # numbers of blocks to try, until the blocks repeat


@dataclass(frozen=True)
class Subject:
    """A module to plan for."""

    name: str  # the name in tables and messages
    module: nn.Module  # the module. It may be on the meta device, since its values are never read.
    # args, kwargs: the arguments of forward, for one rank's share of a batch
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Tensor] | None  # a function from the outputs of forward to the loss, or None
    tokens: int  # number of tokens of one rank in a step
    alike: tuple[str, ...]  # the paths of the identical blocks of a list with the most parameters, if there are any
    batch: int  # number of rows of the inputs, or 1 if the caller cannot choose the number
    build: str  # a line of Python that makes the module, for the plan's code to paste
    tp_plan: Mapping[str, ParallelStyle] | None = None  # a named model's own plan for ``parallelize_module``

    @property
    def blocks(self) -> int:
        return len(self.alike)

    @contextmanager
    def with_blocks(self, count: int) -> Iterator[nn.Module]:
        """Temporarily remove all but ``count`` of the identical blocks from the module."""
        if count >= len(self.alike):
            yield self.module
            return
        members = self.module.get_submodule(self.alike[0].rpartition(".")[0])._modules
        original, removed = dict(members), {path.rpartition(".")[2] for path in self.alike[count:]}
        kept = {name: block for name, block in original.items() if name not in removed}
        if all(name.isdecimal() for name in original):
            kept = {str(index): block for index, block in enumerate(kept.values())}
        members.clear()
        members.update(kept)
        try:
            yield self.module
        finally:
            members.clear()
            members.update(original)


def subject_of(
    model: nn.Module | NamedModel | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    loss: Callable[[Any], Tensor] | None = None,
    length: int | None = None,
    micro_batch: int = 1,
) -> Subject:
    """Return the subject that the arguments describe.

    ``length`` and ``micro_batch`` are options of a named model, and the other arguments those of a module or a file.
    """
    name = model.name if isinstance(model, NamedModel) else model
    is_file = isinstance(model, str) and ".py:" in model
    if (is_file or isinstance(model, nn.Module)) and (length is not None or micro_batch != 1):
        option, place = "micro_batch" if length is None else "sequence_length", f" in {name}" * is_file
        raise ValueError(f"{option} belongs to models by name; change the shapes of the inputs{place}")
    if isinstance(model, nn.Module):
        subject = of_module(model, args, kwargs, loss)
    elif not isinstance(model, NamedModel | str):
        raise TypeError(f"model is of type {type(model).__name__}; give a torch.nn.Module, a name, or FILE.py:function")
    elif args or kwargs:
        raise ValueError(f"{name} comes with inputs; give inputs with a module alone")
    elif isinstance(model, str) and is_file:
        module, args, kwargs = module_and_inputs(model)
        build = f"module = ...  # yours: {model} returns it"
        subject = replace(of_module(module, args, kwargs, loss), name=model, batch=1, build=build)
    elif loss is not None:
        raise ValueError(f"{name} comes with a loss; give loss= with a model of your own")
    else:
        subject = _by_name(model, length, micro_batch)
    if not any(param.requires_grad for param in subject.module.parameters()):
        raise ValueError(f"{subject.name} has no parameter that requires a gradient; there is no training to plan")
    return subject


def _by_name(model: NamedModel | str, length: int | None, micro_batch: int) -> Subject:
    named = MODELS.get(model) if isinstance(model, str) else model
    if named is None:
        raise ValueError(f"there is no model {model!r}; choose {', '.join(MODELS)}, or give FILE.py:function")
    length = named.sequence_length if length is None else length
    for option, count, unit in (("sequence_length", length, "tokens"), ("micro_batch", micro_batch, "sequences")):
        if not is_count(count) or not count:
            raise ValueError(f"{option} is {count!r}; give a number of {unit}, at least 1")
    with torch.device("meta"):
        module = named.make(length)
        tokens = torch.empty(micro_batch, length, dtype=torch.long)
    if named is MODELS.get(named.name):
        build = f'module = tz.tools.MODELS["{named.name}"].make({length})  # untrained'
    else:
        build = f"module = ...  # yours: {named.name}, of {length} tokens"
    subject = of_module(module, (tokens,), loss=named.loss)
    return replace(subject, name=named.name, build=build, tp_plan=named.tp_plan)


def of_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    loss: Callable[[Any], Tensor] | None = None,
) -> Subject:
    # tokens are the elements of the first integer tensor of two dimensions, or else the rows of the first tensor
    tensors = [leaf for leaf in tree_iter((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    integers = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.ndim == 2]
    tokens = integers[0].numel() if integers else prod(tensors[0].shape[:-1]) if tensors else 1
    name = type(module).__name__
    batch = len(tensors[0]) if tensors and tensors[0].ndim > 1 else 1
    build = f"module = ...  # yours: the {name} that was planned"
    return Subject(name, module, args, kwargs, loss, tokens, alike_blocks(module), batch, build)


def alike_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the successive identical blocks (equal except for values) with the most parameters."""
    best, best_count = tuple[str, ...](), 0
    for path, parent in module.named_modules():
        if not isinstance(parent, nn.ModuleList | nn.Sequential):
            continue
        for _, run in groupby(parent.named_children(), key=lambda child: _structure(child[1])):
            members = list(run)
            count = sum(param.numel() for _, child in members for param in child.parameters())
            if len(members) > 1 and count > best_count:
                best, best_count = tuple(f"{path}.{name}".lstrip(".") for name, _ in members), count
    return best


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for modules that differ only in values."""
    tensors: Sequence[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
    # such as the kind of attention of a layer, but no counts, such as the layer's number
    words = tuple(
        (name, value if isinstance(value, bool | str | float) else type(value))
        for child in module.modules()
        for name, value in sorted(vars(child).items())
        if not name.startswith("_")
    )
    return type(module), repr(module), shapes, words


@dataclass(frozen=True)
class SubjectPrograms:
    """The schedules of a subject."""

    subject: Subject  # the module to plan for
    asked: Policy  # a policy with the user's precision and formats
    shards: int  # number of ranks of a replica in schedules. They do not depend on this number.
    device: Device  # the device of the estimates, with the memory of a rank
    tell: Callable[..., None]  # a function that shows the current work, and counts rows that have ``ended``
    slices: int = 1  # number of tensor-parallel ranks
    how: Slicing = field(default_factory=dict)  # the tensor-parallel plan
    captured: dict[int, ProgramSource] = field(default_factory=dict)  # captured modules, keyed by number of blocks
    # traces without lines, keyed by policy, presence of replicas, and number of blocks
    scheduled: dict[tuple[Policy, bool, int], Traces] = field(default_factory=dict)
    # a mapping from policies to the number of blocks to trace until their work repeats
    enough: dict[Policy, int] = field(default_factory=dict)

    @cached_property
    def block_bytes(self) -> int:
        """The bytes of the largest block. This number does not depend on the policy."""
        policy = Policy(mixed_precision=self.asked.mixed_precision)
        with self._part() as (_, slices, partial):
            return make_plan(self.subject.module, policy, self._small_mesh(), slices, partial).largest_block_bytes

    def _small_mesh(self, replicas: int = 1) -> Mesh:
        return MeshShape(replicas, self.shards, self.slices).at_rank_0()

    @contextmanager
    def _part(self) -> Iterator[tuple[nn.Module, Mapping[str, int], frozenset[str]]]:
        """Yield a tensor-parallel rank's part, the sliced dimensions, and the parameters with partial gradients."""
        if self.slices == 1:
            yield self.subject.module, {}, frozenset()
            return
        self.tell(f"slices {self.subject.name} for {self.slices} ranks")
        with fake_mesh((1, self.slices)) as mesh:
            part = sliced_copy(self.subject.module, mesh["tp"], self.how)
            _, slices, partial = mesh_and_slices(part, mesh)
            yield part, slices, partial

    def policy(self, stage: int, recompute: str) -> Policy:
        """Return a policy that leads to equal schedules on all meshes: a bucket holds a block.

        One block is prefetched, and one reduction is in flight while backward computes the next block.
        """
        asked = self.asked if stage else Policy(mixed_precision=self.asked.mixed_precision)
        asked = replace(asked, frozen_format=None) if stage == 1 else asked
        policy = replace(asked, stage=stage, recompute=recompute)
        return replace(policy, bucket_bytes=self.block_bytes, prefetch=1, in_flight_bytes=2 * self.block_bytes)

    def evaluate(self, policy: Policy, mesh: MeshShape) -> tuple[WholeStep, int]:
        """Return the step of the whole model, and the number of traced blocks, which grows until they repeat."""
        alike = self.subject.alike
        for count in [count for count in (*TRACED, len(alike)) if count >= self.enough.get(policy, 0)]:
            traced = alike[:count]
            traces = self._schedule(policy, mesh, len(traced))
            self.tell(f"forecasts the memory of {STAGES[policy.stage].name} on {mesh}, recompute={policy.recompute!r}")
            with uncollected():
                fold = Fold(Recorder(traces, "nccl", self.subject.loss, FusedAdamW), traces.timeline).run()
            try:
                step = whole_step(fold, self.device, traced, len(alike) - len(traced))
            except NotPeriodic:
                continue
            self.enough[policy] = count
            return step, len(traced)
        raise AssertionError("a model that is traced whole repeats nothing")

    def returns_loss(self) -> bool:
        traces = next(iter(self.scheduled.values()))
        flat = traces.forward.bound_symbols[-1].args[0]["flat_output"]
        return len(flat) == 1 and tuple(flat[0].shape) == ()

    def _schedule(self, policy: Policy, mesh: MeshShape, traced: int) -> Traces:
        """Return the traces for a mesh, without their lines. All meshes with (or without) replicas share a schedule."""
        key = policy, mesh.replicas > 1, traced
        if key not in self.scheduled:
            with self.subject.with_blocks(traced), uncollected():
                captured, loss = self._capture(traced), self.subject.loss
                self.tell(f"schedules {STAGES[policy.stage].name}, recompute={policy.recompute!r}")
                traces = captured.schedule(policy, self._small_mesh(min(mesh.replicas, 2)))
                self.scheduled[key] = for_loss(traces, loss) if loss else traces
        traces = self.scheduled[key]
        return replace(traces, timeline=replace(traces.timeline, plan=replace(traces.plan, mesh=mesh.at_rank_0())))

    def _capture(self, traced: int) -> ProgramSource:
        """Return the module with ``traced`` blocks, captured once for all policies and meshes."""
        if traced not in self.captured:
            self.tell(f"captures {self.subject.name} with {traced} of {self.subject.blocks} blocks")
            policy, mesh, inputs = self.policy(3, "none"), self._small_mesh(), (self.subject.args, self.subject.kwargs)
            with self._part() as (part, slices, partial):
                self.captured[traced] = ProgramSource(
                    part, *inputs, policy, mesh, device=self.device, slices=slices, partial=partial
                )
        return self.captured[traced]


RATES: dict[str, Any] = dict.fromkeys(("lr", "beta1", "beta2", "weight_decay", "eps"), 0.0)


class FusedAdamW(torch.optim.AdamW):
    """``AdamW(fused=True)``, which torch refuses for meta tensors: its state and its kernel, without temporaries."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        for param in [param for param in params if param not in self.state]:
            state = self.state[param] = {name: torch.empty_like(param) for name in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.empty((), device=param.device)
        keys = ("exp_avg", "exp_avg_sq", "step")
        means, squares, steps = ([self.state[param][key] for param in params] for key in keys)
        grads = [param.grad for param in params]
        torch.ops.aten._fused_adamw_(params, grads, means, squares, [], steps, **RATES, amsgrad=False, maximize=False)


def sliced_copy(module: nn.Module, mesh: DeviceMesh, slicing: Slicing) -> nn.Module:
    """Return a copy of the module on the meta device, sliced over a one-dimensional mesh."""
    memo: dict[int, Any] = {}  # tensors without values, which the copy has
    for tensor in chain(module.parameters(), module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_param, trained = isinstance(tensor, nn.Parameter), tensor.requires_grad
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=trained) if is_param else empty
    copy = deepcopy(module, memo)
    if callable(slicing):
        slicing(copy, mesh)
    else:
        parallelize_module(copy, mesh, dict(slicing))
    return copy
