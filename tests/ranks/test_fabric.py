"""ZeroStrategy in Lightning Fabric: training, clipping, accumulation, checkpoints, and misuse.

Fabric runs as if torchrun had started it, in the ranks and the process group of the harness; ``test_fabric_litgpt.py``
tests its own launcher, and LitGPT. Only the ranks import Lightning.
"""

from __future__ import annotations

import importlib.util
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import thunder_zero as tz
from tests.harness.errors import raised
from tests.harness.models import error, fresh
from tests.harness.ranks import RanksPool
from thunder_zero.layout import row_range
from thunder_zero.runtime.calls import Calls
from thunder_zero.runtime.placeholders import Placeholder

import thunder

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning")

STAGES = (1, 2, 3)
MICRO, ROWS, STEPS = 2, 4, 4  # micro-batches of a step, rows of one over all ranks, steps
SAVED_AFTER = 2  # steps
LIMIT = 0.05  # below all norms in the test


class Net(nn.Module):
    """Has rows that two ranks do not divide, one row, a tie, a scalar, a frozen and an unused parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 7), nn.Linear(7, 7)
        self.tied = self.second.weight
        self.dropout = nn.Dropout()  # not used
        self.row = nn.Parameter(torch.randn(1, 7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("offset", torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale + self.frozen * self.row
        return torch.tanh(self.second(x)) @ self.tied + self.offset

    def twice(self, x: Tensor) -> Tensor:
        return 2 * self(x)


def inputs(step: int, micro: int, rank: int, world_size: int) -> Tensor:
    """This rank's rows of one micro-batch."""
    generator = torch.Generator().manual_seed(step * MICRO + micro)
    return torch.randn(ROWS, 4, generator=generator).tensor_split(world_size)[rank]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), 0.05)


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> tuple[list[float], list[float]]:
    """Train in one process with plain torch, one batch a step: the losses, and the norms before clipping."""
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        loss = model(torch.cat([inputs(step, micro, 0, 1) for micro in range(MICRO)])).square().mean()
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), LIMIT).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def train(
    fabric: Any, model: Any, optimizer: Any, steps: range, micro_batches: int
) -> tuple[list[float], list[float], list[int]]:
    """Train as a Fabric script does, in micro-batches; also the number of reductions that each micro-batch starts."""
    losses, norms, reductions = [], [], []
    for step in steps:
        model.zero_grad()
        total = torch.tensor(0.0)
        mine = torch.cat([inputs(step, micro, fabric.global_rank, fabric.world_size) for micro in range(MICRO)])
        for number, x in enumerate(mine.chunk(micro_batches), 1):
            with (
                fabric.no_backward_sync(model, enabled=number < micro_batches),
                mock.patch.object(Calls, "_reduce", autospec=True, side_effect=Calls._reduce) as reduce,
            ):
                loss = model(x).square().mean() / micro_batches
                fabric.backward(loss)
            reductions.append(reduce.call_count)
            total += loss.detach()
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=LIMIT).item())
        optimizer.step()
        losses.append(fabric.all_reduce(total).item())
    return losses, norms, reductions


@contextmanager
def fabric_on(rank: int, world_size: int, **options: Any) -> Iterator[Any]:
    """Fabric with ZeroStrategy on a rank of the harness."""
    from lightning.fabric import Fabric

    from thunder_zero.lightning import ZeroStrategy

    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "TORCHELASTIC_RUN_ID": "harness"}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in found.items()}):
        plugins = options.pop("plugins", None)
        strategy = ZeroStrategy(**options)
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
        fabric.launch()
        yield fabric


def full_weights(model: Any) -> dict[str, Tensor]:
    from thunder_zero.lightning import zero_module

    return tz.full_state_dict(zero_module(model))


def differences(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    assert list(found) == list(right)
    return {name: error(found[name], right[name]) for name in right if error(found[name], right[name]) > 1e-5}


def stages(rank: int, world_size: int, folder: Path) -> dict[int, Any]:
    """In each stage, train, save after two steps, and continue."""
    results = {}
    for stage in STAGES:
        with fabric_on(rank, world_size, stage=stage) as fabric:
            torch.manual_seed(rank and 99)  # rank 0 has the weights, as with DDP
            module = Net()
            if stage % 2:  # both orders of a Fabric script
                model, optimizer = fabric.setup(module, adam(module))
            else:
                model = fabric.setup_module(module)
                optimizer = fabric.setup_optimizers(adam(model))
            before = train(fabric, model, optimizer, range(SAVED_AFTER), MICRO)
            fabric.save(folder / f"{stage}.pt", {"model": model, "optimizer": optimizer, "step": SAVED_AFTER})
            after = train(fabric, model, optimizer, range(SAVED_AFTER, STEPS), MICRO)
            losses, norms, reductions = (one + two for one, two in zip(before, after, strict=True))
            shapes = [tuple(param.shape) for param in model.parameters()]
            results[stage] = losses, norms, reductions, full_weights(model), shapes, list(map(type, model.modules()))
    return results


def go_on(rank: int, world_size: int, file: Path, stage: int) -> Any:
    """Load the file and finish the training: Fabric's result, the losses, the weights, and the names of shards with
    nonzero padding."""
    with fabric_on(rank, world_size, stage=stage) as fabric:
        torch.manual_seed(99)  # other weights
        module = Net()
        model, optimizer = fabric.setup(module, adam(module))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        rest = fabric.load(file, state)
        losses, _, _ = train(fabric, model, optimizer, range(state["step"], STEPS), 1)
        shards = dict(zip((name for name, _ in Net().named_parameters()), model.parameters(), strict=True))
        plan = tz.make_plan(Net(), tz.Policy(stage=stage), world_size, rank)
        own = {param.path: row_range(param.shape[0], world_size, rank) for param in plan.params if param.sharded}
        padded = [path for path, (start, stop) in own.items() if shards[path][stop - start :].any()]
        return rest, losses, full_weights(model), padded


def test_trains_saves_and_goes_on_as_one_process(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks = ranks_pool.run(2, stages, tmp_path, timeout=110)
    plain = fresh(Net)
    losses, norms = train_plain(plain, adam(plain), range(STEPS))
    weights = {name: value.detach() for name, value in plain.state_dict().items()}
    for results in ranks:
        for stage, found in results.items():
            assert found[0] == pytest.approx(losses, rel=1e-5)
            assert found[1] == pytest.approx(norms, rel=1e-5)
            assert min(norms) > LIMIT
            assert found[2][::2] == [0] * STEPS, "under no_backward_sync nothing is reduced"
            assert min(found[2][1::2]) > 0
            assert differences(found[3], weights) == {}
            cut = tz.make_plan(plain, tz.Policy(stage=stage), 2, 0)
            assert found[4] == [
                cut.shard_shape(cut.by_name[name]) if cut.by_name[name].sharded else tuple(param.shape)
                for name, param in plain.named_parameters()
            ], "the parameters of Fabric's wrapper are the shards"
            assert nn.Dropout in found[5], "its modules are the module's"

    for saved_by, world_size, stage in ((3, 1, 3), (1, 2, 2)):
        for rest, found_losses, found_weights, padded in ranks_pool.run(
            world_size, go_on, tmp_path / f"{saved_by}.pt", stage, timeout=110
        ):
            assert (rest, padded) == ({}, [])
            assert found_losses == pytest.approx(losses[SAVED_AFTER:], rel=1e-5)
            assert differences(found_weights, weights) == {}

    saved = torch.load(tmp_path / "2.pt")  # and plain torch
    model = Net()
    model.load_state_dict(saved["model"])
    optimizer = adam(model)
    optimizer.load_state_dict(saved["optimizer"])
    assert train_plain(model, optimizer, range(SAVED_AFTER, STEPS))[0] == pytest.approx(losses[SAVED_AFTER:], rel=1e-5)


def whole(rank: int, world_size: int, folder: Path, steps: range) -> dict[str, Tensor]:
    """Train with Muon on whole matrices; load before and save after the steps."""
    with fabric_on(rank, world_size, stage=3) as fabric:
        model = fabric.setup_module(fresh(Net).double())
        optimizer = fabric.setup_optimizers(tz.whole(torch.optim.Muon, matrices(model), lr=0.02))
        if steps.start:
            fabric.load(folder / f"{steps.start}.pt", {"model": model, "optimizer": optimizer})
        for step in steps:
            optimizer.zero_grad()
            fabric.backward(model(inputs(step, 0, rank, world_size).double()).square().mean())
            optimizer.step()
        fabric.save(folder / f"{steps.stop}.pt", {"model": model, "optimizer": optimizer})
        return full_weights(model)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if name.endswith(".weight")]


@pytest.mark.slow
def test_whole_states_are_saved_and_loaded_on_other_ranks(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, whole, tmp_path, range(2), timeout=110)
    found = ranks_pool.run(1, whole, tmp_path, range(2, 3), timeout=110)
    found += ranks_pool.run(2, whole, tmp_path, range(3, 4), timeout=110)
    plain = fresh(Net).double()
    optimizer = torch.optim.Muon(matrices(plain), lr=0.02)
    for step in range(4):
        optimizer.zero_grad()
        plain(inputs(step, 0, 0, 1).double()).square().mean().backward()
        optimizer.step()
    assert differences(found[1], dict(plain.state_dict())) == differences(found[2], dict(plain.state_dict())) == {}
    saved = torch.load(tmp_path / "4.pt", weights_only=True)["optimizer"]["state"]
    assert saved.keys() == optimizer.state_dict()["state"].keys()


def precise(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Fabric's scaler when the last rank overflows in the second step; and a file loaded where compute is bfloat16."""
    from lightning.fabric.plugins import MixedPrecision

    found: dict[str, Any] = {"weights": []}
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with fabric_on(rank, world_size, plugins=MixedPrecision("16-mixed", "cpu", scaler)) as fabric:
        model = fabric.setup(fresh(Net))
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
        for step in range(3):
            optimizer.zero_grad()
            loss = model(inputs(step, 0, rank, world_size)).float().square().mean()
            fabric.backward(loss * (1e6 if step == 1 and rank == world_size - 1 else 1.0))
            optimizer.step()
            found["weights"].append(full_weights(model)["second.weight"])
        found["scale"] = scaler.get_scale()
    half = tz.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
    with fabric_on(rank, world_size, mixed_precision=half) as fabric:
        model = fabric.setup(fresh(Net))
        fine = {name: value * 1.001 for name, value in fresh(Net).state_dict().items()}
        torch.save(fine, folder / f"fine{rank}.pt")
        fabric.load_raw(folder / f"fine{rank}.pt", model)
        found["exact"] = all(torch.equal(full_weights(model)[name], value) for name, value in fine.items())
    return found


def test_scalers_skip_on_all_ranks_and_files_are_read_in_full_precision(ranks_pool: RanksPool, tmp_path: Path) -> None:
    for found in ranks_pool.run(2, precise, tmp_path):
        first, second, third = found["weights"]
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
        assert found["scale"] == 8.0
        assert found["exact"]


def cut_rows(states: dict[int, Any]) -> dict[int, Any]:
    """Replace each state that has one number a row by one that has more rows than the parameter."""
    return {index: {**of, "row_var": torch.ones(9, 1)} if "row_var" in of else of for index, of in states.items()}


def misuse(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    from lightning.fabric.plugins import Precision

    from thunder_zero.lightning import ZeroStrategy, zero_module

    class Other(Precision):
        """A third party's plugin."""

    found = {
        "unknown": raised(lambda: ZeroStrategy(stages=3)),  # type: ignore[call-arg]
        "stage": raised(lambda: ZeroStrategy(stage=4)),
        "mesh": raised(lambda: ZeroStrategy(mesh=None)),
        "plain": raised(lambda: zero_module(Net())),
    }

    def foreign() -> None:
        with fabric_on(rank, world_size, plugins=Other()):
            pass

    found["plugin"] = raised(foreign)
    with fabric_on(rank, world_size, jit_options={"cache": "same input"}) as fabric:
        model = fabric.setup(Net())
        found["option"] = thunder.compile_data(zero_module(model)).cache_option.name
        found["jitted"] = raised(lambda: fabric.setup(thunder.jit(Net())))
    with fabric_on(rank, world_size, stage=0) as fabric:
        model = fabric.setup(fresh(Net))
        optimizer = fabric.setup_optimizers(torch.optim.Adafactor(model.parameters(), lr=0.1))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        fabric.save(folder / "whole.pt", {"optimizer": optimizer})
        fabric.load(folder / "whole.pt", {"optimizer": optimizer})
        found["replicated"] = str(any("row_var" in of for of in optimizer.optimizer.state.values()))
    return found | misuse_of_files(rank, world_size, folder) | misuse_of_wrappers(rank, world_size)


def misuse_of_files(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    from thunder_zero.lightning import zero_module

    found = {}
    with fabric_on(rank, world_size, trust_optimizer=True) as fabric:
        jitted = thunder.jit(fresh(Net))
        model = fabric.setup(jitted)
        found["full weights stay"] = str(any(not isinstance(param, Placeholder) for param in jitted.parameters()))
        found["again"] = raised(lambda: fabric.setup(zero_module(model)))
        found["empty"] = raised(lambda: fabric.init_module(empty_init=True))
        with fabric.init_module():
            found["init"] = str(Net().scale.device)
        found["no model"] = raised(lambda: fabric.clip_gradients(Net(), adam(Net()), max_norm=1.0))
        x = inputs(0, 0, rank, world_size)

        optimizer = fabric.setup_optimizers(torch.optim.Adafactor(model.parameters(), lr=0.1))
        model(x).sum().backward()
        fabric.clip_gradients(model, optimizer, clip_val=1e-3)
        found["clipped"] = str(max(param.grad.abs().max() for param in model.parameters() if param.grad is not None))
        optimizer.step()
        found["rows"] = raised(lambda: fabric.save(folder / "no.pt", {"optimizer": optimizer}))
        packed = optimizer.optimizer.state_dict()
        found["rows of a file"] = raised(
            lambda: optimizer.load_state_dict({**packed, "state": cut_rows(packed["state"])})
        )
        fewer = [{**packed["param_groups"][0], "params": [0]}]
        found["fewer parameters"] = raised(lambda: optimizer.load_state_dict({**packed, "param_groups": fewer}))
        full = Net().state_dict()
        for case, state in {
            "missing": {"scale": full["scale"]},
            "shape": full | {"first.weight": torch.ones(2, 4)},
        }.items():
            torch.save(state, folder / f"{case}{rank}.pt")
            found[case] = raised(lambda case=case: fabric.load_raw(folder / f"{case}{rank}.pt", model))  # type: ignore[misc]
        torch.save({"scale": torch.tensor(3.0, dtype=torch.float64)}, folder / f"part{rank}.pt")
        fabric.load_raw(folder / f"part{rank}.pt", model, strict=False)
        found["part"] = str(full_weights(model)["scale"].item())
    return found


def misuse_of_wrappers(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    x = inputs(0, 0, rank, world_size)
    with fabric_on(rank, world_size) as fabric:
        params = list(Net().parameters())  # of a module that is not sharded
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(params))
        found["unchanged"] = str(all(map(operator.is_, optimizer.param_groups[0]["params"], params)))
        compiled = fabric.setup(torch.compile(fresh(Net)))
        found["compiled"] = str(torch.allclose(compiled(x), fresh(Net)(x)))
        found["not elementwise"] = raised(fabric.setup_optimizers(torch.optim.Adafactor(compiled.parameters())).step)
        for case, module in {"method": Net(), "method of a jitted module": thunder.jit(Net())}.items():
            model = fabric.setup(module)
            model.mark_forward_method("twice")
            found[case] = raised(lambda model=model: model.twice(x))  # type: ignore[misc]
    return found


def words_of_misuse() -> dict[str, list[str]]:
    return {
        "unknown": ["TypeError", "stages=3 is not a field"],
        "stage": ["ValueError", "stage is 4"],
        "mesh": ["TypeError", "ZeroStrategy does not take mesh: Fabric sets it"],
        "plain": ["TypeError", "Net", "fabric.setup"],
        "plugin": ["TypeError", "'32-true' (Other)", "'bf16-mixed' or '16-mixed'"],
        "option": ["SAME_INPUT"],
        "jitted": [
            "TypeError",
            "jit_options (cache), but the module is already jitted",
            "give Fabric the plain module",
        ],
        "full weights stay": ["False"],
        "again": ["RuntimeError", "Net is already sharded", "plain module"],
        "empty": ["ValueError", "empty_init=False"],
        "init": ["cpu"],
        "no model": ["TypeError", "Net", "fabric.setup"],
        "clipped": ["tensor(0.0010)"],
        "rows": ["ValueError", "parameter 'tied'", "save optimizer.state_dict() on each rank"],
        "rows of a file": ["ValueError", "has shape (9, 1) in the state dict", "(stage 0)"],
        "fewer parameters": ["ValueError", "doesn't match the size of optimizer's group"],  # torch's own words
        "replicated": ["True"],
        "missing": [
            "RuntimeError",
            "Missing key(s) in state_dict: 'tied', 'row', ",
            "Unexpected key(s) in state_dict: none",
            "strict=False",
        ],
        "shape": ["ValueError", "'first.weight' has shape (2, 4) in the state dict and (7, 4) in the model"],
        "part": ["3.0"],
        "unchanged": ["True"],
        "compiled": ["True"],
        "not elementwise": [
            "RuntimeError",
            "Adafactor couples elements of one parameter",
            "use tz.whole(Adafactor, ...)",
        ],
        "method": ["RuntimeError", "a method of Net", "move the method's code into forward"],
        "method of a jitted module": ["RuntimeError", "a method of Net"],
    }


@pytest.fixture(scope="module")
def misused(ranks_pool: RanksPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    first, second = ranks_pool.run(2, misuse, tmp_path_factory.mktemp("misuse"))
    assert first == second
    assert first.keys() == words_of_misuse().keys()
    return dict(first)


@pytest.mark.parametrize("case", words_of_misuse())
def test_misuse_raises_on_all_ranks(misused: dict[str, str], case: str) -> None:
    assert [word for word in words_of_misuse()[case] if word not in misused[case]] == [], misused[case]
