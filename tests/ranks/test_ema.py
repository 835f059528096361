"""``tz.EMA``: averages of shards are those of one process, in every stage, on disk, and for a moment in the model."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thunder_zero as tz
from tests.harness.checkpoints import stepped
from tests.harness.errors import raised
from tests.harness.models import Small, count_sends, error, fresh, sharded
from tests.harness.ranks import RanksPool
from thunder_zero import cli

pytestmark = pytest.mark.slow
DECAY, STEPS, EVERY = 0.8, 5, 2
INPUTS = torch.arange(12.0).view(4, 3) / 12
Tensors = dict[str, Tensor]


class Two(nn.Module):
    """Two layers of uneven rows, a scalar and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.scale) + self.frozen


def loss(model: nn.Module, step: int, rank: int = 0, ranks: int = 1) -> Tensor:
    return model((INPUTS * (step + 1)).chunk(ranks)[rank]).square().mean()


def one_process(every: int) -> AveragedModel:
    """torch's own averages, of the same steps."""
    module = fresh(Two)
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.SGD(module.parameters(), 0.3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(module, step).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            averaged.update_parameters(module)
    return averaged


def trained(rank: int, world_size: int, policy: Any, *emas: Any) -> tuple[Any, Any]:
    """A model and its EMAs, each of a decay and ``every``, after all steps."""
    model = sharded(fresh(Two), policy)
    averages = [tz.EMA(model, decay, every=every) for decay, every in emas]
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, rank, world_size).backward()
        optimizer.step()
        for ema in averages:
            with count_sends() as sent:
                ema.update()
            assert sent == []
    return model, averages


def weights(model: Any) -> Tensors:
    return {name: value.clone() for name, value in tz.full_state_dict(model).items()}


def averages_of(model: Any, ema: tz.EMA) -> Tensors:
    with ema.applied():
        return weights(model)


def same(found: Tensors, right: Tensors) -> bool:
    return found.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in found.items())


@torch.no_grad()
def bytes_of_forward(model: Any) -> int:
    with count_sends() as sent:
        loss(model, 0)
    return sum(sent)


def averages(rank: int, world_size: int) -> dict[int, Any]:
    """By stage: both EMAs, the output with the first, whether all came back, and bytes of forwards before, in and
    after the block."""
    found = {}
    for stage in range(4):
        model, emas = trained(rank, world_size, stage, (DECAY, 1), (DECAY, EVERY))
        before, shards = weights(model), [param.detach().clone() for param in model.parameters()]
        sent = [bytes_of_forward(model) for _ in range(2)]
        with emas[0].applied(), torch.no_grad():
            sent += [bytes_of_forward(model) for _ in range(2)]
            output = model(INPUTS)
        sent += [bytes_of_forward(model) for _ in range(2)]
        back = same(weights(model), before) and all(map(torch.equal, shards, model.parameters()))
        again = [averages_of(model, ema) for ema in emas]  # as they were: in the block, and after it
        found[stage] = again, output, back, sent
    return found


def test_averages_are_those_of_one_process(ranks_pool: RanksPool) -> None:
    rights = [one_process(1), one_process(EVERY)]
    with torch.no_grad():
        right_output = rights[0](INPUTS)
    for found in ranks_pool.run(2, averages):
        for stage, (both, output, back, sent) in found.items():
            for values, right in zip(both, rights, strict=True):
                for name, value in right.module.state_dict().items():
                    assert error(values[name], value) < 1e-6, (stage, name)
            assert error(output, right_output) < 1e-6, stage
            assert back, stage
            after_step, at_rest, first, second, left, last = sent
            if stage == 1:  # rows of the parameters that have averages, once for each change
                assert after_step > first == left > 0 == at_rest == second == last, sent
            else:
                assert len(set(sent)) == 1, sent


def on_disk(rank: int, world_size: int, folder: Path) -> Tensors:
    model = sharded(fresh(Small), 3)
    ema, slow = tz.EMA(model, DECAY), tz.EMA(model, 0.5, every=EVERY)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for _ in range(STEPS):
        stepped(model, optimizer)
        ema.update()
        slow.update()
    tz.save(folder / "run", model, optimizer, extra={"ema": ema, "slow.er": slow, "step": rank}, wait=False).result()
    found = averages_of(model, ema)
    mine = sharded(fresh(Small), tz.Policy(stage=2, ignored=("row",)))
    own = tz.EMA(mine, DECAY)
    row = mine.get_parameter("row")
    with torch.no_grad():
        row.fill_(rank + 1.0)
        own.update()
        tz.save(folder / "own", mine, extra={"ema": own})
        row.fill_(9.0)
        own.update()
    tz.load(folder / "own", mine, extra={"ema": own})
    with own.applied():
        assert torch.equal(row, torch.full((1, 5), rank + 1.0))
        assert "cannot step SGD: the parameters" in raised(torch.optim.SGD([row], 0.1).step)
    return found


def loaded(rank: int, world_size: int, folder: Path) -> list[Any]:
    found = []
    for stage in (1, 0):
        model = sharded(fresh(Small), stage)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        ema, slow = tz.EMA(model, 0.9), tz.EMA(model, 0.9)
        told = tz.load(folder / "run", model, extra={"ema": ema, "slow.er": slow})
        assert "ema" not in told.of_rank[0]
        assert told.of_rank[1]["step"] == 1
        averages = averages_of(model, ema)
        found.append((averages, ema.counts.state_dict(), slow.counts.state_dict(), weights(model)))
        other = tz.EMA(model, 0.9)
        model.get_parameter("frozen").requires_grad_(True)
        more = tz.EMA(model, 0.9)
        before = weights(model)
        assert "has no EMA 'other'" in raised(lambda: tz.load(folder / "run", model, extra={"other": other}))  # noqa: B023
        sentence = raised(lambda: tz.load(folder / "run", model, extra={"ema": more}))  # noqa: B023
        assert "averages other parameters than this one ('ema.ema.model.frozen')" in sentence, sentence
        another = sharded(fresh(Small), 0)
        told_by_save = raised(lambda: tz.save(folder / "no", another, extra={"ema": more}))  # noqa: B023
        assert "the extra 'ema' is an EMA of model" in told_by_save, told_by_save
        assert same(weights(model), before)
    return found


def test_averages_on_disk_are_for_any_number_of_ranks(ranks_pool: RanksPool, tmp_path: Path) -> None:
    right, _ = ranks_pool.run(2, on_disk, tmp_path)
    for found in ranks_pool.run(3, loaded, tmp_path):
        for averages, counts, slow, now in found:
            assert same(averages, right)
            assert counts == {"calls": STEPS, "averaged": STEPS}
            assert slow == {"calls": STEPS, "averaged": STEPS // EVERY}
            assert not same(now, right)
    tz.consolidate(tmp_path / "run", tmp_path / "ema.safetensors", ema="ema")
    file = load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(value, right[name]) for name, value in file.items())
    assert file.keys() == right.keys() - {"head.weight"}  # tied: once
    assert cli.main(["consolidate", str(tmp_path / "run"), str(tmp_path / "slow.pt"), "--ema", "slow.er"]) == 0
    slow = torch.load(tmp_path / "slow.pt")
    assert same({name: slow[name] for name in ("frozen",)}, {"frozen": right["frozen"]})
    assert not torch.equal(slow["embed.weight"], right["embed.weight"])
    assert "has no EMA 'x'" in raised(lambda: tz.consolidate(tmp_path / "run", tmp_path / "x.pt", ema="x"))


def halves(rank: int, world_size: int) -> tuple[float, bool]:
    """How far a float32 average of half-precision shards moves in small steps; whether the shards came back."""
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
        inside = float(shard.detach()[0, 0])
    return inside, bool((shard == 2.0).all())


def test_an_average_of_half_precision_moves(ranks_pool: RanksPool) -> None:
    for inside, back in ranks_pool.run(2, halves):
        assert abs(inside - (2 - 0.999**100)) < 0.01  # bfloat16
        assert back


def misuse(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    model, (ema, other) = trained(rank, world_size, 2, (DECAY, 1), (DECAY, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    optimizer.zero_grad()
    full = tz.full_state_dict(model)
    found = {
        "plain": raised(lambda: tz.EMA(nn.Linear(2, 2))),
        "decay": raised(lambda: tz.EMA(model, 1.0)),
        "every": raised(lambda: tz.EMA(model, 0.9, every=0)),
        "frozen model": raised(lambda: tz.EMA(sharded(fresh(nn.Linear, 2, 3).requires_grad_(False), 1))),
        "state_dict": raised(lambda: ema.state_dict()),
        "no attribute": raised(lambda: ema.shadow),
        "decay later": raised(lambda: setattr(ema, "decay", 1.5)),
        "copied": raised(lambda: deepcopy(ema)),
        "none yet": raised(lambda: enter(tz.EMA(model, 0.9, every=3))),
        "in full_parameters": raised(lambda: inside(tz.full_parameters(model), ema)),
    }
    with ema.applied():
        before = [param.detach().clone() for param in model.parameters()]
        loss(model, 0, rank, world_size).backward()
        found |= {
            "nested": raised(lambda: enter(other)),
            "update": raised(other.update),
            "new": raised(lambda: tz.EMA(model)),
            "step": raised(optimizer.step),
            "save": raised(lambda: tz.save(folder / "no", model)),
            "load": raised(lambda: tz.load(folder / "no", model)),
            "state dict": raised(lambda: load_state_dict(model, full)),
            "original": raised(lambda: model.load_original_state_dict(full)),
            "writeback": raised(lambda: inside(tz.full_parameters(model, writeback=True))),
        }
        with tz.full_parameters(model) as module:
            found["exported"] = str(torch.equal(module.scale, tz.full_state_dict(model)["scale"]))
        assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    with model.no_sync():
        loss(model, 0, rank, world_size).backward()
    found["accumulation"] = raised(lambda: enter(ema))
    model.zero_grad()
    if rank == 0:  # a rank forgets an update
        ema.update()
    found["ranks differ"] = raised(lambda: enter(ema))
    found["saved by ranks that differ"] = raised(lambda: tz.save(folder / "no", model, extra={"ema": ema}))
    model.get_parameter("frozen").requires_grad_(True)
    found["thawed"] = raised(ema.update)
    before_error = weights(model)
    found["an error in the block"] = raised(lambda: inside(other.applied(), None))
    assert same(weights(model), before_error)
    return found


def load_state_dict(model: Any, full: Tensors) -> None:
    from thunder_zero.state_dict import set_model_state_dict

    set_model_state_dict(model, full)


def enter(ema: tz.EMA) -> None:
    with ema.applied():
        pass


def inside(context: Any, ema: tz.EMA | None = None) -> None:
    with context:
        if ema is None:
            raise KeyError("in the block")
        enter(ema)


AVERAGES = "are averages inside of EMA.applied; leave that block first"
WORDS = {
    "plain": "TypeError: expected a module jitted with ZeroTransform, got Linear",
    "decay": "ValueError: decay is 1.0; give a number, 0 or more and less than 1",
    "every": "ValueError: every is 0; give a number of updates, 1 or more",
    "frozen model": "requires gradients; make an EMA of a model that trains",
    "state_dict": "EMA has no 'state_dict', as torch's AveragedModel has: it averages rows of a model",
    "no attribute": "EMA has no attribute 'shadow'",
    "decay later": "ValueError: decay is 1.5; give a number, 0 or more and less than 1",
    "copied": "an EMA of model 0 (Two) cannot be copied or pickled, as it belongs to a model, and has this rank's rows",
    "none yet": "has no average yet, after 0 updates with every=3; call update() after the optimizer's steps first",
    "in full_parameters": "is inside full_parameters",
    "nested": f"cannot enter EMA.applied: the parameters of model 0 (Two) {AVERAGES}",
    "update": f"cannot update an EMA: the parameters of model 0 (Two) {AVERAGES}",
    "new": f"cannot make an EMA: the parameters of model 0 (Two) {AVERAGES}",
    "step": f"cannot step SGD: the parameters of model 0 (Two) {AVERAGES}",
    "save": f"cannot save: the parameters of model 0 (Two) {AVERAGES}",
    "load": f"cannot load: the parameters of model 0 (Two) {AVERAGES}",
    "state dict": f"cannot load a state dict: the parameters of model 0 (Two) {AVERAGES}",
    "original": f"cannot load a state dict: the parameters of model 0 (Two) {AVERAGES}",
    "writeback": f"cannot write back: the parameters of model 0 (Two) {AVERAGES}",
    "exported": "True",
    "accumulation": "cannot enter EMA.applied: no_sync still holds unreduced gradients of parameter",
    "ranks differ": "rank 0 has decay 0.8, every 1, 6 updates, rank 1 has decay 0.8, every 1, 5 updates; make the same",
    "saved by ranks that differ": "the extra 'ema', an EMA, of model 0 (Two) differs between ranks",
    "thawed": "parameter 'frozen' of model 0 (Two) required no gradients when the EMA was made",
    "an error in the block": "KeyError",
}


def test_misuse_gets_a_sentence(ranks_pool: RanksPool, tmp_path: Path) -> None:
    first, second = ranks_pool.run(2, misuse, tmp_path)
    assert first == second
    assert first.keys() == WORDS.keys()
    for name, told in first.items():
        assert WORDS[name] in re.sub(r"model \d+", "model 0", told), (name, told)
