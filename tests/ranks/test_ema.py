"""``tz.EMA`` has the averages of one process in every stage, in checkpoints, and inside of ``applied``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thunder_zero as tz
from tests.harness.checkpoints import differing, take_step
from tests.harness.errors import error_of, fails
from tests.harness.models import Small, count_sends, fresh, relative_error, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow
from thunder_zero.sharded.dtensors import local
from thunder_zero.tools import cli

DECAY, STEPS, EVERY = 0.8, 5, 2
INPUTS = torch.arange(12).view(4, 3) % 9


def train(model: nn.Module, update: Callable[[int], object], rank: int = 0, world_size: int = 1) -> None:
    """Take the steps, and call ``update`` after each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(((INPUTS + step) % 9).chunk(world_size)[rank]).square().mean().backward()
        optimizer.step()
        update(step)


def weights(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tz.full_state_dict(model).items()}


def averages_of(model: Any, ema: tz.EMA) -> dict[str, Tensor]:
    with ema.applied():
        return weights(model)


# Values


@torch.no_grad()
def bytes_of_forward(model: Any) -> int:
    with count_sends() as sent:
        model(INPUTS)
    return sum(sent)


def update_averages(rank: int, world_size: int, stage: int) -> None:
    """Average after every step and after every second step; check values, and that updates send nothing."""
    plain, model = fresh(Small), sharded(fresh(Small), stage)
    references = [AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY)) for _ in range(2)]
    train(plain, lambda step: [ema.update_parameters(plain) for ema in references[: 1 + (step % EVERY == 0)]])
    emas = [tz.EMA(model, DECAY, every=every) for every in (1, EVERY)]

    def update(step: int) -> None:
        with count_sends() as sent:
            for ema in emas:
                ema.update()
        assert sent == [], sent

    train(model, update, rank, world_size)
    before, shards = weights(model), [local(param).detach().clone() for param in model.parameters()]
    forwards = [bytes_of_forward(model) for _ in range(2)]
    with emas[0].applied(), torch.no_grad():
        forwards += [bytes_of_forward(model) for _ in range(2)]
        output = model(INPUTS)
        expected_output = references[0](INPUTS)
    forwards += [bytes_of_forward(model) for _ in range(2)]
    assert relative_error(output, expected_output) < 1e-6, (output, expected_output)
    assert differing(weights(model), before) == []
    assert all(map(torch.equal, shards, map(local, model.parameters()))), "shards did not come back"
    for ema, reference in zip(emas, references, strict=True):  # also in a second block
        averages = averages_of(model, ema)
        for name, value in reference.module.state_dict().items():
            assert relative_error(averages[name], value) < 1e-6, name
    after_step, at_rest, first, second, after_block, last = forwards
    if stage == 1:  # rows of averaged parameters, once after each change
        assert after_step > first == after_block > 0 == at_rest == second == last, forwards
    else:
        assert len(set(forwards)) == 1, forwards


@pytest.mark.parametrize("stage", [1, *slow(3), *deep(0, 2)])
def test_averages_are_those_of_one_process(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, update_averages, stage)


def average_half_precision(rank: int, world_size: int) -> None:
    """Check that a float32 average of 16-bit shards moves in small steps, and that the shards come back."""
    model = sharded(fresh(nn.Linear, 4, 3).bfloat16(), 3)
    shard = model.get_parameter("weight")
    ema = tz.EMA(model, 0.999)
    with torch.no_grad():
        shard.fill_(1.0)
        ema.update()
        shard.fill_(2.0)
    for _ in range(100):
        ema.update()
    with ema.applied():
        inside = float(local(shard)[0, 0])
    assert abs(inside - (2 - 0.999**100)) < 0.01, inside  # bfloat16
    assert (local(shard) == 2.0).all(), shard


def test_an_average_of_half_precision_moves(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, average_half_precision)


# Checkpoints


def save_averages(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    """Save two averages of all parameters, and averages of an ignored parameter, which ranks do not share."""
    model = sharded(fresh(Small), 3)
    ema, slower = tz.EMA(model, DECAY), tz.EMA(model, 0.5, every=EVERY)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for _ in range(STEPS):
        take_step(model, optimizer)
        ema.update()
        slower.update()
    extra = {"ema": ema, "slow.er": slower, "step": rank}
    tz.save(folder / "run", model, optimizer, extra=extra, wait=False).result()
    ignoring = sharded(fresh(Small), tz.Policy(stage=2, ignored=("row",)))
    ignoring_ema, row = tz.EMA(ignoring, DECAY), ignoring.get_parameter("row")
    with torch.no_grad():
        row.fill_(rank + 1.0)
        ignoring_ema.update()
        tz.save(folder / "own", ignoring, extra={"ema": ignoring_ema})
        row.fill_(9.0)
        ignoring_ema.update()
    tz.load(folder / "own", ignoring, extra={"ema": ignoring_ema})
    with ignoring_ema.applied():
        assert torch.equal(row, torch.full((1, 5), rank + 1.0)), row
        fails(torch.optim.SGD([row], 0.1).step, "cannot step SGD: the parameters")
    return averages_of(model, ema)


def load_averages(rank: int, world_size: int, folder: Path, expected: dict[str, Tensor]) -> None:
    model = sharded(fresh(Small), 1)
    ema, slower = tz.EMA(model, 0.9), tz.EMA(model, 0.9)
    extras = tz.load(folder / "run", model, extra={"ema": ema, "slow.er": slower})
    assert ("ema" in extras.of_rank[0], extras.of_rank[1]["step"]) == (False, 1), extras
    assert differing(averages_of(model, ema), expected) == []
    assert ema.counts.state_dict() == {"calls": STEPS, "averaged": STEPS}
    assert slower.counts.state_dict() == {"calls": STEPS, "averaged": STEPS // EVERY}
    before = weights(model)
    assert differing(before, expected) != []
    model.get_parameter("frozen").requires_grad_(True)
    more, another = tz.EMA(model, 0.9), sharded(fresh(Small), 0)
    fails(lambda: tz.load(folder / "run", model, extra={"other": ema}), "has no EMA 'other'")
    unlike = "the checkpoint has another EMA 'ema' (missing: 'ema.ema.model.frozen'; unexpected: none); build"
    fails(lambda: tz.load(folder / "run", model, extra={"ema": more}), unlike)
    fails(lambda: tz.save(folder / "no", another, extra={"ema": more}), "the extra 'ema' is an EMA of model")
    assert differing(weights(model), before) == []


def test_saved_averages_load_on_any_number_of_ranks(ranks_pool: RanksPool, tmp_path: Path) -> None:
    expected, _ = ranks_pool.run(2, save_averages, tmp_path)
    ranks_pool.run(3, load_averages, tmp_path, expected)
    tz.tools.consolidate(tmp_path / "run", tmp_path / "ema.safetensors", ema="ema")
    tied = {"head.weight": expected["head.weight"]}  # once in a file
    assert differing(load_file(tmp_path / "ema.safetensors") | tied, expected) == []
    assert cli.main(["consolidate", str(tmp_path / "run"), str(tmp_path / "slow.safetensors"), "--ema", "slow.er"]) == 0
    slower = load_file(tmp_path / "slow.safetensors")
    assert torch.equal(slower["frozen"], expected["frozen"])
    assert not torch.equal(slower["embed.weight"], expected["embed.weight"])
    fails(lambda: tz.tools.consolidate(tmp_path / "run", tmp_path / "x.safetensors", ema="x"), "has no EMA 'x'")


# Refusals


def enter(context: Any, then: Callable[[], object] = lambda: None) -> None:
    with context:
        then()


def raise_key_error() -> None:
    raise KeyError("in the block")


def refuse_construction(model: Any, ema: tz.EMA) -> None:
    frozen = sharded(fresh(nn.Linear, 2, 3).requires_grad_(False), 1)
    for call, words in (
        (lambda: tz.EMA(nn.Linear(2, 2)), "TypeError: expected a sharded model, got Linear"),
        (lambda: tz.EMA(model, 1.0), "ValueError: decay is 1.0; give a number, 0 or more and less than 1"),
        (lambda: setattr(ema, "decay", 1.5), "ValueError: decay is 1.5; give a number, 0 or more and less than 1"),
        (lambda: tz.EMA(model, 0.9, every=0), "ValueError: every is 0; give a number of updates, 1 or more"),
        (lambda: tz.EMA(frozen), "requires gradients; make an EMA of a model that trains"),
        (lambda: enter(tz.EMA(model, every=3).applied()), "has no average yet, after 0 updates with every=3; call"),
        (lambda: enter(tz.full_parameters(model), lambda: enter(ema.applied())), "is inside full_parameters"),
    ):
        fails(call, words)


def refuse_inside_applied(model: Any, ema: tz.EMA, optimizer: Any, folder: Path) -> None:
    """Check that calls that would lose the weights are refused while averages replace them."""
    full: dict[str, Any] = tz.full_state_dict(model)
    with ema.applied():
        before = [local(param).detach().clone() for param in model.parameters()]
        model(INPUTS).square().mean().backward()
        for call, action in (
            (lambda: enter(ema.applied()), "enter EMA.applied"),
            (ema.update, "update an EMA"),
            (lambda: tz.EMA(model), "make an EMA"),
            (optimizer.step, "step SGD"),
            (lambda: tz.save(folder / "no", model), "save"),
            (lambda: tz.load(folder / "no", model), "load"),
            (
                lambda: set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True)),
                "load a state dict",
            ),
            (lambda: model.load_original_state_dict(full), "load a state dict"),
            (lambda: enter(tz.full_parameters(model, writeback=True)), "write back"),
        ):
            fails(call, f"cannot {action}: the parameters of model", "are averages inside of EMA.applied; leave that")
        with tz.full_parameters(model) as module:
            assert torch.equal(module.scale, tz.full_state_dict(model)["scale"])
        assert all(map(torch.equal, before, map(local, model.parameters()))), "a refusal changed a parameter"
    optimizer.zero_grad()


def misuse_averages(rank: int, world_size: int, folder: Path) -> None:
    model = sharded(fresh(Small), 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    ema, second = tz.EMA(model, DECAY), tz.EMA(model, DECAY)
    for average in (ema, second):
        average.update()
    refuse_construction(model, ema)
    refuse_inside_applied(model, ema, optimizer, folder)
    with model.no_sync():
        model(INPUTS).square().mean().backward()
    fails(
        lambda: enter(ema.applied()), "cannot enter EMA.applied: no_sync still holds unreduced gradients of parameter"
    )
    model.zero_grad()
    if rank == 0:
        ema.update()  # which rank 1 forgets
    words = "rank 0 has decay 0.8, every 1, 2 updates, rank 1 has decay 0.8, every 1, 1 updates; make the same"
    fails(lambda: enter(ema.applied()), words)
    words = "(Small) differs between ranks"
    fails(lambda: tz.save(folder / "no", model, extra={"ema": ema}), "the extra 'ema', an EMA, of model ", words)
    before = weights(model)
    model.get_parameter("frozen").requires_grad_(True)
    fails(ema.update, "parameter 'frozen' of model ", "(Small) required no gradients when the EMA was made")
    assert "KeyError" in error_of(lambda: enter(second.applied(), raise_key_error))
    assert differing(weights(model), before) == []


def test_misuse_gets_a_sentence_and_changes_nothing(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, misuse_averages, tmp_path)
