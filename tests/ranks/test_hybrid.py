"""Hybrid sharding: four ranks as two copies of a model, each sharded over two."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thunder_zero as tz
from tests.harness.errors import raised
from tests.harness.models import Mlp, Small, count_sends, error, fresh
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier

import thunder

BOTH_FRONT_ENDS = True

STAGES, SHAPE, ROWS, MICRO, STEPS = of_tier((0, 3), (0, 1, 2, 3)), (2, 2), 8, 2, 2
WAYS = ("reduced", "deferred")
SMALL = {"replicate_below_bytes": 21, "gather_last_units_once": False}


def tokens(step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * MICRO + micro)
    return torch.randint(0, 9, (ROWS, 3), generator=generator)


def train(model: Any, way: str, rank: int, world_size: int) -> list[int]:
    """Train steps of several micro-batches; returns the bytes that each micro-batch sent."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sends = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            defers = way == "deferred" and micro < MICRO - 1
            with model.no_sync() if defers else nullcontext(), count_sends() as sent:
                loss = model(tokens(step, micro).tensor_split(world_size)[rank]).square().mean() / MICRO
                loss.backward()
            sends.append(sum(sent))
        if isinstance(model, tz.ZeroModule):
            tz.clip_grad_norm_(model, 0.5)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return sends


def hybrid(policy: tz.Policy, shape: tuple[int, ...] = SHAPE, factory: Any = Small) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return thunder.jit(fresh(factory), transforms=[tz.ZeroTransform(policy, mesh=mesh)])


def run(rank: int, world_size: int) -> dict[tuple[int, str], Any]:
    found = {}
    for stage in STAGES:
        model = hybrid(tz.Policy(stage=stage, **SMALL))  # type: ignore[arg-type]
        for way in WAYS:
            model.load_original_state_dict(fresh(Small).state_dict())
            sends = train(model, way, rank, world_size)
            timeline = tz.traces_of(model).timeline
            forecast = sum(map(timeline.bytes_sent, timeline.ops))
            found[stage, way] = sends, tz.full_state_dict(model), timeline.plan, forecast
    return found


def eager(rank: int, world_size: int) -> dict[str, Tensor]:
    model = fresh(Small)
    train(model, "reduced", 0, 1)
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def ranks(ranks_pool: RanksPool) -> list[dict[tuple[int, str], Any]]:
    return ranks_pool.run(4, run, timeout=170)


@pytest.fixture(scope="module")
def one(ranks_pool: RanksPool) -> dict[str, Tensor]:
    (weights,) = ranks_pool.run(1, eager)
    return weights


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_two_copies_train_like_one_process(ranks: Any, one: dict[str, Tensor], stage: int, way: str) -> None:
    """With clipping, replicated and tied parameters, and rows not divisible by two ranks."""
    for found in ranks:
        for name, weight in one.items():
            assert error(found[stage, way][1][name], weight) < 1e-5, name
            assert torch.equal(found[stage, way][1][name], ranks[0][stage, way][1][name]), "the same bits everywhere"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stage", STAGES)
def test_an_accumulation_averages_rows_once(ranks: Any, stage: int) -> None:
    """Each rank sends shards and its part of each gradient inside its copy, and its rows across copies."""
    plans = [found[stage, "reduced"][2] for found in ranks]
    assert [(plan.world_size, plan.rank) for plan in plans] == [(2, 0), (2, 1)] * 2
    assert {plan.replicas for plan in plans} == {2}
    sent = forecast = by_hand = 0
    for found, plan in zip(ranks, plans, strict=True):
        trained = [param for param in plan.params if param.requires_grad and param.path != "unused"]
        each, deferred = found[stage, "reduced"][0], found[stage, "deferred"][0]
        of_gradients, *others = [one - other for one, other in zip(each, deferred, strict=True)]
        assert others == [0, of_gradients, 0], "the first of two micro-batches reduces nothing"
        sent += of_gradients
        forecast += sum(map(plan.reduce_bytes, trained))
        close = 4 * 4 * len(trained)  # an all-reduce of few elements is cut unevenly
        assert abs(found[stage, "reduced"][3] - each[-MICRO]) <= close
        for param in trained:  # the peer's rows inside, own rows across; twice 3/4 of an all-reduce
            whole = full_rows(param, 0) + full_rows(param, 1) if param.sharded else param.full_bytes * 6 / 4
            by_hand += whole
    assert sent == pytest.approx(by_hand)
    assert 0 <= forecast - sent <= close


def full_rows(param: tz.Param, rank: int) -> int:
    """Bytes of one of two ranks' rows."""
    first = -(-param.shape[0] // 2)
    rows = first if rank == 0 else param.shape[0] - first
    return rows * param.full_bytes // param.shape[0]


def other_shapes(rank: int, world_size: int) -> dict[str, Any]:
    """Meshes of one dimension, of one rank per copy, of one copy; bfloat16; a broadcast."""
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(0)).tensor_split(world_size)[rank]
    found: dict[str, Any] = {}
    policies = {
        "1-D": ((4,), tz.ZERO3),
        "no shards": ((4, 1), replace(tz.ZERO2, replicate_below_bytes=60, bucket_bytes=0)),
        "no copies": ((1, 4), tz.ZERO3),
        "mixed": ((2, 2), replace(tz.ZERO1, mixed_precision=tz.MixedPrecision(torch.bfloat16, torch.float32))),
    }
    for name, (shape, policy) in policies.items():
        model = hybrid(policy, shape, Mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            tz.global_mean(model, model(x).float().square().mean(1).sum(), count=len(x)).backward()
            optimizer.step()
        plan = tz.traces_of(model).plan
        found[name] = tz.full_state_dict(model), (plan.replicas, plan.world_size, plan.rank)
        for _ in range(40 if name == "no shards" else 0):  # two threads send, in an order that differs between ranks
            model(x).square().mean().backward()
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", SHAPE)
    model = thunder.jit(Mlp(), transforms=[tz.ZeroTransform(mesh=mesh, broadcast_from=3)])
    torch.manual_seed(3)
    found["broadcast"] = tz.full_state_dict(model), dict(Mlp().state_dict())
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_other_meshes(ranks_pool: RanksPool) -> None:
    model = fresh(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 7, generator=torch.Generator().manual_seed(0))).square().mean(1).mean().backward()
        optimizer.step()
    for rank, found in enumerate(ranks_pool.run(4, other_shapes, timeout=110)):
        shapes = {name: found[name][1] for name in ("1-D", "no shards", "no copies", "mixed")}
        assert shapes == {
            "1-D": (1, 4, rank),
            "no shards": (4, 1, 0),
            "no copies": (1, 4, rank),
            "mixed": (2, 2, rank % 2),
        }
        for name in shapes:
            for path, weight in model.state_dict().items():
                assert error(found[name][0][path], weight) < (2e-2 if name == "mixed" else 1e-5), (name, path)
        weights, right = found["broadcast"]
        assert all(torch.equal(weights[path], right[path]) for path in right)


def misuse(rank: int, world_size: int) -> list[str]:
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    two = three["b", "c"]
    mesh: Any
    found = []
    wrong: Any = ((three, {}), (two, {"process_group": dist.group.WORLD}), ((2, 2), {}))
    for mesh, options in wrong:
        transform = tz.ZeroTransform(mesh=mesh, **options)
        found.append(raised(lambda transform=transform: thunder.jit(Mlp(), transforms=[transform])))  # type: ignore[misc]
    mesh = None if rank == 1 else two
    found.append(raised(lambda: thunder.jit(fresh(Mlp), transforms=[tz.ZeroTransform(mesh=mesh)])))
    return found


def test_a_bad_mesh_gets_one_sentence(ranks_pool: RanksPool) -> None:
    for dimensions, both, no_mesh, different in ranks_pool.run(4, misuse):
        assert (
            "mesh has 3 dimensions ('a', 'b', 'c'); give one dimension (shard) or two (replicate, shard)" in dimensions
        )
        assert "process_group and mesh are both given; give only one of them" in both
        assert "the mesh (copies x ranks) differs between ranks: rank 0 has 2 x 2, rank 1 has 1 x 4" in different
        assert "mesh is (2, 2), a tuple; give a torch.distributed.device_mesh.DeviceMesh" in no_mesh


def test_a_trace_of_a_hybrid_shows_copies_and_counts_all_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.zeros(2, 7)
    traces = [tz.trace(fresh(Mlp), x, policy=tz.ZERO2, world_size=2, replicas=replicas) for replicas in (1, 4)]
    one, four = (sum(map(result.timeline.bytes_sent, result.timeline.ops)) for result in traces)
    assert four - one == sum(2 * 3 * rows * 4 // 4 for rows in 3 * (4 * 7, 4))  # rank 0 has four rows of seven
    tz.print_trace(traces[1])
    assert "# backward, ZeRO-2, rank 0 of 2, one of 4 copies" in capsys.readouterr().out
    assert "replicas is 0; give the number of copies" in raised(
        lambda: tz.trace(fresh(Mlp), x, world_size=2, replicas=0)
    )


CROSSED = [[0, 2], [1, 3]]  # the ranks of a copy are not next to each other


def crossed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train, clip, save and load on a mesh whose ranks are not in order; and one that torch's groups would reorder."""
    refused = raised(
        lambda: thunder.jit(fresh(Mlp), transforms=[tz.ZeroTransform(mesh=DeviceMesh("cpu", [[2, 0], [1, 3]]))])
    )
    model = thunder.jit(fresh(Small), transforms=[tz.ZeroTransform(stage=2, mesh=DeviceMesh("cpu", CROSSED))])
    micro = CROSSED[0].index(rank) if rank in CROSSED[0] else 2 + CROSSED[1].index(rank)
    train(model, "reduced", micro, world_size)
    weights = tz.full_state_dict(model)
    model.zero_grad()
    model(tokens(9, 0).tensor_split(world_size)[micro]).square().mean().backward()
    norm = tz.clip_grad_norm_(model, 1e-3)
    tz.save(folder, model)
    model.load_original_state_dict(fresh(Small).state_dict())
    tz.load(folder, model)
    loaded = tz.full_state_dict(model)
    model.load_original_state_dict(weights)
    return {"weights": weights, "loaded": loaded, "again": tz.full_state_dict(model), "norm": norm, "refused": refused}


def crossed_alone(rank: int, world_size: int) -> tuple[dict[str, Tensor], Tensor]:
    model = fresh(Small)
    train(model, "reduced", 0, 1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad()
    model(tokens(9, 0)).square().mean().backward()
    return weights, torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_mesh_whose_ranks_are_not_in_order(ranks_pool: RanksPool, tmp_path: Any) -> None:
    ((weights, norm),) = ranks_pool.run(1, crossed_alone)
    for found in ranks_pool.run(4, crossed, str(tmp_path / "saved"), timeout=170):
        assert error(found["norm"], norm) < 1e-5
        for name, weight in weights.items():
            assert error(found["weights"][name], weight) < 1e-5, name
            assert torch.equal(found["loaded"][name], found["weights"][name]), name
            assert torch.equal(found["again"][name], found["weights"][name]), name
        assert "sort the ranks in each row of the mesh: [[0, 2], [1, 3]]" in found["refused"]
