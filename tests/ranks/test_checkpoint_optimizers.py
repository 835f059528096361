"""Models and optimizers of every kind come back from a checkpoint exactly, or are refused as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import thunder_zero as tz
from tests.harness.checkpoints import adamw, differing, state_of, take_step
from tests.harness.errors import fails
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool
from thunder_zero.checkpoint import folder, load
from thunder_zero.checkpoint.contents import pickle_value
from thunder_zero.checkpoint.dcp_write import WritePlanner, write_planned
from thunder_zero.checkpoint.save import finish_checkpoint


class Momentum(torch.optim.Optimizer):
    """An optimizer that keeps a float32 sum of gradients for any dtype, and a count that is no tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"scale": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            state = self.state[param]
            state["sum"] = state.get("sum", 0) + param.grad.float() / 3
            state["count"] = state.get("count", 0) + 1


class Picky(nn.Module):
    """A module whose extra state is a tensor, which it refuses if its first value is ``refused``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.refused = nn.Linear(3, 3), torch.ones(2), -1.0
        self._register_state_dict_hook(add_version)  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> Tensor:
        return self.scale

    def set_extra_state(self, state: Tensor) -> None:
        if state[0] == self.refused:
            raise ValueError(f"no scale of {self.refused}")
        self.scale = state


def add_version(module: nn.Module, state_dict: dict[str, Any], prefix: str, local: object) -> None:
    state_dict["version"] = 3


def weights(model: Any) -> dict[str, Tensor]:
    """Return every tensor in full; check and drop the entry that a hook adds."""
    full = tz.full_state_dict(model)
    assert full.pop("version") == 3
    return full


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def load_float32(rank: int, world_size: int, root: Path) -> None:
    """Check that states of bfloat16 parameters stay float32 after a load, and after a refused load."""
    model = sharded(fresh(Mlp).bfloat16(), tz.Policy(stage=3))
    optimizer = Momentum(model.parameters())
    take_step(model, optimizer)
    stubborn = torch.amp.GradScaler("cpu")
    saved, extra = state_of(model, optimizer), {"stubborn": stubborn}
    tz.save(root / "float32", model, optimizer, extra=extra)
    take_step(model, optimizer)
    now = state_of(model, optimizer)
    assert differing(now, saved) != []
    with mock.patch.object(stubborn, "load_state_dict", side_effect=ValueError("no such scale")):
        fails(lambda: tz.load(root / "float32", model, optimizer, extra=extra), "no such scale")
    assert differing(state_of(model, optimizer), now) == []
    tz.load(root / "float32", model, optimizer)
    assert differing(state_of(model, optimizer), saved) == []
    assert {state["sum"].dtype for state in optimizer.state.values()} == {torch.float32}


def load_several(rank: int, world_size: int, root: Path) -> None:
    def build(lr: float) -> tuple[Any, list[torch.optim.Optimizer]]:
        model = sharded(fresh(Mlp), 2)
        weights, biases = ([p for name, p in model.named_parameters() if kind in name] for kind in ("weight", "bias"))
        return model, [torch.optim.SGD(weights, lr, momentum=0.9), torch.optim.AdamW(biases, lr)]

    model, (first, second) = build(0.1)
    take_step(model, first)
    take_step(model, second)
    tz.save(root / "several", model, (first, second))
    loaded, (loaded_first, loaded_second) = build(0.7)
    loaded_first.param_groups[0]["name"] = "weights"
    torch.optim.lr_scheduler.ExponentialLR(loaded_second, 0.9)  # keeps initial_lr in the groups
    tz.load(root / "several", loaded, [loaded_first, loaded_second])
    assert differing(state_of(loaded, loaded_first), state_of(model, first)) == []
    assert differing(state_of(loaded, loaded_second), state_of(model, second)) == []
    group, second_group = loaded_first.param_groups[0], loaded_second.param_groups[0]
    assert (group["lr"], second_group["lr"]) == (0.1, 0.1)
    assert (group["name"], second_group["initial_lr"]) == ("weights", 0.7)  # neither was saved
    in_another_order = partial(tz.load, root / "several", loaded, [loaded_second, loaded_first])
    fails(in_another_order, "parameter group 0 of the checkpoint's")


def load_extra(rank: int, world_size: int, root: Path) -> None:
    """Load an extra state that rank 1 refuses, and then accepts."""
    model = sharded(fresh(Picky), 3)
    model._model.scale = torch.tensor([4.0, 5.0])
    tz.save(root / "state", model)
    full = weights(model)
    model._model.scale = torch.tensor([6.0, 7.0])
    with torch.no_grad():
        model.get_parameter("layer.weight").add_(1)
    before = weights(model)
    model._model.refused = 4.0 if rank == 1 else -1.0
    fails(lambda: tz.load(root / "state", model), "no scale of 4.0")
    assert differing(weights(model), before) == []
    model._model.refused = -1.0
    tz.load(root / "state", model)
    assert differing(weights(model), full) == []


def load_tied(rank: int, world_size: int, root: Path) -> None:
    untied, tied = sharded(fresh(Tied, False), 3), sharded(fresh(Tied, True), 3)
    tz.save(root / "apart", untied)
    unlike = "'model.embed.weight' and 'model.head.weight' are tied here, and differ in it; build the model"
    fails(lambda: tz.load(root / "apart", tied), unlike)
    with torch.no_grad():
        untied.get_parameter("head.weight").copy_(untied.get_parameter("embed.weight"))
    tz.save(root / "equal", untied)
    tz.load(root / "equal", tied)


def load_factored(rank: int, world_size: int, root: Path) -> None:
    """Save Adafactor's states, which have a value for each row and column: whole parameters load, rows do not."""
    model, again, rows = (sharded(fresh(Mlp), stage) for stage in (0, 0, 3))
    optimizer, its, of_rows = (torch.optim.Adafactor(module.parameters()) for module in (model, again, rows))
    take_step(model, optimizer)
    tz.save(root / "factored", model, optimizer)
    tz.load(root / "factored", again, its)
    assert differing(state_of(again, its), state_of(model, optimizer)) == []
    fails(lambda: tz.load(root / "factored", rows, of_rows), "cannot be cut into rows: its shape is")


def load_wrapped(rank: int, world_size: int, root: Path) -> None:
    """Check that names in a checkpoint leave out torch's wrapper for activation checkpointing."""
    module = fresh(Mlp)
    module.layers[1] = checkpoint_wrapper(module.layers[1])
    model, plain = sharded(module, 3), sharded(fresh(Mlp), 2)
    optimizer, its_optimizer = adamw(model), adamw(plain, lr=1.0)
    take_step(model, optimizer)
    tz.save(root / "wrapped", model, optimizer)
    tz.load(root / "wrapped", plain, its_optimizer)
    full = tz.full_state_dict(model)
    assert list(full) == list(fresh(Mlp).state_dict()), full.keys()
    assert differing(tz.full_state_dict(plain), full) == []
    assert (its_optimizer.param_groups[0]["lr"], len(its_optimizer.state)) == (0.05, 6)
    tz.load(root / "wrapped", model, optimizer)


def save_unsharded(rank: int, world_size: int, root: Path) -> None:
    """Save inside of full_parameters, where shards are saved, too."""
    model, loaded = sharded(fresh(Mlp), 3), sharded(Mlp(), 1)
    optimizer, its_optimizer = adamw(model), adamw(loaded)
    take_step(model, optimizer)
    with tz.full_parameters(model):
        tz.save(root / "unsharded", model, optimizer)
    tz.load(root / "unsharded", loaded, its_optimizer)
    assert differing(state_of(loaded, its_optimizer), state_of(model, optimizer)) == []


def load_replaced(rank: int, world_size: int, root: Path) -> None:
    """Load while another job saves, so that ranks could find different checkpoints, or a part of one."""
    model = sharded(fresh(Mlp), 3)
    ones = {name: torch.ones_like(value) for name, value in fresh(Mlp).state_dict().items()}
    for step in (1, 2):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        tz.save(root / f"step-{step}", model)
    with mock.patch.object(folder, "locate", return_value=root / f"step-{1 + rank}"):
        tz.load(root / "latest", model)
    assert differing(tz.full_state_dict(model), ones) == []
    read_checkpoint = load.read_checkpoint

    def read_slowly(path: Path, *args: Any) -> Any:
        dist.barrier()
        if rank == 0:  # as another job would, under the same name
            folder.prepare(path)
            part = write_planned(folder.staging_of(path), 0, WritePlanner({("rank0", "extra"): pickle_value("it", {})}))
            finish_checkpoint(path, [part], None)
        dist.barrier()
        return read_checkpoint(path, *args)

    with mock.patch.object(load, "read_checkpoint", read_slowly):
        fails(lambda: tz.load(root / "step-2", model), "another save replaced or deleted")
    assert differing(tz.full_state_dict(model), ones) == []


@pytest.mark.parametrize(
    "work",
    [load_float32, load_several, load_extra, load_tied, load_factored, load_wrapped, save_unsharded, load_replaced],
    ids=lambda work: work.__name__,
)
def test_it_comes_back_exactly_or_is_refused(ranks_pool: RanksPool, tmp_path: Path, work: Callable[..., None]) -> None:
    ranks_pool.run(2, work, tmp_path)
