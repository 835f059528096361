"""Twenty steps of training on 1 to 4 ranks equal eager training by one process, in every stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

import thunder_zero as tz
from tests.harness.models import Gpt, error, fresh, sharded, whole
from tests.harness.ranks import RanksPool, run_ranks
from tests.harness.tiers import of_tier
from tests.harness.training import OPTIMIZERS, Record, assert_same_bits, make_optimizer, train
from thunder_zero.plan import make_plan

BOTH_FRONT_ENDS = True

STAGES = (0, 1, 2, 3)
KEY_BIASES = ("blocks.0.key.bias", "blocks.1.key.bias")  # their gradient is zero in exact arithmetic
TOLERANCE, STAGES_TOLERANCE, ZERO = 1e-5, 1e-6, 1e-7

Records = dict[tuple[int, str], list[Record]]  # of one rank, by stage and optimizer: one for each run
Trained = Callable[[int], list[Records]]


def train_sharded(rank: int, world_size: int, stages: tuple[int, ...], runs: int) -> Records:
    """Records by stage and optimizer; each run starts from the plain module's weights, in the same compiled model."""
    plain = fresh(Gpt)
    records: Records = {}
    for stage in stages:
        model = sharded(plain, stage)
        for name in OPTIMIZERS:
            for _ in range(runs):
                model.load_original_state_dict(plain.state_dict())
                record = train(model, make_optimizer(name, model.parameters()), rank, world_size)
                record["full"] = tz.full_state_dict(model)
                records.setdefault((stage, name), []).append(record)
    return records


def train_eager(rank: int, world_size: int) -> dict[str, Record]:
    records = {}
    for name in OPTIMIZERS:
        model = fresh(Gpt)
        records[name] = train(model, make_optimizer(name, model.parameters()), 0, 1)
        records[name]["full"] = model.state_dict()
    return records


@pytest.fixture(scope="module")
def eager(ranks_pool: RanksPool) -> dict[str, Record]:
    """The reference, by optimizer: one process, the whole batch."""
    (records,) = ranks_pool.run(1, train_eager)
    return records


@pytest.fixture(scope="module")
def trained(ranks_pool: RanksPool) -> Trained:
    """The records of all ranks of a world: each stage and optimizer, run twice."""
    return cache(lambda world_size: ranks_pool.run(world_size, train_sharded, STAGES, 2, timeout=110))


def assembled(records: list[Record], stage: int) -> Record:
    """What all ranks hold together; what is replicated must be equal on all of them, bit for bit."""
    plan = make_plan(fresh(Gpt), tz.Policy(stage=stage), len(records), 0)

    def joined(kind: str, path: str) -> Tensor | None:
        parts = [record[kind][path] for record in records]
        param = plan.by_name[path]
        assert all(part is None or tuple(part.shape) == plan.shard_shape(param) for part in parts), path
        return whole(parts, param.shape, sharded=param.sharded) if parts[0] is not None else None

    for record in records[1:]:
        assert record["full"].keys() == records[0]["full"].keys()
        assert all(torch.equal(record["full"][name], full) for name, full in records[0]["full"].items())
    return {
        "loss": torch.stack([record["losses"] for record in records]).mean(0),
        "logits": torch.cat([record["logits"] for record in records]),
        "grads": {param.path: joined("grads", param.path) for param in plan.params},
        "weights": {param.path: joined("weights", param.path) for param in plan.params},
    }


def compare(found: Record, right: Record, tolerance: float) -> None:
    """By the norm of each tensor; gradients that are zero in exact arithmetic absolutely."""
    assert error(found["loss"], right["loss"]) < tolerance
    assert error(found["logits"], right["logits"]) < tolerance
    for kind in ("grads", "weights"):
        assert found[kind].keys() == right[kind].keys()
        for name, expected in right[kind].items():
            value = found[kind][name]
            if expected is None or value is None:
                assert value is expected, name
            elif kind == "grads" and name in KEY_BIASES:
                assert value.abs().max() < ZERO
                assert expected.abs().max() < ZERO
            else:
                assert error(value, expected) < tolerance, (kind, name)


@pytest.mark.parametrize("world_size", of_tier([1, 3], [1, 3, 4]))
def test_every_stage_trains_as_one_process(trained: Trained, eager: dict[str, Record], world_size: int) -> None:
    ranks = trained(world_size)
    for name in OPTIMIZERS:
        right = {**eager[name], "loss": eager[name]["losses"]}
        stages = []
        for stage in STAGES:
            first, again = ([records[stage, name][run] for records in ranks] for run in (0, 1))
            found = assembled(first, stage)
            compare(found, right, TOLERANCE)
            assert found["grads"]["unused"] is found["grads"]["frozen"] is None
            for path, weight in found["weights"].items():  # what full_state_dict says is what the shards hold
                assert torch.equal(first[0]["full"][path], weight), path
            assert first[0]["full"].keys() == right["full"].keys()
            assert_same_bits(first, again)
            stages.append(found)
        for other in stages[1:]:
            compare(other, stages[0], STAGES_TOLERANCE)


@pytest.mark.slow
def test_new_processes_repeat_every_bit(trained: Trained) -> None:
    """Other processes hash strings differently; nothing that runs may depend on it."""
    first, again = trained(3), run_ranks(3, train_sharded, (3,), 1)
    for name in OPTIMIZERS:
        assert_same_bits(*([records[3, name][0] for records in ranks] for ranks in (first, again)))
