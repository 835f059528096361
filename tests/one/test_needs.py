"""Each workaround in ``thunder_zero/compat`` is still needed: without it, the behaviour that it mends is wrong.

A row fails if the need is gone in a version that it is known for; rows for other versions are skipped.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from inspect import signature
from io import StringIO
from itertools import count
from pathlib import Path
from runpy import run_path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dispatch import found_inf_reduce_handler
from torch.distributed.tensor._random import is_rng_supported_mesh
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from tests.harness.errors import error_of
from tests.harness.one_rank import group_of_one
from tests.harness.ranks import everyone
from tests.harness.tiers import slow
from thunder_zero.compat import casts, imports
from thunder_zero.compat import thunder as room
from thunder_zero.compat.thunder import shortcuts, trace_repairs
from thunder_zero.compat.thunder.fusion_repair import repair_fusion
from thunder_zero.compat.thunder.patches import replaced
from thunder_zero.compat.torch.optimizers import UNSCALE

import thunder
import thunder.torch as ltorch
from thunder.core import devices, dtypes, interpreter, prims
from thunder.core.proxies import TensorProxy
from thunder.core.rematerialization import find_cut
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import Transform
from thunder.executors.torch_compile import torch_compile_ex
from thunder.extend import OperatorExecutor
from thunder.recipes.base import BaseRecipe

THREADS = Path("/proc/self/task")
X = torch.arange(12.0).view(3, 4).cos()
ONES = torch.ones(1, 1)


# Thunder's interpreter


class Lists(nn.Module):
    """A module whose output depends on the order of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.tensor([float(part)])) for part in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for _, part in self.named_parameters():
            x = x * 2 + part
        return x


class Counts(nn.Module):
    """A module that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * 2


class Reads(nn.Module):
    """A module that reads an attribute, which is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.factor is None else x * self.factor


@dataclass
class Pair:
    """A dataclass of tensors, as an argument of forward."""

    first: Tensor
    second: Tensor


def count_frames(module: nn.Module) -> int:
    """Return how many frames Thunder interprets to trace a module."""
    with mock.patch.object(interpreter, "_run_frame", wraps=interpreter._run_frame) as run:
        thunder.jit(module)(X)
    return run.call_count


def builtins_are_interpreted() -> bool:
    alone = count_frames(nn.Linear(4, 4))
    with replaced(shortcuts.PATCHES):
        return alone > 2 * count_frames(nn.Linear(4, 4))


def hooks_take_longer() -> bool:
    hooked, subclassed = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_forward_pre_hook(lambda module, args: casts._cast(args, torch.float32, module))
    hooked[0].register_forward_hook(lambda module, args, output: casts._cast(output, torch.float32, module))
    subclassed[0].__class__ = casts._subclass("0", nn.Linear, torch.float32, torch.float32)
    with replaced(shortcuts.PATCHES):
        return 2 * count_frames(hooked) > 3 * count_frames(subclassed)


def lookasides_are_one_table() -> bool:
    return not [name for name in signature(thunder.jit).parameters if "lookaside" in name]


def no_hook_comes_before_the_trace() -> bool:
    hooks = [name for name in vars(Transform) if name.startswith("transform_trace")]
    return hooks == ["transform_traces_pre_prologue", "transform_trace_post_optimization"]


def a_dataclass_cannot_be_cast() -> bool:
    cast = thunder.jit(lambda pair: casts._cast(pair, torch.bfloat16, "").first)
    return error_of(lambda: cast(Pair(X, X))) != "nothing"


def names_come_in_another_order() -> bool:
    return not torch.equal(thunder.jit(Lists())(X), Lists()(X))


def an_attribute_stays_as_it_was() -> bool:
    model: Any = thunder.jit(Counts())
    model(X)
    return model.count == 0


def a_reentrant_checkpoint_raises_a_string() -> bool:
    call = thunder.jit(lambda x: checkpoint(torch.sin, x, use_reentrant=True))
    return "exceptions must derive from BaseException" in error_of(lambda: call(X))


def a_number_decides() -> bool:
    call = thunder.jit(lambda x: x * (2 if x.sum().item() > 0 else 3))
    return not torch.equal(call(ONES), 2 * ONES)


def a_random_number_is_kept() -> bool:
    call = thunder.jit(lambda x: x * random.random())
    return torch.equal(call(ONES), call(ONES))


def what_comes_from_c_is_kept() -> bool:
    numbers = count(1)
    call = thunder.jit(lambda x: x * next(numbers))
    return torch.equal(call(ONES), call(ONES))


def an_attribute_is_read_once() -> bool:
    module = Reads()
    model = thunder.jit(module)
    before = model(ONES)
    module.factor = 2 * ONES
    return torch.equal(model(ONES), before)


def an_argument_is_ignored() -> bool:
    call = thunder.jit(lambda x, mask: x if mask is None else x * mask)
    before = call(ONES, None)
    return torch.equal(call(ONES, 2 * ONES), before)


def autocast_is_kept() -> bool:
    model = thunder.jit(nn.Linear(1, 1))
    with torch.autocast("cpu", torch.bfloat16):
        model(ONES)
    return bool(model(ONES).dtype is torch.bfloat16)


def smoothing_counts_ignored_targets() -> bool:
    target = torch.tensor([1, -100])
    call = thunder.jit(lambda x: cross_entropy(x, target, label_smoothing=0.1))
    return not torch.allclose(call(X[:2]), cross_entropy(X[:2], target, label_smoothing=0.1))


# Gradients

Function = Callable[[Tensor], Tensor]


def gradient_of(function: Function) -> Tensor | None:
    x = X.clone().requires_grad_()
    y = function(x)
    if y.requires_grad:
        (y * torch.ones_like(y).cumsum(-1)).sum().backward()
    return x.grad


def is_wrong(written: Function, meant: Function | None = None) -> bool:
    """Return whether Thunder's gradient of ``written`` differs from eager's of ``meant``, by default ``written``."""
    actual, expected = gradient_of(thunder.jit(written)), gradient_of(meant or written)
    return actual is None or expected is None or not torch.allclose(actual, expected)


def divided(x: Tensor) -> Tensor:
    h = x * 2
    h /= h.sum(-1, keepdim=True)
    return h


def written_values_are_saved() -> bool:
    return is_wrong(divided, lambda x: (x * 2) / (x * 2).sum(-1, keepdim=True))


def written_views_lose_gradients() -> bool:
    def doubled(x: Tensor) -> Tensor:
        h = x * 2
        h[:, :2].mul_(2)
        return h

    return is_wrong(doubled)


def lists_lose_gradients() -> bool:
    return is_wrong(lambda x: torch.hstack([x, x]))


def complex_factors_lack_a_conjugate() -> bool:
    return is_wrong(lambda x: torch.view_as_real(x * torch.polar(torch.ones(4), torch.ones(4)))[..., 1])


def draws_again(function: Function) -> bool:
    """Return whether backward draws another mask than forward."""
    x = torch.ones(64, requires_grad=True)
    y = thunder.jit(function)(x)
    (mask,) = torch.autograd.grad(y.sum(), x)
    return not torch.equal(y == 0, mask == 0)


def a_checkpoint_draws_again() -> bool:
    return draws_again(lambda x: checkpoint(lambda x: F.dropout(x) * x, x, use_reentrant=False))


def a_dropout_draws_again() -> bool:
    return draws_again(lambda x: torch.dropout(x, 0.5, True))


# Operators


def lines_of_backward(function: Callable[..., Tensor], *inputs: Tensor) -> list[str]:
    """Return the names of the operations of a compiled backward."""
    compiled = thunder.jit(function)
    compiled(*(tensor.clone().requires_grad_() for tensor in inputs))
    lines = thunder.last_backward_traces(compiled)[-1].bound_symbols
    return [line.sym.name for line in lines if isinstance(line.output, TensorProxy) and "unpack" not in line.sym.name]


def activations_are_decomposed() -> bool:
    functions: tuple[Function, ...] = (F.gelu, F.silu, lambda x: F.softmax(x, -1), lambda x: F.layer_norm(x, (4,)))
    return all(len(lines_of_backward(function, X)) > 3 for function in functions)


def attention_is_decomposed() -> bool:
    return "matmul" in lines_of_backward(lambda x: F.scaled_dot_product_attention(x, x, x), X.view(1, 1, 3, 4))


def convolutions_are_padded() -> bool:
    return lines_of_backward(F.conv1d, X.view(1, 3, 4), torch.ones(3, 3, 2)).count("convolution") == 2


def executors_are_asked_for_parts() -> bool:
    executor = OperatorExecutor("asked")
    with mock.patch.object(executor, "can_fuse", return_value=False) as can_fuse:
        thunder.jit(F.gelu, executors=[executor])(X.clone().requires_grad_())
    return bool(can_fuse.called)


def the_default_recipe_lists_none() -> bool:
    with redirect_stdout(StringIO()):  # Thunder prints how to install nvFuser
        return None in BaseRecipe().setup_executors()


# Traces


def aliases_are_unsorted() -> bool:
    def writes(x: Tensor) -> Tensor:
        h = x * 2
        views = [h[row] for row in range(3)] + [h[:, column] for column in range(4)]
        h.mul_(2)
        return torch.stack([view.sum() for view in views])

    compiled = thunder.jit(writes)
    compiled(X)
    trace = next(trace for trace in thunder.last_traces(compiled) if "update_aliases" in str(trace))
    pairs = zip(trace.bound_symbols, trace_repairs.sort_aliases(trace).bound_symbols, strict=True)
    return any(str(line) != str(in_order) for line, in_order in pairs)


def a_cut_counts_no_elements() -> bool:
    """A large sum can be recomputed from three small tensors, but Thunder saves the sum."""
    trace = TraceCtx()
    with tracectx(trace):
        shapes = (64, 1), (1, 64), (64, 1)
        small = [TensorProxy(shape=shape, device=devices.cpu, dtype=dtypes.float32) for shape in shapes]
        large = ltorch.add(ltorch.add(small[0], small[1]), small[2])
        result = ltorch.sin(large)
    *adds, sin = trace.bound_symbols
    fusion = Symbol("fusion", lambda *args: None, is_fusion=True)
    forward = fusion.bind(*small, output=(large,), subsymbols=tuple(adds))
    backward = fusion.bind(large, output=(result,), subsymbols=(sin,))
    return find_cut((), forward, backward) == (large.name,)


class Scales(nn.Module):
    """A module whose backward needs a value that can be recomputed from a parameter and another value that it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4))
        self.last = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.exp(x @ self.first * self.scale).sin() @ self.last) @ self.last


def a_fuser_reads_what_forward_gathered() -> bool:
    policy = tz.Policy(stage=3, recompute="none", reshard_after_forward=True)
    with mock.patch.object(room, "repair_fusion", wraps=repair_fusion) as repair:
        tz.trace(Scales(), X, policy=policy, world_size=2, executors=[torch_compile_ex], frontend="thunder")
        (trace,) = (call.args[0] for call in repair.call_args_list)
    return repair_fusion(trace) is not trace


# Parts

Named = namedtuple("Named", "first second")


class Around(nn.Module):
    """A module that calls its part by a given function."""

    def __init__(self, part: nn.Module, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.part, self.call = part, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.part, x)


def fails(make: Callable[[], nn.Module], call: Callable[[Any, Tensor], Any] = lambda part, x: part(x)) -> bool:
    return error_of(lambda: thunder.jit(Around(make(), call))(X).sum().backward()) != "nothing"


def backward_hooks_are_not_called() -> bool:
    called: list[nn.Module] = []
    layer = nn.Linear(4, 4)
    layer.register_full_backward_hook(lambda module, given, of_output: called.append(module))
    thunder.jit(nn.Sequential(layer))(X).sum().backward()
    return not called


def a_norm_of_instances_has_no_statistics() -> bool:
    norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    thunder.jit(Around(norm, lambda part, x: part(x[None])))(X)
    return not norm.running_mean.any()


def linear(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: wrap(nn.Linear(4, 4))


PARTS: dict[str, Callable[[], bool]] = {
    "backward hooks": backward_hooks_are_not_called,
    "a named tuple": lambda: fails(linear(nn.Sequential), lambda part, x: Named(part(x), x)),
    "statistics of an instance norm": a_norm_of_instances_has_no_statistics,
}


def a_composable_checkpoint_is_not_captured() -> bool:
    return fails(linear(composable_checkpoint))  # a ScriptModule may end the process


# Torch


def thunder_cannot_be_imported() -> bool:
    command = [sys.executable, "-W", "ignore", "-c", "import thunder"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode != 0


def dynamo_gives_up_in_silence() -> bool:
    backend = mock.Mock(side_effect=lambda graph, inputs: graph.forward)
    doubled = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in (2, 3):
            doubled(torch.ones(length))
    return backend.call_count == 1


def gloo_has_threads_after_its_group() -> bool:
    if not THREADS.exists():
        pytest.skip("reads the names of threads from Linux")
    with group_of_one("cpu"):
        group = everyone()
        dist.all_reduce(torch.ones(1), group=group)
    return any("gloo" in (thread / "comm").read_text() for thread in THREADS.iterdir())


def gloo_takes_a_core_when_woken() -> bool:
    if not THREADS.exists():
        pytest.skip("reads the scheduling of threads from Linux")
    before = set(THREADS.iterdir())
    with group_of_one("cpu"):
        started = set(THREADS.iterdir()) - before
        return bool(started) and all(os.sched_getscheduler(int(thread.name)) == os.SCHED_OTHER for thread in started)


def a_failed_launch_stays_queued() -> bool:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(KeyError), dist.distributed_c10d._coalescing_manager(everyone(), async_ops=True):
            raise KeyError
        return everyone() in dist.distributed_c10d._world.pg_coalesce_state
    finally:
        dist.distributed_c10d._world.pg_coalesce_state.clear()
        dist.destroy_process_group()


def nobody_is_told_of_failed_steps() -> bool:
    called: list[object] = []
    optimizer = torch.optim.SparseAdam([nn.Parameter(torch.ones(1))])  # refuses dense gradients
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    registers = [name for name in dir(torch.optim.Optimizer) if re.match(r"register_step_.*hook$", name)]
    for name in registers:
        getattr(optimizer, name)(lambda *args: called.append(args))
    with pytest.raises(RuntimeError, match="dense"):
        optimizer.step()
    return len(called) == 1 < len(registers)  # only the hook before the step


def every_step_calls_the_hooks_of_all_optimizers() -> bool:
    called: list[object] = []
    hook = register_optimizer_step_pre_hook(lambda *args: called.append(args))
    try:
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    finally:
        hook.remove()
    return bool(called)


def only_the_first_gradients_placements_count() -> bool:
    """With a replicated gradient first, torch's handler gathers no other gradient."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        grads = [DTensor.from_local(torch.ones(2), mesh, [placement]) for placement in (Replicate(), Shard(0))]
        with mock.patch.object(DTensor, "full_tensor", autospec=True, side_effect=DTensor.full_tensor) as full_tensor:
            found_inf_reduce_handler(UNSCALE, (grads, torch.zeros(()), torch.ones(())), {})
        return [call.args[0].placements for call in full_tensor.call_args_list] == [(Replicate(),)]
    finally:
        dist.destroy_process_group()


def nobody_says_that_fully_shard_was_applied() -> bool:
    names = (name for home in (torch.distributed, torch.distributed.fsdp) for name in dir(home))
    return not [name for name in names if "registry" in name.lower() and not name.startswith("_")]


def no_public_name_gives_the_joint_graph() -> bool:
    homes = (torch.compiler, torch.export, torch.fx, torch.func)
    return not [name for home in homes for name in dir(home) if "joint" in name.lower() and not name.startswith("_")]


def no_public_name_compiles_a_graph_without_autograd() -> bool:
    return not [name for name in dir(torch.compiler) if "inductor" in name.lower() or "standalone" in name.lower()]


def torch_has_no_public_names() -> bool:
    homes = (torch.autograd, torch.autograd.graph, torch.func, torch)
    words = ("foreach", "callback", "graph_task", "execute", "interpreter", "conv_backend")
    names = (name for home in homes for name in dir(home) if not name.startswith("_"))
    return not [name for name in names if any(word in name.lower() for word in words)]


def no_public_name_gives_a_jitted_module() -> bool:
    module = nn.Linear(1, 1)
    model = thunder.jit(module)
    return not any(getattr(model, name) is module for name in dir(type(model)) if not name.startswith("_"))


# The table


@dataclass(frozen=True)
class Need:
    """A reason for a workaround.

    Attributes:
        workaround: its name in ``docs/listing.py``: a file in ``thunder_zero/compat``, or a section of it.
        is_there: returns whether the behaviour without the workaround is still wrong.
        package: the package whose behaviour it is.
        what: tells apart several needs of one workaround.
    """

    workaround: str
    is_there: Callable[[], bool]
    package: str = "lightning-thunder"
    what: str = ""

    def __str__(self) -> str:
        return f"{self.workaround} {self.what}".strip()


TORCH = "torch"


def transformers_has_no_public_name_that_applies_a_plan() -> bool:
    return "apply_tensor_parallelism" not in dir(pytest.importorskip("transformers"))


def torch_draws_for_no_slice_on_a_cpu() -> bool:
    with group_of_one("cpu"):
        return not is_rng_supported_mesh(init_device_mesh("cpu", (1,)))


def attempts_of_torchrun_have_one_store() -> bool:
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "run", 1, 1, is_host=True))
    first, second = (handler.next_rendezvous().bootstrap_store_info.master_port for _ in range(2))
    handler.shutdown()
    return first == second


def accelerate_hides_its_models() -> bool:
    return "models" not in dir(pytest.importorskip("accelerate").Accelerator)


def lengths_of_packed_sequences_end_graphs() -> bool:
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([2, 3]), enforce_sorted=False)
    with pytest.raises(RuntimeError), torch._dynamo.config.patch(allow_rnn=True):
        torch.compile(nn.GRU(4, 4), backend="eager", fullgraph=True)(packed)
    return True


AOT = ("export", "joint", "nodes", "objects", "rewrites", "runtime")
NEEDS = (
    Need("thunder/trace_repairs.py: sort_aliases", aliases_are_unsorted),
    Need("thunder/trace_repairs.py: broadcast_scalars", lambda: is_wrong(lambda x: x / x.square().sum())),
    Need("jitted.py", no_public_name_gives_a_jitted_module),
    Need("lines.py", lambda: "call_ctx" not in signature(Symbol.bind).parameters),
    Need("casts.py", hooks_take_longer),
    Need("never_fuses.py", executors_are_asked_for_parts),
    Need("uncapturable.py", a_composable_checkpoint_is_not_captured),
    Need("thunder/patches.py", lookasides_are_one_table),
    Need("thunder/tracing.py", no_hook_comes_before_the_trace),
    Need("thunder/opaque_calls.py", what_comes_from_c_is_kept, what="an item"),
    Need("thunder/repairs.py: fields_as_constants", a_dataclass_cannot_be_cast),
    Need("accelerate.py", accelerate_hides_its_models, TORCH),
    Need("packed_sequences.py", lengths_of_packed_sequences_end_graphs, TORCH),
    Need("dynamo.py", dynamo_gives_up_in_silence, TORCH),
    Need("private.py", no_public_name_gives_the_joint_graph, TORCH),
    *(Need(f"aot/{name}.py", no_public_name_gives_the_joint_graph, TORCH) for name in AOT),
    Need("torch/groups.py: restarts_on_one_store", attempts_of_torchrun_have_one_store, TORCH),
    Need("torch/groups.py: at_exit", gloo_has_threads_after_its_group, TORCH),
    Need("torch/groups.py: wait_for_a_core", gloo_takes_a_core_when_woken, TORCH),
    Need("thunder/trace_repairs.py: fused_only", a_cut_counts_no_elements),
    Need("imports.py", thunder_cannot_be_imported, TORCH),
    Need("plans_of_transformers.py", transformers_has_no_public_name_that_applies_a_plan, TORCH),
    Need("slice_generators.py", torch_draws_for_no_slice_on_a_cpu, TORCH),
    Need("inductor.py", no_public_name_compiles_a_graph_without_autograd, TORCH),
    Need("torch/optimizers.py: on_failed_steps", nobody_is_told_of_failed_steps, TORCH),
    Need("torch/fully_shard.py", nobody_says_that_fully_shard_was_applied, TORCH),
    Need("torch/optimizers.py: share_found_inf", only_the_first_gradients_placements_count, TORCH),
    Need("thunder/repairs.py: members", names_come_in_another_order),
    Need("thunder/unknown_numbers.py", a_number_decides),
    Need("thunder/opaque_calls.py", a_random_number_is_kept, what="a draw"),
    Need("thunder/reads.py", an_attribute_is_read_once),
    Need("thunder/repairs.py: forget_autocast", autocast_is_kept),
    Need("thunder/guards.py", an_argument_is_ignored),
    Need("thunder/repairs.py: smoothed_loss", smoothing_counts_ignored_targets),
    Need("thunder/operators/activations.py", activations_are_decomposed),
    Need("thunder/operators/attention.py", attention_is_decomposed),
    Need("thunder/operators/choose.py", the_default_recipe_lists_none),
    Need("thunder/operators/convolution.py", convolutions_are_padded),
    Need("torch/groups.py: one_launch", a_failed_launch_stays_queued, TORCH),
    Need("thunder/trace_repairs.py: draw_once", a_checkpoint_draws_again, what="a checkpoint"),
    Need("thunder/refused_calls.py", an_attribute_stays_as_it_was, what="an attribute"),
    Need("thunder/refused_calls.py", a_reentrant_checkpoint_raises_a_string, what="a checkpoint"),
    Need("thunder/fusion_repair.py", a_fuser_reads_what_forward_gathered),
    Need("thunder/shortcuts.py", builtins_are_interpreted),
    Need("thunders_work.py", lambda: not any("flop" in name.lower() for name in dir(prims.linear))),
    Need("torch/autograd.py", torch_has_no_public_names, TORCH),
    Need("torch/tensors.py", torch_has_no_public_names, TORCH),
    Need("torch/optimizers.py: step_alone", every_step_calls_the_hooks_of_all_optimizers, TORCH),
    Need("thunder/untraceable.py", PARTS["backward hooks"], what="backward hooks"),
    Need("thunder/wrong_gradients.py", written_values_are_saved, what="a value"),
)
MORE = (
    Need(
        "thunder/trace_repairs.py: draw_once",
        lambda: draws_again(lambda x: torch.dropout(x, 0.5, True)),
        what="registered",
    ),
    *(Need("thunder/untraceable.py", PARTS[what], what=what) for what in list(PARTS)[1:]),
    Need("thunder/wrong_gradients.py", written_views_lose_gradients, what="a view"),
    Need("thunder/wrong_gradients.py", lists_lose_gradients, what="a list"),
    Need("thunder/wrong_gradients.py", complex_factors_lack_a_conjugate, what="complex numbers"),
)


@pytest.mark.parametrize("need", [*NEEDS, *slow(*MORE)], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_each_workaround_is_still_needed(need: Need) -> None:
    if not imports.known(need.package):
        pytest.skip(f"the need for compat/{need} is known for {need.package} {imports.KNOWN[need.package]} only")
    assert need.is_there(), f"the need for compat/{need} is gone: delete it"


def test_every_workaround_has_a_row() -> None:
    listing = run_path(str(Path(__file__).parents[2] / "docs/listing.py"))
    assert set(listing["needs_by_name"]()) == {need.workaround for need in NEEDS}
