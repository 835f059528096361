"""Each stage, cell by cell: bytes held at rest, tensors that the optimizer steps, bytes sent in each phase.

Bytes are counted where messages leave (:func:`tests.harness.models.count_sends`), and compared with the plan's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import Mlp, bytes_of, count_sends, fresh, sharded, storages
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow
from thunder_zero.plan import layout
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Plan
from thunder_zero.plan.rows import real_rows
from thunder_zero.plan.traffic import gather_traffic, reduce_traffic
from thunder_zero.schedule.ops import Gather, Op, Reduce
from thunder_zero.sharded.digests import digests_of
from thunder_zero.sharded.dtensors import local

X = torch.linspace(-1, 1, 14).view(2, 7)


class FewRows(nn.Module):
    """A module with two layers of 7 rows, a parameter of one row and a 0-dim one. Only rank 0 has the one row."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(layers=2)
        self.one_row = nn.Parameter(torch.randn(1, 7))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp.forward(x) * self.one_row * self.scalar


AGAIN = {"mlp.layers.1.weight", "one_row"}  # x requires no gradient, so backward does not read the first layer's weight


def train_a_little(rank: int, world_size: int, stage: int) -> None:
    digests_of([torch.ones(1)])  # creates the process's table of weights
    before = storages()
    # By default, ZeRO-3 would gather all of this small model once: see tests/ranks/test_stages_in_memory.py.
    policy = tz.Policy(stage=stage, reshard_after_forward=True)
    plan = make_plan(fresh(FewRows), policy, Mesh.of(world_size, rank))
    model = sharded(fresh(FewRows), policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)  # a fused step raises no tensor's version
    check_bytes_sent(model, optimizer, plan)
    optimizer.zero_grad()
    check_bytes_at_rest(model, optimizer, plan, before)


def check_bytes_at_rest(model: Any, optimizer: torch.optim.Optimizer, plan: Plan, before: dict[int, Any]) -> None:
    """Check the shape, memory and place of each tensor that the optimizer steps, and all bytes of the model."""
    stage, axis = plan.policy.stage, plan.mesh.shard
    total = 4 * axis.size if stage else 0  # bytes of the mesh's ranks
    names = {param: name for name, param in model.named_parameters()}
    shards = {names[param]: param for param in optimizer.param_groups[0]["params"]}
    state = {names[param]: state["exp_avg"] for param, state in optimizer.state.items()}
    for param in plan.params:
        rows, shard, average = model.state.params[param.path].rows, shards[param.path], state[param.path]
        stored = prod(plan.shard_shape(param))
        padded = prod(plan.geometry(param).gathered)
        numel = {0: prod(param.shape), 1: padded, 2: stored, 3: stored}[stage]
        assert rows.untyped_storage().nbytes() == 4 * numel, param.path
        assert rows.storage_offset() == (axis.place * stored if stage == 1 and param.sharded else 0), param.path
        assert rows.shape == plan.shard_shape(param), param.path
        unpadded = real_rows(rows, param, plan)  # padding has no optimizer state
        assert shard.shape == average.shape == param.shape, param.path
        assert local(shard).shape == local(average).shape == unpadded.shape, param.path
        assert local(shard).data_ptr() == unpadded.data_ptr() or not unpadded.numel(), param.path
        assert local(average).untyped_storage().nbytes() == unpadded.nbytes, param.path
        with torch._C.DisableTorchFunctionSubclass():
            assert model.state.params[param.path].placeholder.untyped_storage().nbytes() == 0
        # AdamW has two states and a step count; a resident parameter has a digest.
        total += 4 * (numel + 2 * unpadded.numel() + 1) + 8 * param.resident
    assert_settles(lambda: bytes_of(item for address, item in storages().items() if address not in before), total)


def assert_settles(count: Callable[[], int], expected: int) -> None:
    """Check a count, for two seconds at most: under load, another thread may still hold a tensor of the last step."""
    counts: list[int] = []
    while len(counts) < 20 and (not counts or counts[-1] != expected):
        time.sleep(0.1 * bool(counts))
        counts.append(count())
    assert counts[-1] == expected, (counts, expected)


def check_bytes_sent(model: Any, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Check the bytes of every phase, of a step against its timeline, and of all ranks against a formula."""
    stage, axis = plan.policy.stage, plan.mesh.shard
    one_row = plan.by_name["one_row"]
    one_row_sgd = torch.optim.SGD([model.get_parameter("one_row")], 0.1)
    gather = sum(gather_traffic(plan, param).sent for param in plan.params)  # ZeRO-1 gathers only after a step
    again = sum(gather_traffic(plan, param).sent for param in plan.params if param.path in AGAIN and stage == 3)
    forward = 0 if stage == 1 else gather
    assert bool(gather) == (stage > 0)
    one_row_sent = gather_traffic(plan, one_row).sent
    assert one_row_sent == (28 * (axis.size - 1) if axis.place == 0 and stage else 0), "no padding"

    def infer(mode: Any) -> Tensor:
        with mode():
            return model(X)

    loss = assert_sends(forward, model, X).square().mean()
    timeline = tz.traces_of(model).timeline
    backward = again + reduced_bytes(plan, [op.params for op in timeline.ops if isinstance(op, Reduce)])
    assert_sends(backward, loss.backward)
    model.eval()
    assert_sends(forward, model, X)
    assert_sends(forward, infer, torch.no_grad)
    assert_sends(forward, infer, torch.inference_mode)
    model.train()
    assert_sends(0, optimizer.step)
    assert_sends(gather, model, X)
    assert_sends(forward, model, X)
    optimizer.step()
    optimizer.step()
    assert_sends(gather, infer, torch.inference_mode)
    loss = assert_sends(forward, model, X).square().mean()
    assert_sends(backward, loss.backward)
    one_row_sgd.step()
    assert_sends(one_row_sent if stage == 1 else gather, model, X)

    foreseen = {
        kind: sum(timeline.traffic(op).sent for op in timeline.ops if isinstance(op, kind)) for kind in get_args(Op)
    }
    assert foreseen.pop(Gather) == gather + again
    assert foreseen.pop(Reduce) == sum(reduce_traffic(plan, param).sent for param in plan.params)
    assert not any(foreseen.values()), foreseen
    check_formula(plan, gather + backward)


def assert_sends(nbytes: int, run: Callable[..., Any], *args: Any) -> Any:
    with count_sends() as messages:
        result = run(*args)
    assert sum(messages) == nbytes, (messages, nbytes)
    return result


def check_formula(plan: Plan, step: int) -> None:
    """Check that all ranks send 2 (W - 1) times the model, plus (W - 1) times what backward gathers again."""
    model = sum(param.full_bytes for param in plan.params)
    again = sum(param.full_bytes for param in plan.params if param.path in AGAIN and plan.policy.stage == 3)
    total = torch.tensor(step)
    dist.all_reduce(total)
    assert total == (2 * model + again) * (plan.mesh.shard.size - 1)


def reduced_bytes(plan: Plan, buckets: list[tuple[str, ...]]) -> int:
    """Return the fewest bytes that can reduce these buckets, in whole elements.

    An all-reduce divides its bucket as a whole; two ranks exchange all that they have. The plan divides each tensor
    and rounds up, so it may be off by an element a rank.
    """
    total, axis = 0, plan.mesh.shard
    for paths in buckets:
        params = [plan.by_name[path] for path in paths]
        if params[0].sharded:
            total += sum(reduce_traffic(plan, param).sent for param in params)
            continue
        numel = sum(param.full_bytes for param in params) // 4
        start, stop = layout.row_range(numel, axis.size, axis.place)
        own_numel = stop - start
        total += 4 * (numel if axis.size == 2 else numel - own_numel + own_numel * (axis.size - 1))
    rounding = 0 if axis.size == 2 else 4 * axis.size * len(plan.params)
    assert abs(total - sum(reduce_traffic(plan, param).sent for param in plan.params)) <= rounding
    return total


@pytest.mark.parametrize(("world_size", "stage"), [(3, 3), (3, 1), *slow((3, 0), (2, 2)), *deep((2, 0), (3, 2))])
def test_bytes_at_rest_and_sent_are_the_plans(ranks_pool: RanksPool, world_size: int, stage: int) -> None:
    ranks_pool.run(world_size, train_a_little, stage)
