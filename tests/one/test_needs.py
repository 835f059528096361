"""Each workaround in ``thunder_zero/compat`` is still needed: without it, the behaviour that it mends is wrong.

A row fails if the need is gone in a version that it is known for; rows for other versions are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from runpy import run_path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dispatch import found_inf_reduce_handler
from torch.distributed.tensor._random import is_rng_supported_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.harness.one_rank import group_of_one
from tests.harness.ranks import everyone
from thunder_zero.compat import imports
from thunder_zero.compat.private import Unsupported
from thunder_zero.compat.torch.optimizers import UNSCALE

import thunder
from thunder.core.symbol import Symbol

THREADS = Path("/proc/self/task")
X = torch.arange(12.0).view(3, 4).cos()
ONES = torch.ones(1, 1)


def a_composable_checkpoint_is_not_captured() -> bool:
    module = composable_checkpoint(nn.Linear(4, 4))  # a ScriptModule may end the process
    with pytest.raises(Unsupported):
        torch.compile(module, backend="eager", fullgraph=True)(X)
    return True


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


def no_public_name_tells_of_fake_operators() -> bool:
    names = [*dir(torch.utils), *dir(torch.overrides), *dir(torch)]
    return not [name for name in names if "fake" in name.lower() and "mode" in name.lower() and name[0] != "_"]


def no_public_name_numbers_operators_of_autograd() -> bool:
    return not [name for name in dir(torch.autograd) if "sequence_nr" in name.lower() and not name.startswith("_")]


def works_of_a_fake_group_have_no_values() -> bool:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        return work.get_future().value() is None
    finally:
        dist.destroy_process_group()


def grouped_products_have_no_float64() -> bool:
    with pytest.raises(RuntimeError):
        torch.nn.functional.grouped_mm(torch.ones(4, 4).double(), torch.ones(1, 4, 4).double(), offs=torch.tensor([4]))
    return True


def no_public_name_makes_groups_of_threads() -> bool:
    return not [name for name in dir(dist) if "thread" in name.lower() and not name.startswith("_")]


def only_one_default_group_in_a_process() -> bool:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    except ValueError as error:
        return "twice" in str(error)
    finally:
        dist.destroy_process_group()
    return False


AOT = ("export", "joint", "nodes", "rewrites", "runtime")
NEEDS = (
    Need("jitted.py", no_public_name_gives_a_jitted_module),
    Need("lines.py", lambda: "call_ctx" not in signature(Symbol.bind).parameters),
    Need("uncapturable.py", a_composable_checkpoint_is_not_captured, TORCH),
    Need("accelerate.py", accelerate_hides_its_models, TORCH),
    Need("packed_sequences.py", lengths_of_packed_sequences_end_graphs, TORCH),
    Need("dynamo.py", dynamo_gives_up_in_silence, TORCH),
    Need("private.py", no_public_name_gives_the_joint_graph, TORCH),
    *(Need(f"aot/{name}.py", no_public_name_gives_the_joint_graph, TORCH) for name in AOT),
    Need("torch/groups.py: restarts_on_one_store", attempts_of_torchrun_have_one_store, TORCH),
    Need("torch/groups.py: at_exit", gloo_has_threads_after_its_group, TORCH),
    Need("torch/groups.py: wait_for_a_core", gloo_takes_a_core_when_woken, TORCH),
    Need("torch/groups.py: lone_group", only_one_default_group_in_a_process, TORCH),
    Need("torch/recording.py: fakes", no_public_name_tells_of_fake_operators, TORCH),
    Need("torch/recording.py: is_backward", no_public_name_numbers_operators_of_autograd, TORCH),
    Need("torch/recording.py: with_arrived_works", works_of_a_fake_group_have_no_values, TORCH),
    Need("torch/recording.py: in_float64", grouped_products_have_no_float64, TORCH),
    Need("torch/threaded_group.py", no_public_name_makes_groups_of_threads, TORCH),
    Need("imports.py", thunder_cannot_be_imported, TORCH),
    Need("plans_of_transformers.py", transformers_has_no_public_name_that_applies_a_plan, TORCH),
    Need("slice_generators.py", torch_draws_for_no_slice_on_a_cpu, TORCH),
    Need("inductor.py", no_public_name_compiles_a_graph_without_autograd, TORCH),
    Need("torch/optimizers.py: on_failed_steps", nobody_is_told_of_failed_steps, TORCH),
    Need("torch/fully_shard.py", nobody_says_that_fully_shard_was_applied, TORCH),
    Need("torch/optimizers.py: share_found_inf", only_the_first_gradients_placements_count, TORCH),
    Need("torch/groups.py: one_launch", a_failed_launch_stays_queued, TORCH),
    Need("torch/optimizers.py: step_alone", every_step_calls_the_hooks_of_all_optimizers, TORCH),
)


@pytest.mark.slow
@pytest.mark.parametrize("need", NEEDS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_each_workaround_is_still_needed(need: Need) -> None:
    if not imports.known(need.package):
        pytest.skip(f"the need for compat/{need} is known for {need.package} {imports.KNOWN[need.package]} only")
    assert need.is_there(), f"the need for compat/{need} is gone: delete it"


def test_every_workaround_has_a_row() -> None:
    listing = run_path(str(Path(__file__).parents[2] / "docs/listing.py"))
    assert set(listing["needs_by_name"]()) == {need.workaround for need in NEEDS}
