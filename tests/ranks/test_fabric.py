"""ZeroStrategy in Lightning Fabric trains, clips, accumulates and saves as one process; misuse raises.

Fabric runs as if torchrun had started it, in the harness's ranks; ``test_examples.py`` tests its own launcher, and
LitGPT. Only the ranks import Lightning.
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
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import thunder_zero as tz
from tests.harness.checkpoints import full_copy
from tests.harness.errors import fails
from tests.harness.models import Small, fresh, relative_error
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.wire import Wire

import thunder

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning")

MICRO, ROWS, STEPS = 2, 4, 4  # micro-batches of a step, rows of a micro-batch over all ranks, steps
SAVED_AFTER = 2  # steps
LIMIT = 0.05  # below all norms in the test
Lines = list[tuple[float, float]]  # the loss of each step, and the norm before clipping
Reference = tuple[Lines, dict[str, Tensor]]  # of plain torch in one process: lines, and the final weights


class Net(Small):
    """A model with a module that forward does not call, a buffer, and a second method that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()
        self.register_buffer("offset", torch.randn(9))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.offset

    def twice(self, tokens: Tensor) -> Tensor:
        return 2 * self(tokens)


def inputs_of(step: int, micro: int, rank: int, world_size: int) -> Tensor:
    """Return this rank's tokens of a micro-batch."""
    generator = torch.Generator().manual_seed(step * MICRO + micro)
    return torch.randint(9, (ROWS,), generator=generator).tensor_split(world_size)[rank]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), 0.05)


def set_up(fabric: Any, module: nn.Module, stage: int) -> tuple[Any, Any]:
    """Set up together, or the model first; in ZeRO-2 the optimizer steps whole parameters."""
    if stage % 2:
        return fabric.setup(module, adam(module))
    model = fabric.setup_module(module)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = tz.whole(torch.optim.AdamW, params, lr=0.05) if stage == 2 else adam(model)
    return model, fabric.setup_optimizers(optimizer)


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Lines:
    """Train in one process with plain torch, one batch a step."""
    lines = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(torch.cat([inputs_of(step, micro, 0, 1) for micro in range(MICRO)])).square().mean()
        loss.backward()
        lines.append((loss.item(), clip_grad_norm_(model.parameters(), LIMIT).item()))
        optimizer.step()
    return lines


def train(fabric: Any, model: Any, optimizer: Any, steps: range, micro_batches: int) -> Lines:
    """Train in micro-batches as a Fabric script does; check that no_backward_sync reduces nothing."""
    lines = []
    for step in steps:
        model.zero_grad()
        total = torch.tensor(0.0)
        rows = torch.cat([inputs_of(step, micro, fabric.global_rank, fabric.world_size) for micro in range(MICRO)])
        for number, x in enumerate(rows.chunk(micro_batches), 1):
            with (
                fabric.no_backward_sync(model, enabled=number < micro_batches),
                mock.patch.object(Wire, "reduce", autospec=True, side_effect=Wire.reduce) as reduce,
            ):
                loss = model(x).square().mean() / micro_batches
                fabric.backward(loss)
            assert (reduce.call_count > 0) is (number == micro_batches), (number, reduce.call_count)
            total += loss.detach()
        norm = fabric.clip_gradients(model, optimizer, max_norm=LIMIT).item()
        optimizer.step()
        lines.append((fabric.all_reduce(total).item(), norm))
    return lines


def check_lines(actual: Lines, expected: Lines) -> None:
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=0.0)


@contextmanager
def fabric_on(rank: int, world_size: int, **options: Any) -> Iterator[Any]:
    """Yield Fabric with ZeroStrategy on a rank of the harness."""
    from lightning.fabric import Fabric

    from thunder_zero.lightning import ZeroStrategy

    env = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "TORCHELASTIC_RUN_ID": "tests"}
    with mock.patch.dict(os.environ, env):
        plugins = options.pop("plugins", None)
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=ZeroStrategy(**options), plugins=plugins)
        fabric.launch()
        yield fabric


def full_weights(model: Any) -> dict[str, Tensor]:
    from thunder_zero.lightning import zero_module

    return tz.full_state_dict(zero_module(model))


def check_weights(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert max(errors.values()) <= 1e-5, errors


# Training and checkpoints


@pytest.fixture(scope="module")
def reference() -> Reference:
    model = fresh(Net)
    lines = train_plain(model, adam(model), range(STEPS))
    assert min(norm for _, norm in lines) > LIMIT
    return lines, {name: value.detach() for name, value in model.state_dict().items()}


def train_and_save(rank: int, world_size: int, file: Path, stage: int, reference: Reference) -> None:
    """Train, save after two steps, and continue."""
    with fabric_on(rank, world_size, stage=stage) as fabric:
        torch.manual_seed(rank and 99)  # rank 0 has the weights, as with DDP
        model, optimizer = set_up(fabric, Net(), stage)
        lines = train(fabric, model, optimizer, range(SAVED_AFTER), MICRO)
        fabric.save(file, {"model": model, "optimizer": optimizer, "step": SAVED_AFTER})
        lines += train(fabric, model, optimizer, range(SAVED_AFTER, STEPS), MICRO)
        check_lines(lines, reference[0])
        check_weights(full_weights(model), reference[1])
        plan = tz.schedule.make_plan(Net(), tz.Policy(stage=stage), tz.schedule.Mesh.of(world_size, rank))
        for (name, param), shard in zip(Net().named_parameters(), model.parameters(), strict=True):
            held = plan.geometry(plan.by_name[name]).numel
            assert shard.shape == param.shape, name
            assert local(shard).numel() == held, f"{name} of Fabric's wrapper is no shard"
        assert nn.Dropout in map(type, model.modules()), "the wrapper has the module's submodules"


def load_and_go_on(rank: int, world_size: int, file: Path, stage: int, reference: Reference) -> None:
    """Load the file and finish the training."""
    with fabric_on(rank, world_size, stage=stage) as fabric:
        torch.manual_seed(99)  # other weights
        model, optimizer = set_up(fabric, Net(), stage)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        assert fabric.load(file, state) == {}
        check_lines(train(fabric, model, optimizer, range(state["step"], STEPS), 1), reference[0][SAVED_AFTER:])
        check_weights(full_weights(model), reference[1])


@pytest.mark.parametrize(("stage", "world_size", "next_stage"), slow((3, 1, 0), (1, 2, 2), (2, 2, 3)))
def test_it_trains_saves_and_goes_on_as_one_process(
    ranks_pool: RanksPool, tmp_path: Path, reference: Reference, stage: int, world_size: int, next_stage: int
) -> None:
    file = tmp_path / "saved.pt"
    ranks_pool.run(2, train_and_save, file, stage, reference)
    ranks_pool.run(world_size, load_and_go_on, file, next_stage, reference)
    saved, model = torch.load(file), Net()
    model.load_state_dict(saved["model"])
    optimizer = adam(model)
    optimizer.load_state_dict(saved["optimizer"])
    check_lines(train_plain(model, optimizer, range(SAVED_AFTER, STEPS)), reference[0][SAVED_AFTER:])


# Precision


def skip_overflow(rank: int, world_size: int) -> None:
    """Check that Fabric's scaler skips the second step on all ranks."""
    from lightning.fabric.plugins import MixedPrecision

    weights = []
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with fabric_on(rank, world_size, plugins=MixedPrecision("16-mixed", "cpu", scaler)) as fabric:
        model = fabric.setup(fresh(Net))
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
        for step in range(3):
            optimizer.zero_grad()
            loss = model(inputs_of(step, 0, rank, world_size)).float().square().mean()
            fabric.backward(loss * (1e6 if step == 1 and rank == world_size - 1 else 1.0))
            optimizer.step()
            weights.append(full_weights(model)["layers.0.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert scaler.get_scale() == 8.0


@pytest.mark.slow
def test_a_scaler_skips_on_all_ranks(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, skip_overflow)


# Misuse


def misuse_strategies(rank: int, world_size: int) -> None:
    from lightning.fabric.plugins import Precision

    from thunder_zero.lightning import ZeroStrategy, zero_module

    class Other(Precision):
        """A plugin of a third party."""

    def fused_by_another() -> None:
        with fabric_on(rank, world_size, fuse="nvfuser") as fabric:
            fabric.setup(Net())

    def foreign() -> None:
        with fabric_on(rank, world_size, plugins=Other()):
            pass

    fails(lambda: ZeroStrategy(stages=3), "TypeError", "stages=3 is not a field")  # type: ignore[call-arg]
    fails(lambda: ZeroStrategy(stage=4), "ValueError", "stage is 4")
    fails(lambda: ZeroStrategy(mesh=None), "TypeError", "does not take mesh: Lightning sets it")
    equal = "shares is (2, 1), and Lightning gives every rank an equal batch"
    fails(lambda: ZeroStrategy(shares=(2, 1)), "ValueError", equal)
    fails(lambda: zero_module(Net()), "TypeError", "Net", "fabric.setup")
    fails(fused_by_another, "ValueError", "fuse is 'nvfuser'; choose 'inductor'")
    fails(foreign, "TypeError", "'32-true' (Other)", "'bf16-mixed' or '16-mixed'")
    with fabric_on(rank, world_size, jit_options={"cache": "same input"}) as fabric:
        fails(lambda: fabric.setup(Net()), "RuntimeError", "Net was jitted with cache=")
        words = ("jit_options (cache), but the module is already jitted", "give Lightning the plain module")
        fails(lambda: fabric.setup(thunder.jit(Net())), "TypeError", *words)
    with fabric_on(rank, world_size) as fabric:
        jitted = thunder.jit(fresh(Net))
        model = fabric.setup(jitted)
        assert all(isinstance(param, DTensor) for param in jitted.parameters()), "full weights stay"
        fails(lambda: fabric.setup(zero_module(model)), "RuntimeError", "Net is already sharded", "plain module")
        fails(lambda: fabric.init_module(empty_init=True), "ValueError", "empty_init=False")
        with fabric.init_module():
            assert Net().scale.device.type == "cpu"
        unknown = Net()
        fails(lambda: fabric.clip_gradients(unknown, adam(unknown), max_norm=1.0), "TypeError", "Net", "fabric.setup")


def misuse_states_of_rows(rank: int, world_size: int, folder: Path) -> None:
    """Check that a state with a number for each row is refused, except where parameters are replicated."""
    with fabric_on(rank, world_size) as fabric:
        model = fabric.setup(fresh(Net))
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
        model(inputs_of(0, 0, rank, world_size)).sum().backward()
        fabric.clip_gradients(model, optimizer, clip_val=1e-3)
        largest = max(full_copy(param.grad).abs().max() for param in model.parameters() if param.grad is not None)
        assert float(largest) == pytest.approx(1e-3)
        optimizer.step()
        packed = optimizer.optimizer.state_dict()
        more = {"exp_avg": torch.ones(12, 1)}  # more rows than the parameter has
        cut = {index: state | more for index, state in packed["state"].items()}
        words = ("ValueError", "has shape (12, 1) in the state dict", "(stage 0)")
        fails(lambda: optimizer.load_state_dict({**packed, "state": cut}), *words)
        fewer = {**packed, "param_groups": [{**packed["param_groups"][0], "params": [0]}]}
        fails(lambda: optimizer.load_state_dict(fewer), "ValueError", "doesn't match the size of optimizer's group")
    with fabric_on(rank, world_size, stage=0) as fabric:
        model = fabric.setup(fresh(Net))
        optimizer = fabric.setup_optimizers(torch.optim.Adafactor(model.parameters(), lr=0.1))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        fabric.save(folder / "whole.pt", {"optimizer": optimizer})
        fabric.load(folder / "whole.pt", {"optimizer": optimizer})
        assert any("row_var" in state for state in optimizer.optimizer.state.values())


def read_files(rank: int, world_size: int, folder: Path) -> None:
    """Read files in full precision where compute is bfloat16."""
    half = tz.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
    with fabric_on(rank, world_size, mixed_precision=half) as fabric:
        model = fabric.setup(fresh(Net))
        full = {name: value * 1.001 for name, value in fresh(Net).state_dict().items()}
        file = folder / f"{rank}.pt"
        torch.save(full, file)
        fabric.load_raw(file, model)
        weights = full_weights(model)
        assert all(torch.equal(weights[name], value) for name, value in full.items())
        missing = 'Missing key(s) in state_dict: "row", "frozen", '
        torch.save({"scale": full["scale"]}, file)
        fails(lambda: fabric.load_raw(file, model), "RuntimeError", missing)
        torch.save(full | {"layers.0.weight": torch.ones(2, 4)}, file)
        words = "'layers.0.weight' has shape (2, 4) in the state dict and (5, 5) in the model"
        fails(lambda: fabric.load_raw(file, model), "ValueError", words)
        torch.save({"scale": torch.tensor(3.0, dtype=torch.float64)}, file)
        fabric.load_raw(file, model, strict=False)
        assert full_weights(model)["scale"].item() == 3.0


def misuse_wrappers(rank: int, world_size: int) -> None:
    x = inputs_of(0, 0, rank, world_size)
    with fabric_on(rank, world_size) as fabric:
        params = list(Net().parameters())  # of an unsharded module
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(params))
        assert all(map(operator.is_, optimizer.param_groups[0]["params"], params)), "the optimizer is not changed"
        compiled = fabric.setup(torch.compile(fresh(Net)))
        torch.testing.assert_close(compiled(x), fresh(Net)(x))
        compiled(x).sum().backward()
        factored = fabric.setup_optimizers(torch.optim.Adafactor(compiled.parameters()))
        with pytest.raises(RuntimeError) as failed:
            factored.step()
        assert "step whole parameters instead, with tz.whole(Adafactor, " in str(failed.value.__notes__)
        for module, action in ((Net(), "move the method's code into forward"), (thunder.jit(Net()), "a method of Net")):
            model = fabric.setup(module)
            model.mark_forward_method("twice")
            fails(lambda model=model: model.twice(x), "RuntimeError", "a method of Net", action)  # type: ignore[misc]


@pytest.mark.slow
def test_misuse_raises_on_all_ranks(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, misuse_strategies)
    ranks_pool.run(2, misuse_states_of_rows, tmp_path)
    ranks_pool.run(2, read_files, tmp_path)
    ranks_pool.run(2, misuse_wrappers)
