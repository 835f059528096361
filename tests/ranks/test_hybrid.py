"""Hybrid sharding trains two copies of a model, each sharded over two ranks, as one process."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thunder_zero as tz
from tests.harness.as_one_process import Side, Steps, gather_objects, trains_as_one_process
from tests.harness.errors import fails
from tests.harness.models import Mlp, Small, count_sends, fresh
from tests.harness.ranks import LONG, RanksPool
from tests.harness.tiers import slow
from thunder_zero.plan.traffic import reduce_traffic

import thunder

SHAPE, ROWS, MICRO, STEPS = (2, 2), 8, 2, 2
NAMES = ("replicate", "shard")


def shard_on_mesh(module: Any, mesh: Any, policy: tz.Policy | None = None, **options: Any) -> Any:
    return thunder.jit(deepcopy(module), transforms=[tz.ZeroTransform(policy, mesh=mesh, **options)])


def clip(model: Any) -> torch.Tensor:
    if isinstance(model, tz.ZeroModule):
        return tz.clip_grad_norm_(model, 0.1)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def accumulate(side: Side, defers: bool, sends: list[int]) -> Steps:
    """Take steps of several micro-batches, with clipping; append the bytes that each micro-batch sends."""
    (model,) = side.models
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            generator = torch.Generator().manual_seed(step * MICRO + micro)
            tokens = torch.randint(0, 9, (ROWS, 3), generator=generator)
            open_ = defers and side.is_sharded and micro < MICRO - 1
            with model.no_sync() if open_ else nullcontext(), count_sends() as sent:
                (model(side.rows(tokens)).square().mean() / MICRO).backward()
            if side.is_sharded:
                sends.append(sum(sent))
        norm = clip(model)
        optimizer.step()
        yield side.mean(norm)


def train_two_copies(rank: int, world_size: int, stage: int) -> None:
    """Train with replicated and tied parameters, and with rows that two ranks do not divide."""
    plain = fresh(Small)
    policy = tz.Policy(stage=stage, replicate_below_bytes=21, reshard_after_forward=True)
    model = shard_on_mesh(plain, init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES), policy)
    sends: dict[bool, list[int]] = {False: [], True: []}
    for defers, sent in sends.items():
        model.load_original_state_dict(plain.state_dict())
        trains_as_one_process([(model, plain)], partial(accumulate, defers=defers, sends=sent))
    check_bytes(rank, tz.traces_of(model).timeline, sends[False], sends[True])


def check_bytes(rank: int, timeline: tz.schedule.Timeline, reduced: list[int], deferred: list[int]) -> None:
    """Check that a rank sends shards and gradients inside its copy, and only its rows across copies."""
    plan = timeline.plan
    assert plan.mesh == tz.schedule.Mesh.of(2, rank % 2, replicas=2, copy=rank // 2)
    of_gradients, *rest = [plain - held for plain, held in zip(reduced, deferred, strict=True)]
    assert rest == [0, of_gradients, 0], "the first of two micro-batches reduces nothing"
    trained = [param for param in plan.params if param.requires_grad and param.path != "unused"]
    close = 4 * 4 * len(trained)  # an all-reduce of few elements is cut unevenly
    assert abs(sum(timeline.traffic(op).sent for op in timeline.ops) - reduced[0]) <= close
    by_hand = 0.0
    for param in trained:  # rows inside and across copies; or twice 3/4 in an all-reduce
        by_hand += param.full_bytes if param.sharded else param.full_bytes * 6 / 4
    forecast = sum(reduce_traffic(plan, param).sent for param in trained)
    sent, forecast, by_hand = (sum(gather_objects(nbytes)) for nbytes in (of_gradients, forecast, by_hand))
    assert sent == pytest.approx(by_hand)
    assert 0 <= forecast - sent <= close, (forecast, sent)


@pytest.mark.parametrize("stage", [3, *slow(0, 1)])
def test_two_copies_train_as_one_process(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(4, train_two_copies, stage, timeout=LONG)


# Other meshes

HALF = tz.MixedPrecision(torch.bfloat16, torch.float32)
CROSSED = [[0, 2], [1, 3]]  # the ranks of a copy are not next to each other
MESHES: list[tuple[list[Any], tz.Policy, float | None]] = [  # the ranks, the policy, a tolerance
    ([0, 1, 2, 3], tz.ZERO3, None),
    ([[0], [1], [2], [3]], replace(tz.ZERO2, replicate_below_bytes=60, bucket_bytes=0), None),
    ([[0, 1, 2, 3]], tz.ZERO3, None),
    ([[0, 1], [2, 3]], replace(tz.ZERO1, mixed_precision=HALF), 2e-2),
    (CROSSED, tz.ZERO2, None),
]


def train_on_global_mean(side: Side) -> Steps:
    (model,) = side.models
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        losses = model(side.rows(torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(0)))).float().square()
        loss = tz.global_mean(model, losses.mean(1).sum(), count=len(losses)) if side.is_sharded else losses.mean()
        loss.backward()
        norm = clip(model)
        optimizer.step()
        yield side.mean(torch.stack((loss.detach(), norm)))


def train_on_other_meshes(rank: int, world_size: int, folder: Path) -> None:
    plain = fresh(Mlp)
    for layout, policy, tolerance in MESHES:
        ranks = torch.tensor(layout)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=NAMES[-ranks.dim() :])
        model = shard_on_mesh(plain, mesh, policy)
        position = ranks.flatten().tolist().index(rank)
        (weights,) = trains_as_one_process([(model, plain)], train_on_global_mean, position, tolerance)
        plan, width = tz.traces_of(model).plan, ranks.shape[-1]
        assert (str(plan.mesh), plan.ranks) == (f"rank {position % width} of {width}", 4), layout
        for _ in range(40 if width == 1 else 0):  # two threads send, in an order that differs between ranks
            model(torch.ones(2, 7)).square().mean().backward()
    tz.save(folder, model)
    for load in (partial(tz.load, folder, model), partial(model.load_original_state_dict, weights)):
        model.load_original_state_dict(plain.state_dict())
        load()
        loaded = tz.full_state_dict(model)
        assert all(torch.equal(loaded[path], expected) for path, expected in weights.items()), load
    torch.manual_seed(rank)
    model = shard_on_mesh(Mlp(), init_device_mesh("cpu", SHAPE), broadcast_from=3)
    torch.manual_seed(3)
    weights = tz.full_state_dict(model)
    assert all(torch.equal(weights[path], expected) for path, expected in Mlp().state_dict().items())


@pytest.mark.slow
def test_other_meshes_train_save_and_load(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(4, train_on_other_meshes, tmp_path / "saved")


def refuse_bad_meshes(rank: int, world_size: int) -> None:
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    two = three["b", "c"]
    rows: list[tuple[Any, dict[str, Any], str]] = [
        (three, {}, "3 dimensions ('a', 'b', 'c'); give one dimension (shard) or two (replicate, shard)"),
        (two, {"process_group": dist.group.WORLD}, "process_group and mesh are both given; give only one of them"),
        (DeviceMesh("cpu", [[2, 0], [1, 3]]), {}, "sort the ranks in each row of the mesh: [[0, 2], [1, 3]]"),
        (SHAPE, {}, "mesh is (2, 2), a tuple; give a torch.distributed.device_mesh.DeviceMesh"),
        (two if rank != 1 else None, {}, "differs between ranks: rank 0 has 2 x 2, rank 1 has 1 x 4"),
    ]
    for mesh, options, words in rows:
        fails(partial(shard_on_mesh, Mlp(), mesh, **options), words)


def test_a_bad_mesh_gets_one_sentence(ranks_pool: RanksPool) -> None:
    ranks_pool.run(4, refuse_bad_meshes)


def test_a_trace_of_a_hybrid_shows_copies_and_counts_all_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.zeros(2, 7)
    traces = [tz.trace(fresh(Mlp), x, policy=tz.ZERO2, world_size=2, replicas=replicas) for replicas in (1, 4)]
    of_one_copy, of_four_copies = (
        sum(result.timeline.traffic(op).sent for op in result.timeline.ops) for result in traces
    )
    assert of_four_copies - of_one_copy == sum(2 * 3 * rows * 4 // 4 for rows in 3 * (4 * 7, 4))  # 4 rows on rank 0
    tz.print_trace(traces[1])
    assert "# backward, ZeRO-2, rank 0 of 2, one of 4 copies" in capsys.readouterr().out
    fails(lambda: tz.trace(fresh(Mlp), x, world_size=2, replicas=0), "replicas is 0; give the number of copies")
