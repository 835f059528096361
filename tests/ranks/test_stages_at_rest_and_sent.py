"""Each stage, cell by cell: bytes held at rest, tensors that the optimizer steps, bytes sent in each phase.

Bytes are counted where messages leave (:func:`tests.harness.models.count_sends`), and compared with the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import Mlp, count_sends, fresh, sharded, storages
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from thunder_zero import layout
from thunder_zero.plan import Plan, make_plan
from thunder_zero.runtime.digests import digests_of
from thunder_zero.schedule.timeline import Kind

STAGES = (0, 1, 2, 3)
WORLDS = of_tier((3,), (2, 3))
X = torch.linspace(-1, 1, 14).view(2, 7)


class Few(nn.Module):
    """Two layers of 7 rows; one row, which leaves all ranks but the first with padding; a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(layers=2)
        self.one_row = nn.Parameter(torch.randn(1, 7))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.one_row * self.scalar


AGAIN = {"mlp.layers.1.weight", "one_row"}  # x needs no gradient, so the first layer's weight is not read again


def policy_of(stage: int) -> tz.Policy:
    """As the stage is defined; ZeRO-3 would gather all of this small model once: tests/ranks/test_last_units.py."""
    return tz.Policy(stage=stage, gather_last_units_once=False)


def plan_of(stage: int, world_size: int, rank: int) -> Plan:
    return make_plan(fresh(Few), policy_of(stage), world_size, rank)


# The ranks' part


def described(tensor: Tensor) -> tuple[tuple[int, ...], int, int]:
    """Shape; bytes of its storage; its offset there, in elements."""
    return tuple(tensor.shape), tensor.untyped_storage().nbytes(), int(tensor.storage_offset())


def live(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Trains each stage's model a little; the bytes that it sends, and the memory that it adds."""
    results = []
    digests_of([torch.ones(1)])  # makes the process's table of weights
    for stage in STAGES:
        before = storages()
        model = sharded(fresh(Few), policy_of(stage))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)  # fused raises no tensor's version
        result = count_phases(model, optimizer, stage)
        optimizer.zero_grad()
        names = {param: name for name, param in model.named_parameters()}
        result |= {
            "bytes": sum(nbytes for address, nbytes in storages().items() if address not in before),
            "seen": {names[param]: described(param) for param in optimizer.param_groups[0]["params"]},
            "state": {names[param]: tuple(state["exp_avg"].shape) for param, state in optimizer.state.items()},
            **(held_by_zero1(model, optimizer) if stage == 1 else {}),
        }
        results.append(result)
        del model, optimizer, names
    return results


def count_phases(model: Any, optimizer: torch.optim.Optimizer, stage: int) -> dict[str, Any]:
    """Bytes sent in each phase; those of a step by the timeline, and the buckets that it reduces."""
    sent: dict[str, int] = {}
    of_one = torch.optim.SGD([model.get_parameter("one_row")], 0.1)

    def count(phase: str, run: Callable[[], Any]) -> Any:
        with count_sends() as messages:
            result = run()
        sent[phase] = sum(messages)
        return result

    def infer(mode: Any) -> Tensor:
        with mode():
            return model(X)

    loss = count("first forward", lambda: model(X)).square().mean()
    count("backward", loss.backward)
    timeline = tz.traces_of(model).timeline
    model.eval()
    count("eval", lambda: model(X))
    count("no_grad", lambda: infer(torch.no_grad))
    count("inference", lambda: infer(torch.inference_mode))
    model.train()
    count("step", optimizer.step)
    count("forward after a step", lambda: model(X))
    count("forward again", lambda: model(X))
    optimizer.step()
    optimizer.step()
    count("inference after two steps", lambda: infer(torch.inference_mode))
    loss = count("forward after inference", lambda: model(X)).square().mean()
    count("backward again", loss.backward)
    of_one.step()
    count("forward after a step of one parameter", lambda: model(X))
    by_kind = {kind: sum(timeline.bytes_sent(op) for op in timeline.ops if op.kind is kind) for kind in Kind}
    reductions = [op.params for op in timeline.ops if op.kind is Kind.REDUCE]
    return {"sent": sent, "timeline": by_kind, "reductions": reductions}


def held_by_zero1(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The values in its buffers after a step, and after the next forward."""
    model(X).square().mean().backward()
    optimizer.step()
    stale = buffers(model)
    model(X)
    return {"stale": stale, "refreshed": buffers(model)}


def buffers(model: Any) -> dict[str, Tensor]:
    """Copies of the storage of each parameter that the optimizer steps, as 1-D float32."""
    memory = {name: param.detach().untyped_storage() for name, param in model.named_parameters()}
    return {name: torch.empty(0).set_(storage).clone() for name, storage in memory.items()}


@pytest.fixture(scope="module")
def counted(ranks_pool: RanksPool) -> Callable[[int], list[list[dict[str, Any]]]]:
    """By world size: for each rank, for each stage."""
    return cache(lambda world_size: ranks_pool.run(world_size, live, timeout=110))


# At rest, and in the optimizer


@pytest.mark.parametrize("world_size", WORLDS)
def test_bytes_at_rest_and_tensors_of_the_optimizer(counted: Any, world_size: int) -> None:
    for rank, results in enumerate(counted(world_size)):
        for stage, result in zip(STAGES, results, strict=True):
            plan = plan_of(stage, world_size, rank)
            padded = {param.path: layout.padded_shape(param.shape, world_size) for param in plan.params}
            full = {param.path: int(torch.Size(padded[param.path]).numel()) * 4 for param in plan.params}
            owned = {param.path: prod(plan.shard_shape(param)) * 4 for param in plan.params}
            held = {0: {param.path: param.full_bytes for param in plan.params}, 1: full, 2: owned, 3: owned}[stage]
            placeholders = 4 * len(plan.params)
            steps = 4 * len(plan.params)  # AdamW counts them, a float32 a parameter
            digests = 8 * sum(param.resident for param in plan.params)
            assert result["bytes"] == sum(held.values()) + placeholders + 2 * sum(owned.values()) + steps + digests
            for param in plan.params:
                shape, nbytes, offset = result["seen"][param.path]
                assert shape == plan.shard_shape(param) == result["state"][param.path]
                assert nbytes == held[param.path], param.path
                assert offset == (rank * owned[param.path] // 4 if stage == 1 and param.sharded else 0)


# Bytes sent

FORWARDS = ("first forward", "forward after a step", "forward again", "forward after inference")
WITHOUT_BACKWARD = (
    "eval",
    "no_grad",
    "inference",
    "inference after two steps",
    "forward after a step of one parameter",
)
BACKWARDS = ("backward", "backward again")


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_of_every_phase(counted: Any, world_size: int, stage: int) -> None:
    for rank, results in enumerate(counted(world_size)):
        sent, plan = results[stage]["sent"], plan_of(stage, world_size, rank)
        gather, reduction = sum(map(plan.gather_bytes, plan.params)), reduced_bytes(plan, results[stage]["reductions"])
        again = sum(plan.gather_bytes(param) for param in plan.params if param.path in AGAIN)
        assert sent["step"] == 0
        assert all(sent[phase] == reduction + (again if stage == 3 else 0) for phase in BACKWARDS)
        if stage == 0:
            assert gather == 0
        if stage != 1:
            assert all(sent[phase] == gather for phase in (*FORWARDS, *WITHOUT_BACKWARD))
            continue
        refreshes = {"forward after a step": gather, "inference after two steps": gather}
        refreshes["forward after a step of one parameter"] = plan.gather_bytes(plan.by_name["one_row"])
        for phase in (*FORWARDS, *WITHOUT_BACKWARD):
            assert sent[phase] == refreshes.get(phase, 0), phase


def reduced_bytes(plan: Plan, buckets: list[tuple[str, ...]]) -> int:
    """The fewest bytes that can reduce these buckets, in whole elements: a rank gets its rows and sends means.

    An all-reduce cuts its bucket as a whole; two ranks swap all that they have. The plan, which divides each tensor
    by itself, rounds up and counts alike for all ranks: it may be off by an element a rank.
    """
    total = 0
    for paths in buckets:
        params = [plan.by_name[path] for path in paths]
        if params[0].sharded:
            total += sum(map(plan.reduce_bytes, params))
            continue
        numel = sum(param.full_bytes for param in params) // 4
        start, stop = layout.row_range(numel, plan.world_size, plan.rank)
        own = stop - start
        total += 4 * (numel if plan.world_size == 2 else numel - own + own * (plan.world_size - 1))
    rounding = 4 * plan.world_size * len(plan.params)
    assert abs(total - sum(map(plan.reduce_bytes, plan.params))) <= (0 if plan.world_size == 2 else rounding)
    return total


@pytest.mark.parametrize("world_size", WORLDS)
def test_one_rank_of_zero1_has_nothing_but_padding(world_size: int) -> None:
    """So the counts above cover a rank that sends nothing, and must refresh all the same."""
    last = plan_of(1, world_size, world_size - 1)
    assert last.gather_bytes(last.by_name["one_row"]) == 0
    first = plan_of(1, world_size, 0)
    assert first.gather_bytes(first.by_name["one_row"]) == 7 * 4 * (world_size - 1)


@pytest.mark.parametrize("world_size", WORLDS)
def test_refreshed_buffers_are_equal_bit_for_bit(counted: Any, world_size: int) -> None:
    """Before the refresh each rank has new values in its own rows only."""
    ranks = [results[1] for results in counted(world_size)]
    for name, buffer in ranks[0]["refreshed"].items():
        assert all(torch.equal(other["refreshed"][name], buffer) for other in ranks[1:]), name
    layers = [name for name in ranks[0]["stale"] if name.startswith("mlp")]
    assert all(not torch.equal(ranks[0]["stale"][name], ranks[1]["stale"][name]) for name in layers)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_timeline_knows_the_bytes(counted: Any, world_size: int, stage: int) -> None:
    """Of one training step, its refresh included."""
    for rank, results in enumerate(counted(world_size)):
        sent, timeline = results[stage]["sent"], results[stage]["timeline"]
        plan = plan_of(stage, world_size, rank)
        off = sum(map(plan.reduce_bytes, plan.params)) - reduced_bytes(plan, results[stage]["reductions"])
        assert timeline[Kind.GATHER] + timeline[Kind.REDUCE] == sum(timeline.values())
        assert sent["forward after a step"] + sent["backward"] == sum(timeline.values()) - off


@pytest.mark.parametrize("world_size", WORLDS)
def test_bytes_over_all_ranks_are_the_formula(counted: Any, world_size: int) -> None:
    """2u, or 3u without the parameters that backward does not need. u is (W - 1) / W of the model; all ranks send
    (W - 1) x the model."""
    params = plan_of(3, world_size, 0).by_name
    model = sum(param.full_bytes for param in params.values())
    not_again = sum(param.full_bytes for path, param in params.items() if path not in AGAIN)
    for stage in STAGES:
        sent = [results[stage]["sent"] for results in counted(world_size)]
        step = sum(phases["forward after a step"] + phases["backward"] for phases in sent)
        expected = {0: 2 * model, 1: 2 * model, 2: 2 * model, 3: 3 * model - not_again}[stage] * (world_size - 1)
        assert step == expected
