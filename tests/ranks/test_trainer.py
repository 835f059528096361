"""ZeroTrainerStrategy in Lightning's Trainer: clipping, accumulation, precision, checkpoints, manual steps, refusals.

The Trainer runs as if torchrun had started it, in the ranks and the process group of the harness. Only the ranks import
Lightning.
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
from tests.harness.ranks import RanksPool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning"),
]

LIMIT = 0.3  # of the gradients' norm, below most
ROWS, BATCH, EPOCHS = 32, 4, 3  # in all; of one rank and micro-batch; of the whole training
Weights = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head.forward(torch.tanh(self.hidden.forward(x)))


def rows() -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))


def loss_of(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def trained_plain(epochs: int, rows_of_a_step: int, limit: float) -> Weights:
    """What one process trains with plain torch."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(epochs):
        for x in rows().split(rows_of_a_step):
            optimizer.zero_grad()
            loss_of(net, x).backward()
            nn.utils.clip_grad_norm_(net.parameters(), limit)
            optimizer.step()
    return {name: value.detach() for name, value in net.state_dict().items()}


def model_for(*, manual: bool = False, optimizer: type[Any] = torch.optim.AdamW) -> Any:
    """A LightningModule; with manual optimization it steps by itself."""
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
                stepped: Any = self.optimizers()
                stepped.zero_grad()
                self.manual_backward(loss)
                stepped.step()
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.log("val", loss_of(self.net, batch[0]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = optimizer(self.parameters(), lr=1e-2)
            return made

    return Model()


def loader() -> Any:
    data = torch.utils.data.TensorDataset(rows())
    sampler: Any = torch.utils.data.DistributedSampler(data, shuffle=False)  # the Trainer's own shuffles
    return torch.utils.data.DataLoader(data, BATCH, sampler=sampler)


def trainer_on(rank: int, world_size: int, stage: int = 3, frontend: str = "thunder", **options: Any) -> Any:
    """As torchrun would start it; Lightning's environment reads these variables when it is asked."""
    from lightning.pytorch import Trainer

    from thunder_zero.lightning import ZeroTrainerStrategy

    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "LOCAL_WORLD_SIZE": f"{world_size}"}
    options = {"max_epochs": EPOCHS, "enable_progress_bar": False, "enable_checkpointing": False} | options
    strategy = ZeroTrainerStrategy(stage=stage, frontend=frontend)
    return Trainer(accelerator="cpu", devices=world_size, strategy=strategy, logger=False, **options)


def fitted(trainer: Any, model: Any, **options: Any) -> Weights:
    trainer.fit(model, loader(), loader(), **options)
    return tz.full_state_dict(trainer.strategy.sharded)


def train_and_refuse(rank: int, world_size: int, folder: Path) -> dict[str, Weights]:
    """The weights that each way ends in; what does not work raises a sentence."""
    from lightning.pytorch.callbacks import WeightAveraging

    whole: dict[str, Any] = {"gradient_clip_val": LIMIT, "accumulate_grad_batches": 2}
    found, model, first = dict[str, Weights](), model_for(), trainer_on(rank, world_size, max_epochs=2, **whole)
    fitted(first, model)
    first.save_checkpoint(folder / "saved.ckpt")
    before = first.callback_metrics["val"].item()
    assert first.validate(model, loader(), verbose=False)[0]["val"] == pytest.approx(before)
    resumed, path = trainer_on(rank, world_size, stage=1, frontend="dynamo", **whole), folder / "saved.ckpt"
    found["resumed in another stage"] = fitted(resumed, model_for(), ckpt_path=path, weights_only=False)
    found["in mixed precision"] = fitted(trainer_on(rank, world_size, 2, precision="bf16-mixed", **whole), model_for())
    found["manual"] = fitted(trainer_on(rank, world_size, frontend="dynamo"), model_for(manual=True))

    def refused(words: str, model: Any, **options: Any) -> None:
        fails(lambda: fitted(trainer_on(rank, world_size, **options), model), *words.split(": ", 1))

    two = model_for()
    two.more = nn.Linear(1, 1)
    refused("ValueError: Model has parameters in net, more, and the strategy shards one submodule", two)
    hooked = model_for()
    hooked.net.register_forward_hook(print)
    refused("ValueError: Model.net has forward hooks", hooked)
    refused("ValueError: does not support sync_batchnorm=True", model_for(), sync_batchnorm=True)
    averaged: Any = {"callbacks": [WeightAveraging()]}
    refused("ValueError: callback WeightAveraging, which copies full weights; leave it out", model_for(), **averaged)
    refused("TypeError: Model.net is jitted already; leave the plain module", model_of_a_sharded_net())
    twice = model_for(optimizer=Twice)
    refused("RuntimeError: Twice evaluates the loss more than once in a step", twice)
    return found


def model_of_a_sharded_net() -> Any:
    import thunder

    model = model_for()
    model.net = thunder.jit(Net(), transforms=[tz.ZeroTransform(3)])
    return model


class Twice(torch.optim.SGD):
    """Evaluates its loss as LBFGS does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_the_trainer_trains_as_one_process(ranks_pool: RanksPool, tmp_path: Path) -> None:
    right = trained_plain(EPOCHS, 4 * BATCH, LIMIT)
    with_manual_steps = trained_plain(EPOCHS, 2 * BATCH, float("inf"))
    for found in ranks_pool.run(2, train_and_refuse, tmp_path, timeout=290):
        torch.testing.assert_close(found["resumed in another stage"], right, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["in mixed precision"], right, rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(found["manual"], with_manual_steps, rtol=1e-5, atol=1e-6)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)
    net = Net()
    net.load_state_dict({name.removeprefix("net."): value for name, value in saved["state_dict"].items()})
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.load_state_dict(saved["optimizer_states"][0])
    assert all(state["exp_avg"].shape == param.shape for param, state in optimizer.state.items())
