"""The code of docs/torch-tools.md, section by section: torch's tools on a sharded model act as on one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import thunder_zero as tz
from tests.harness.models import fresh, full, relative_error
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.sharded.dtensors import local

PAGE = Path(__file__).parents[2] / "docs/torch-tools.md"
HYBRID = (2, 2)
MAX_NORM = 0.1  # as on the page
Names = dict[str, Any]


class Net(nn.Module):
    """A model with uneven rows, fewer rows than ranks, a scalar, a tied and a replicated parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x) + self.last(self.first(x).tanh()) * self.scale


def loss(y: Tensor) -> Tensor:
    return y.square().mean()


def sections() -> dict[str, str]:
    """Return the code of the page, by the titles of its sections."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    code = {title: "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) for title, text in pairs}
    return {title: block for title, block in code.items() if block}


def shard(stage: int, shape: tuple[int, ...]) -> Any:
    options: Any = {"stage": stage, "replicated": ("first.bias",)}
    if len(shape) > 1:
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return tz.compile(fresh(Net), **options)


def take_step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    model.zero_grad()
    loss(model(tokens)).backward()
    optimizer.step()


def are_near(model: Any, expected: Any) -> bool:
    """Return whether two modules have nearly equal parameters."""
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max([relative_error(actual.detach(), other.detach()) for actual, other in pairs]) < 1e-5


def gradients_of(module: nn.Module) -> list[Tensor]:
    grads = []
    for param in module.parameters():
        assert param.grad is not None
        grads.append(full(param.grad))
    return grads


def norm_of(grads: list[Tensor]) -> Tensor:
    return torch.cat([grad.flatten() for grad in grads]).norm()


# Checks after the code of a section ran. ``plain`` is the plain module of one process.


def whole_shapes(names: Names) -> bool:
    plain, rows = names["plain"], sum(part.numel() for part in names["held"])
    is_least = rows <= sum(param.numel() for param in plain.parameters()) or names["stage"] == 0
    return is_least and names["shapes"] == {name: tuple(param.shape) for name, param in plain.named_parameters()}


def steps_alike(names: Names) -> bool:
    take_step(names["model"], names["optimizer"], names["tokens"])
    take_step(names["plain"], names["plain_optimizer"], names["all_tokens"])
    return are_near(names["model"], names["plain"])


def norms_alike(names: Names) -> bool:
    sums = {name: float(param.detach().abs().sum()) for name, param in names["plain"].named_parameters()}
    is_logged = names["logged"] == (pytest.approx(sums, rel=1e-5) if dist.get_rank() == 0 else {})
    return is_logged and relative_error(names["norm"], norm_of(gradients_of(names["plain"]))) < 1e-5


def clipped_alike(names: Names) -> bool:
    before = norm_of(gradients_of(names["plain"]))
    after = norm_of(gradients_of(names["model"]))
    return relative_error(names["total"], before) < 1e-5 and abs(float(after) - MAX_NORM) < 1e-5


def accumulated_alike(names: Names) -> bool:
    names["plain"].zero_grad()
    for half in names["all_halves"]:
        loss(names["plain"](half)).backward()
    norm = names["accumulated"]
    is_near = relative_error(full(norm), norm_of(gradients_of(names["plain"]))) < 1e-5
    names["model"].zero_grad()
    return is_near


def penalised_alike(names: Names) -> bool:
    plain = names["plain"]
    plain.zero_grad()
    penalty = sum(param.square().sum() for param in plain.parameters())
    (loss(plain(names["all_tokens"])) + 0.01 * penalty).backward()
    pairs = zip(gradients_of(names["model"]), gradients_of(plain), strict=True)
    errors = [relative_error(grad, expected) for grad, expected in pairs]
    names["model"].zero_grad()
    return max(errors) < 1e-5


def loaded_full(names: Names) -> bool:
    rank0 = dist.get_rank() == 0
    weights = names["weights"]
    state = names["plain"].state_dict()
    is_equal = weights.keys() == (state.keys() if rank0 else set()) and all(
        relative_error(weights[name], state[name]) < 1e-5 for name in weights
    )
    if not (is_equal and are_near(names["other"], names["plain"]) and are_near(names["third"], names["plain"])):
        return False
    take_step(names["third"], names["its_optimizer"], names["tokens"])
    take_step(names["model"], names["optimizer"], names["tokens"])
    take_step(names["plain"], names["plain_optimizer"], names["all_tokens"])
    return are_near(names["third"], names["plain"]) and are_near(names["model"], names["plain"])


def loaded_dcp(names: Names) -> bool:
    model, fourth = names["model"], names["fourth"]
    pairs = zip(model.parameters(), fourth.parameters(), strict=True)
    with torch.no_grad():
        is_near = relative_error(fourth(names["tokens"]), names["plain"](names["tokens"])) < 1e-5
    return is_near and all(torch.equal(local(param), local(loaded)) for param, loaded in pairs)


def averaged_and_copied(names: Names) -> bool:
    model, plain = names["model"], deepcopy(names["plain"])
    is_near = are_near(names["averaged"].module, plain) and are_near(names["snapshot"], plain)
    with torch.no_grad():
        for param in model.parameters():
            local(param).zero_()
    model.load_state_dict(names["snapshot"].state_dict())
    with torch.no_grad():
        return is_near and relative_error(model(names["tokens"]), plain(names["tokens"])) < 1e-5


def scaled_alike(names: Names) -> bool:
    """Take one step on all ranks, then skip one on all ranks because one rank has Inf in its rows of a gradient."""
    model, optimizer, scaler = names["model"], names["optimizer"], names["scaler"]
    plain, plain_optimizer = names["plain"], names["plain_optimizer"]
    plain.zero_grad()
    loss(plain(names["all_halves"][0])).backward()
    plain_optimizer.step()
    if not are_near(model, plain):
        return False
    model.zero_grad()
    scaler.scale(loss(model(names["tokens"]))).backward()
    weight = model.get_parameter("embed.weight")
    if names["stage"] == 0 or weight.device_mesh.get_local_rank(weight.device_mesh.ndim - 1) == 0:  # in each replica
        local(weight.grad)[0, 0] = torch.inf
    before = [local(param).clone() for param in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    return all(map(torch.equal, before, map(local, model.parameters()))) and scaler.get_scale() == 2.0**15


CHECKS: dict[str, Callable[[Names], bool]] = {
    "What `parameters()` gives": whole_shapes,
    "Optimizers: `fused=True`": steps_alike,
    "Numbers: `.full_tensor()` first": norms_alike,
    "Clipping": clipped_alike,
    "`no_sync`": accumulated_alike,
    "A penalty in the loss": penalised_alike,
    "State dicts": loaded_full,
    "Distributed checkpoints (DCP)": loaded_dcp,
    "Averages and copies": averaged_and_copied,
    "Gradient scalers": scaled_alike,
}


def run_the_page(rank: int, world_size: int, stage: int, shape: tuple[int, ...], folder: Path) -> None:
    plain = fresh(Net)
    all_tokens = torch.arange(8 * world_size).view(2 * world_size, 4) % 7
    tokens = all_tokens.chunk(world_size)[rank]
    others = {name: shard(stage, shape) for name in ("other", "third", "fourth")}
    names: Names = {"tz": tz, "torch": torch, "dist": dist, "DTensor": DTensor, "nn": nn, "loss": loss, **others}
    names |= {"model": shard(stage, shape), "plain": plain, "folder": folder, "stage": stage}
    names |= {"plain_optimizer": torch.optim.AdamW(plain.parameters(), lr=0.1)}
    names |= {"its_optimizer": torch.optim.AdamW(others["third"].parameters(), lr=0.1, fused=True)}
    names |= {"tokens": tokens, "all_tokens": all_tokens}
    names |= {"first_half": tokens[:1], "second_half": tokens[1:]}
    names |= {"all_halves": [all_tokens[0::2], all_tokens[1::2]]}
    wrong = []
    for title, code in sections().items():
        exec(compile(code, title, "exec"), names)
        if not CHECKS[title](names):
            wrong.append(title)
    assert wrong == [], wrong


@pytest.mark.parametrize(
    ("world_size", "stage"), [(2, 3), *slow((2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2), (3, 3))]
)
def test_each_section_acts_as_on_one_process(
    ranks_pool: RanksPool, tmp_path: Path, world_size: int, stage: int
) -> None:
    ranks_pool.run(world_size, run_the_page, stage, (world_size,), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_section_acts_as_on_one_process_under_hybrid_sharding(
    ranks_pool: RanksPool, tmp_path: Path, stage: int
) -> None:
    ranks_pool.run(4, run_the_page, stage, HYBRID, tmp_path)


def test_each_section_with_code_has_a_check() -> None:
    assert sections().keys() == CHECKS.keys()
