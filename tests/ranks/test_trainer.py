"""With ZeroTrainerStrategy, Lightning's Trainer trains as one process, saves and resumes, and refuses wrong uses.

The Trainer runs in the harness's ranks as if torchrun had started it. Only the ranks import Lightning.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import thunder_zero as tz
from tests.harness.errors import fails
from tests.harness.ranks import LONG, RanksPool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning"),
]

LIMIT = 0.3  # for the gradients' norm, which is mostly larger
ROWS, BATCH, EPOCHS = 32, 4, 3  # rows in all; rows of one micro-batch on one rank
Weights = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head.forward(torch.tanh(self.hidden.forward(x)))


def make_rows() -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))


def loss_of(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def train_plain(epochs: int, rows_of_a_step: int, limit: float) -> Weights:
    """Train one process with plain torch and return the weights."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(epochs):
        for x in make_rows().split(rows_of_a_step):
            optimizer.zero_grad()
            loss_of(net, x).backward()
            nn.utils.clip_grad_norm_(net.parameters(), limit)
            optimizer.step()
    return {name: value.detach() for name, value in net.state_dict().items()}


def make_model(*, manual: bool = False, optimizer: type[Any] = torch.optim.AdamW) -> Any:
    """Build a LightningModule; if ``manual``, it uses manual optimization."""
    from lightning.pytorch import LightningModule

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.automatic_optimization = not manual

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            assert all(isinstance(param, DTensor) for param in self.parameters())
            loss = loss_of(self.net, batch[0])
            self.log("loss", loss, sync_dist=True)
            if manual:
                its_optimizer: Any = self.optimizers()
                its_optimizer.zero_grad()
                self.manual_backward(loss)
                its_optimizer.step()
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.log("val", loss_of(self.net, batch[0]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            result: torch.optim.Optimizer = optimizer(self.parameters(), lr=1e-2)
            return result

    return Model()


def make_loader() -> Any:
    data = torch.utils.data.TensorDataset(make_rows())
    sampler: Any = torch.utils.data.DistributedSampler(data, shuffle=False)  # the Trainer's default shuffles
    return torch.utils.data.DataLoader(data, BATCH, sampler=sampler)


def make_trainer(rank: int, world_size: int, stage: int = 3, **options: Any) -> Any:
    """Build a Trainer; Lightning reads torchrun's environment variables, which are set here."""
    from lightning.pytorch import Trainer

    from thunder_zero.lightning import ZeroTrainerStrategy

    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "LOCAL_WORLD_SIZE": f"{world_size}"}
    options = {"max_epochs": EPOCHS, "enable_progress_bar": False, "enable_checkpointing": False} | options
    strategy = ZeroTrainerStrategy(stage=stage)
    return Trainer(accelerator="cpu", devices=world_size, strategy=strategy, logger=False, **options)


def fit(trainer: Any, model: Any, **options: Any) -> Weights:
    trainer.fit(model, make_loader(), make_loader(), **options)
    return tz.full_state_dict(trainer.strategy.sharded)


def train_and_refuse(rank: int, world_size: int, folder: Path) -> dict[str, Weights]:
    """Train in several ways and return their weights; check that wrong uses are refused."""
    from lightning.pytorch.callbacks import WeightAveraging

    accumulating: dict[str, Any] = {"gradient_clip_val": LIMIT, "accumulate_grad_batches": 2}
    weights, model = dict[str, Weights](), make_model()
    trainer = make_trainer(rank, world_size, max_epochs=2, **accumulating)
    fit(trainer, model)
    trainer.save_checkpoint(folder / "saved.ckpt")
    before = trainer.callback_metrics["val"].item()
    assert trainer.validate(model, make_loader(), verbose=False)[0]["val"] == pytest.approx(before)
    resumed, path = make_trainer(rank, world_size, stage=1, **accumulating), folder / "saved.ckpt"
    weights["resumed in another stage"] = fit(resumed, make_model(), ckpt_path=path, weights_only=False)
    mixed = make_trainer(rank, world_size, 2, precision="bf16-mixed", **accumulating)
    weights["in mixed precision"] = fit(mixed, make_model())
    weights["manual"] = fit(make_trainer(rank, world_size), make_model(manual=True))

    def refuse(words: str, model: Any, **options: Any) -> None:
        fails(lambda: fit(make_trainer(rank, world_size, **options), model), *words.split(": ", 1))

    two_submodules = make_model()
    two_submodules.more = nn.Linear(1, 1)
    refuse("ValueError: Model has parameters in net, more, and the strategy shards one submodule", two_submodules)
    hooked = make_model()
    hooked.net.register_forward_hook(print)
    refuse("ValueError: Model.net has forward hooks", hooked)
    refuse("ValueError: does not support sync_batchnorm=True", make_model(), sync_batchnorm=True)
    averaged: Any = {"callbacks": [WeightAveraging()]}
    refuse("ValueError: callback WeightAveraging, which copies full weights; leave it out", make_model(), **averaged)
    refuse("TypeError: Model.net is jitted already; leave the plain module", make_model_of_a_sharded_net())
    twice = make_model(optimizer=EvaluatesTwice)
    refuse("RuntimeError: EvaluatesTwice evaluates the loss more than once in a step", twice)
    return weights


def make_model_of_a_sharded_net() -> Any:
    import thunder

    model = make_model()
    model.net = thunder.jit(Net(), transforms=[tz.ZeroTransform(3)])
    return model


class EvaluatesTwice(torch.optim.SGD):
    """An optimizer that evaluates the loss more than once, as LBFGS does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_the_trainer_trains_as_one_process(ranks_pool: RanksPool, tmp_path: Path) -> None:
    expected = train_plain(EPOCHS, 4 * BATCH, LIMIT)
    with_manual_steps = train_plain(EPOCHS, 2 * BATCH, float("inf"))
    for weights in ranks_pool.run(2, train_and_refuse, tmp_path, timeout=LONG):
        torch.testing.assert_close(weights["resumed in another stage"], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights["in mixed precision"], expected, rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(weights["manual"], with_manual_steps, rtol=1e-5, atol=1e-6)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)
    net = Net()
    net.load_state_dict({name.removeprefix("net."): value for name, value in saved["state_dict"].items()})
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.load_state_dict(saved["optimizer_states"][0])
    assert all(state["exp_avg"].shape == param.shape for param, state in optimizer.state.items())
