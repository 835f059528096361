"""Each stage, cell by cell: bytes held at rest, tensors that the optimizer steps, bytes sent in each phase.

Bytes are counted where messages leave (:func:`tests.harness.models.count_sends`), and compared with the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import Mlp, count_sends, fresh, sharded, storages
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow
from thunder_zero.plan import layout
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Plan
from thunder_zero.plan.rows import real_rows
from thunder_zero.schedule.timeline import Kind
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.writes import digests_of

X = torch.linspace(-1, 1, 14).view(2, 7)


class Few(nn.Module):
    """Two layers of 7 rows; one row, which leaves all ranks but the first with padding; a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(layers=2)
        self.one_row = nn.Parameter(torch.randn(1, 7))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp.forward(x) * self.one_row * self.scalar


AGAIN = {"mlp.layers.1.weight", "one_row"}  # x needs no gradient, so the first layer's weight is not read again


def trains_a_little(rank: int, world_size: int, stage: int) -> None:
    digests_of([torch.ones(1)])  # makes the process's table of weights
    before = storages()
    # As the stage is defined; ZeRO-3 would gather all of this small model once: tests/ranks/test_stages_in_memory.py.
    policy = tz.Policy(stage=stage, reshard_after_forward=True)
    plan = make_plan(fresh(Few), policy, Mesh.of(world_size, rank))
    model = sharded(fresh(Few), policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)  # fused raises no tensor's version
    check_bytes_sent(model, optimizer, plan)
    optimizer.zero_grad()
    check_bytes_at_rest(model, optimizer, plan, before)


def check_bytes_at_rest(model: Any, optimizer: torch.optim.Optimizer, plan: Plan, before: dict[int, int]) -> None:
    """Shape, memory and place of each tensor that the optimizer steps; all bytes that this model has added."""
    stage, axis = plan.policy.stage, plan.mesh.shard
    total = 4 * axis.size if stage else 0  # the mesh's ranks
    names = {param: name for name, param in model.named_parameters()}
    found = {names[param]: param for param in optimizer.param_groups[0]["params"]}
    state = {names[param]: state["exp_avg"] for param, state in optimizer.state.items()}
    for param in plan.params:
        rows, shard, average = model.state.rows[param.path], found[param.path], state[param.path]
        stored = prod(plan.shard_shape(param))
        padded = prod(plan.geometry(param).gathered)
        held = {0: prod(param.shape), 1: padded, 2: stored, 3: stored}[stage]
        assert rows.untyped_storage().nbytes() == 4 * held, param.path
        assert rows.storage_offset() == (axis.place * stored if stage == 1 and param.sharded else 0), param.path
        assert rows.shape == plan.shard_shape(param), param.path
        own = real_rows(rows, param, plan)  # padding has no state
        assert shard.shape == average.shape == param.shape, param.path
        assert local(shard).shape == local(average).shape == own.shape, param.path
        assert local(shard).data_ptr() == own.data_ptr() or not own.numel(), param.path
        assert local(average).untyped_storage().nbytes() == own.nbytes, param.path
        with torch._C.DisableTorchFunctionSubclass():
            assert model.state.placeholders[param.path].untyped_storage().nbytes() == 0
        # Twice AdamW's state, which also counts steps; a digest of what stays whole.
        total += 4 * (held + 2 * own.numel() + 1) + 8 * param.resident
    assert sum(nbytes for address, nbytes in storages().items() if address not in before) == total


def check_bytes_sent(model: Any, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Of every phase; of a training step by the timeline, and of all ranks by the formula."""
    stage, axis = plan.policy.stage, plan.mesh.shard
    one_row = plan.by_name["one_row"]
    of_one = torch.optim.SGD([model.get_parameter("one_row")], 0.1)
    gather = sum(map(plan.gather_bytes, plan.params))  # ZeRO-1 needs it after a step only
    again = sum(plan.gather_bytes(param) for param in plan.params if param.path in AGAIN and stage == 3)
    forward = 0 if stage == 1 else gather
    assert bool(gather) == (stage > 0)
    assert plan.gather_bytes(one_row) == (28 * (axis.size - 1) if axis.place == 0 and stage else 0), "no padding"

    def infer(mode: Any) -> Tensor:
        with mode():
            return model(X)

    loss = sends(forward, model, X).square().mean()
    timeline = tz.traces_of(model).timeline
    backward = again + reduced_bytes(plan, [op.params for op in timeline.ops if op.kind is Kind.REDUCE])
    sends(backward, loss.backward)
    model.eval()
    sends(forward, model, X)
    sends(forward, infer, torch.no_grad)
    sends(forward, infer, torch.inference_mode)
    model.train()
    sends(0, optimizer.step)
    sends(gather, model, X)
    sends(forward, model, X)
    optimizer.step()
    optimizer.step()
    sends(gather, infer, torch.inference_mode)
    loss = sends(forward, model, X).square().mean()
    sends(backward, loss.backward)
    of_one.step()
    sends(plan.gather_bytes(one_row) if stage == 1 else gather, model, X)

    foreseen = {kind: sum(timeline.bytes_sent(op) for op in timeline.ops if op.kind is kind) for kind in Kind}
    assert foreseen.pop(Kind.GATHER) == gather + again
    assert foreseen.pop(Kind.REDUCE) == sum(map(plan.reduce_bytes, plan.params))
    assert not any(foreseen.values()), foreseen
    check_formula(plan, gather + backward)


def sends(nbytes: int, run: Callable[..., Any], *args: Any) -> Any:
    with count_sends() as messages:
        result = run(*args)
    assert sum(messages) == nbytes, (messages, nbytes)
    return result


def check_formula(plan: Plan, step: int) -> None:
    """2u, or 3u without the parameters that backward does not need. u is (W - 1) / W of the model; all ranks send
    (W - 1) x the model."""
    model = sum(param.full_bytes for param in plan.params)
    again = sum(param.full_bytes for param in plan.params if param.path in AGAIN and plan.policy.stage == 3)
    of_all = torch.tensor(step)
    dist.all_reduce(of_all)
    assert of_all == (2 * model + again) * (plan.mesh.shard.size - 1)


def reduced_bytes(plan: Plan, buckets: list[tuple[str, ...]]) -> int:
    """The fewest bytes that can reduce these buckets, in whole elements: a rank gets its rows and sends means.

    An all-reduce cuts its bucket as a whole; two ranks swap all that they have. The plan, which divides each tensor
    by itself, rounds up and counts alike for all ranks: it may be off by an element a rank.
    """
    total, axis = 0, plan.mesh.shard
    for paths in buckets:
        params = [plan.by_name[path] for path in paths]
        if params[0].sharded:
            total += sum(map(plan.reduce_bytes, params))
            continue
        numel = sum(param.full_bytes for param in params) // 4
        start, stop = layout.row_range(numel, axis.size, axis.place)
        own = stop - start
        total += 4 * (numel if axis.size == 2 else numel - own + own * (axis.size - 1))
    rounding = 0 if axis.size == 2 else 4 * axis.size * len(plan.params)
    assert abs(total - sum(map(plan.reduce_bytes, plan.params))) <= rounding
    return total


@pytest.mark.parametrize(("world_size", "stage"), [(3, 3), (3, 1), *slow((3, 0), (2, 2)), *deep((2, 0), (3, 2))])
def test_bytes_at_rest_and_sent(ranks_pool: RanksPool, world_size: int, stage: int) -> None:
    ranks_pool.run(world_size, trains_a_little, stage)
