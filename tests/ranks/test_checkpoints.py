"""``tz.save`` and ``tz.load`` on real ranks: resumed training, FSDP2 and DDP, damage, and asynchronous saves.

``tests/one/test_checkpoint_worlds.py`` simulates all pairs of worlds and stages.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.checkpoints import adamw, differing, state_of, take_step, torch_model, torch_state_of
from tests.harness.errors import error_of, fails
from tests.harness.models import Mlp, Small, Zoo, fresh, relative_error, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow
from thunder_zero.checkpoint import manifest
from thunder_zero.checkpoint.dcp_read import read_metadata
from thunder_zero.checkpoint.dcp_write import HashedFile
from thunder_zero.comm.lost_ranks import CPU
from thunder_zero.compat.torch.groups import timeout_of

import thunder

# Resuming

BEFORE, AFTER = range(2), range(2, 6)  # steps


def train(model: Any, optimizer: Any, scheduler: Any, rank: int, world_size: int, steps: range) -> None:
    for step in steps:
        batch = torch.randint(0, 9, (12, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch.chunk(world_size)[rank]).square().mean().backward()
        optimizer.step()
        scheduler.step()


def save_and_repeat(rank: int, world_size: int, path: Path, stage: int) -> dict[str, Tensor]:
    """Save, train, load, and repeat the steps; check that the repeated steps give equal bits."""
    model = sharded(fresh(Small), stage)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, scheduler, rank, world_size, BEFORE)
    run = {"name": "first", "ends": [2, 6]}
    tz.save(path, model, optimizer, extra={"scheduler": scheduler, "position": rank, "run": run})
    train(model, optimizer, scheduler, rank, world_size, AFTER)
    uninterrupted = state_of(model, optimizer)
    loaded = tz.load(path, model, optimizer, extra={"scheduler": scheduler, "position": 0, "run": {}})
    assert loaded.own["run"] == {"name": "first", "ends": [2, 6]}, "values are returned"
    assert [extra["position"] for extra in loaded.of_rank] == list(range(world_size)), loaded
    assert loaded.own["position"] == rank, loaded
    assert scheduler.last_epoch == len(BEFORE), scheduler.last_epoch
    train(model, optimizer, scheduler, rank, world_size, AFTER)
    assert differing(state_of(model, optimizer), uninterrupted) == []
    return uninterrupted


def resume(rank: int, world_size: int, path: Path, stage: int, expected: dict[str, Tensor]) -> None:
    torch.manual_seed(9)
    model = sharded(Small(), stage)
    optimizer = adamw(model, lr=3.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    loaded = tz.load(path, model, optimizer, extra={"scheduler": scheduler})
    assert loaded.own.keys() == {"scheduler", "run"}, loaded  # all ranks saved equal values of these two
    train(model, optimizer, scheduler, rank, world_size, AFTER)
    actual = state_of(model, optimizer)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(actual[name], value) < 1e-4, (name, relative_error(actual[name], value))


@pytest.mark.parametrize(
    ("stage", "world_size", "to_stage"), [(3, 2, 1), *slow((0, 1, 3)), *deep((1, 2, 0), (2, 3, 0))]
)
def test_training_goes_on_in_another_world_and_stage(
    ranks_pool: RanksPool, tmp_path: Path, stage: int, world_size: int, to_stage: int
) -> None:
    expected, *_ = ranks_pool.run(3, save_and_repeat, tmp_path / "run", stage)
    ranks_pool.run(world_size, resume, tmp_path / "run", to_stage, expected)


# FSDP2 and DDP


def exchange_with_torch(rank: int, world_size: int, root: Path, kind: str, stage: int) -> None:
    """Load our checkpoint with torch's DCP, and load torch's checkpoint with ``tz.load``."""
    model = sharded(fresh(Mlp), stage)
    optimizer = adamw(model, lr=0.05)
    take_step(model, optimizer)
    tz.save(root / "ours", model, optimizer)
    wrapped, wrapped_optimizer = torch_model(world_size, kind)
    in_model, in_optimizer = get_state_dict(wrapped, wrapped_optimizer)
    nested: Any = {"model": in_model, "optim": in_optimizer}
    torch_dcp.load(nested, checkpoint_id=root / "ours")
    set_state_dict(wrapped, wrapped_optimizer, model_state_dict=nested["model"], optim_state_dict=nested["optim"])
    assert differing(torch_state_of(wrapped, wrapped_optimizer), state_of(model, optimizer)) == []
    assert wrapped_optimizer.param_groups[0]["lr"] == 0.05

    wrapped, wrapped_optimizer = torch_model(world_size, kind)
    take_step(wrapped, wrapped_optimizer)
    in_model, in_optimizer = get_state_dict(wrapped, wrapped_optimizer)
    torch_dcp.save({"model": in_model, "optim": in_optimizer}, checkpoint_id=root / "theirs")
    tz.load(root / "theirs", model, optimizer, verify_files=False)
    assert differing(state_of(model, optimizer), torch_state_of(wrapped, wrapped_optimizer)) == []
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize(
    ("world_size", "kind", "stage"), [(3, "fsdp2", 3), *slow((2, "ddp", 1), (3, "ddp", 0), (1, "fsdp2", 1))]
)
def test_checkpoints_are_exchanged_with_fsdp2_and_ddp(
    ranks_pool: RanksPool, tmp_path: Path, world_size: int, kind: str, stage: int
) -> None:
    ranks_pool.run(world_size, exchange_with_torch, tmp_path, kind, stage)


def write_with_fsdp2(rank: int, world_size: int, root: Path) -> dict[str, Tensor]:
    """Save one model under the names that several tools use."""
    fsdp2, fsdp2_optimizer = torch_model(world_size, "fsdp2")
    take_step(fsdp2, fsdp2_optimizer)
    model, optim = get_state_dict(fsdp2, fsdp2_optimizer)
    flat = get_optimizer_state_dict(fsdp2, fsdp2_optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    layouts: dict[str, Any] = {
        "plain": {"model": model, "optim": optim},
        "torchtune": {"model": model, "optimizer": optim, "epoch": 3},
        "tutorial": {"app": {"model": model, "optim": optim}},
        "trainer": {"state_dict": model, "optimizer_0": optim},
        "torchtitan": {**model, "optimizer": flat, "train_state": {"step": 3}},
        "none": {"net": model, "args": {"epochs": 3, "warmup": 1}},
        "wrapped": {"model": {f"module.{name}": value for name, value in model.items()}},
        "no optimizer": {"model": model, "epoch": 3},
    }
    for name, state in layouts.items():
        torch_dcp.save(state, checkpoint_id=root / name)
    return torch_state_of(fsdp2, fsdp2_optimizer)


def load_and_save(rank: int, world_size: int, root: Path, stage: int, expected: dict[str, Tensor]) -> None:
    for name in ("plain", "torchtune", "tutorial", "trainer", "torchtitan"):
        model = sharded(fresh(Mlp), stage)
        optimizer = adamw(model, lr=0.05)
        tz.load(root / name, model, optimizer, verify_files=False)
        assert differing(state_of(model, optimizer), expected) == [], name
        assert optimizer.param_groups[0]["lr"] == 1.0, name
    tz.save(root / "back", model, optimizer)
    load = partial(tz.load, verify_files=False)
    words = "no model under 'model', 'app.model'", "has 'args.epochs', 'net.layers.0.bias'; save it as {'model'"
    fails(lambda: load(root / "none", model), *words)
    words = "another model (missing: 'model.layers.0.bias'", "unexpected: 'model.module.layers.0.bias'"
    fails(lambda: load(root / "wrapped", model), *words)
    words = "no optimizer under 'optim', 'optimizer'", "it has 'epoch', 'model.layers.0.bias'; load without one"
    fails(lambda: load(root / "no optimizer", model, optimizer), *words)


def read_with_fsdp2(rank: int, world_size: int, root: Path, expected: dict[str, Tensor]) -> None:
    fsdp2, fsdp2_optimizer = torch_model(world_size, "fsdp2")
    model, optim = get_state_dict(fsdp2, fsdp2_optimizer)
    state: Any = {"model": model, "optim": optim}
    torch_dcp.load(state, checkpoint_id=root / "back")
    set_state_dict(fsdp2, fsdp2_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert differing(torch_state_of(fsdp2, fsdp2_optimizer), expected) == []


@pytest.mark.parametrize(("world_size", "stage", "last"), [(3, 1, 1), *slow((1, 3, 3), (4, 2, 2), (2, 0, 3))])
def test_layouts_of_other_tools_load(
    ranks_pool: RanksPool, tmp_path: Path, world_size: int, stage: int, last: int
) -> None:
    expected, *_ = ranks_pool.run(2, write_with_fsdp2, tmp_path)
    ranks_pool.run(world_size, load_and_save, tmp_path, stage, expected)
    ranks_pool.run(last, read_with_fsdp2, tmp_path, expected)


# All or nothing


def flip(path: Path, fraction: float = 0.5) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * fraction)] ^= 0x10
    path.write_bytes(content)


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [  # more damaged files: tests/one/test_checkpoint_folder.py
    ("a flipped bit", lambda path: flip(path / "__1_0.distcp"), "__1_0.distcp was changed"),
    ("a flipped manifest", lambda path: flip(path / "manifest.json", 0.01), "manifest.json is damaged"),
    ("no manifest", lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
    ("nothing", shutil.rmtree, "there is no checkpoint at"),
]


class Stubborn:
    """An extra whose load fails on rank 1."""

    def __init__(self, rank: int) -> None:
        self.rank, self.value = rank, "as it was"

    def state_dict(self) -> dict[str, str]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        if self.rank == 1 and state_dict["value"] == "saved":
            raise KeyError("stubborn")
        self.value = state_dict["value"]


@dataclass
class Loads:
    """A model and an optimizer that refused loads must not change."""

    model: Any
    optimizer: torch.optim.Optimizer
    before: dict[str, Tensor] = field(default_factory=dict)

    def step(self) -> None:
        take_step(self.model, self.optimizer)
        self.before = state_of(self.model, self.optimizer)

    def refused(self, words: str, path: Path, *arguments: Any, **options: Any) -> None:
        fails(lambda: tz.load(path, *(arguments or (self.model, self.optimizer)), **options), words)
        assert differing(state_of(self.model, self.optimizer), self.before) == [], words


def refuse_loads(rank: int, world_size: int, root: Path) -> None:
    model = sharded(fresh(Mlp), 3)
    loads = Loads(model, adamw(model))
    loads.step()
    stubborn = Stubborn(rank)
    with mock.patch.object(stubborn, "value", "saved"):
        tz.save(root / "good", model, loads.optimizer, extra={"stubborn": stubborn})
    loads.step()
    for name, damage, words in DAMAGES:
        if rank == 0:
            shutil.copytree(root / "good", root / name)
            damage(root / name)
        dist.barrier()
        loads.refused(words, root / name)
    refuse_models(loads, root)
    refuse_optimizers(loads, root)
    refuse_calls(loads, root / "good", rank, stubborn)
    tz.load(root / "good", model, loads.optimizer)
    assert differing(state_of(model, loads.optimizer), loads.before)


def refuse_models(loads: Loads, root: Path) -> None:
    wide, unlike = sharded(fresh(Mlp, 8), 3), "another model (missing: none; unexpected: 'model.empty', 'model.frozen'"
    tz.save(root / "wide", wide)
    tz.save(root / "zoo", sharded(fresh(Zoo), 2))
    tz.save(root / "half", sharded(fresh(Mlp).bfloat16(), 1))
    loads.refused("another model: model.layers.0.weight has shape (8, 8)", root / "wide", loads.model)
    loads.refused(unlike, root / "zoo", loads.model)
    loads.refused("dtype torch.bfloat16 in it, shape (7, 7) and dtype torch.float32 here", root / "half", loads.model)
    loads.refused("the checkpoint has no optimizer", root / "wide", wide, adamw(wide))


def refuse_optimizers(loads: Loads, root: Path) -> None:
    model, params = loads.model, list(loads.model.parameters())
    for words, optimizer in (
        ("has 1 parameter groups, this one has 2", torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])),
        ("other parameters (missing: none; unexpected: 'layers.1.bias'", torch.optim.AdamW(params[:2])),
        ("not one of this model's; build the optimizer on model.parameters()", adamw(nn.Linear(2, 2))),
        ("the checkpoint's optimizer is AdamW, this one is SGD", torch.optim.SGD(params, 0.1, momentum=0.9)),
    ):
        loads.refused(words, root / "good", model, optimizer)


def refuse_calls(loads: Loads, good: Path, rank: int, stubborn: Stubborn) -> None:
    model, optimizer = loads.model, loads.optimizer
    with model.no_sync():
        model(torch.ones(2, 7)).sum().backward()
    words = "cannot load: no_sync still holds unreduced gradients of parameter 'layers.0.weight'; run forward"
    loads.refused(f"{words} and backward of the last micro-batch outside of no_sync, or drop them with", good)
    model.zero_grad()
    loads.refused("the number of optimizers differs between ranks", good, model, None if rank else optimizer)
    words = "the checkpoint has no extra 'scheduler': it has ['stubborn']; leave it out of extra"
    loads.refused(words, good, extra={"scheduler": stubborn})
    words = "cannot load into the extra 'stubborn': an object of type object has no state_dict"
    loads.refused(words, good, extra={"stubborn": object()})
    loads.refused("stubborn", good, extra={"stubborn": stubborn})
    assert stubborn.value == "as it was", stubborn.value
    loads.refused("the path to load from differs between ranks", good.with_name(f"good{rank}"))


def test_damage_and_misuse_are_told_on_every_rank_and_change_nothing(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, refuse_loads, tmp_path)


# Saves that fail


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """Fail inside the block as a full disk does, after ``after`` bytes of a file."""

    def write(file: Any, data: Any) -> int:
        if file.tell() + len(data) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(file, data)

    whole = HashedFile.write
    with mock.patch.object(HashedFile, "write", write):
        yield


class Strange(torch.optim.SGD):
    """An optimizer whose state has neither the parameter's shape nor a single number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param]["factor"] = torch.ones(3)


def refuse_disks(root: Path, rank: int, model: Any, optimizer: Any) -> None:
    full = "the disk is full; no part of this checkpoint is visible"
    for after in (3000, 0):
        with full_disk(after if rank == 1 else 10**9):
            fails(lambda: tz.save(root / "next", model, optimizer), f"cannot write __1_0.distcp: {full}")
    with full_disk(8000 if rank == 0 else 10**9):  # the metadata is longer than rank 0's data
        fails(lambda: tz.save(root / "next", model), f": {full}")
    (root / "file").touch()
    for name, words in (
        ("file", "exists and is not a checkpoint"),
        ("good/next", "good: it is a checkpoint, which a save replaces as a whole"),
        ("latest", "are reserved"),
        (f"next{rank}", "the path to save at differs between ranks"),
    ):
        fails(lambda: tz.save(root / name, model, optimizer), words)  # noqa: B023


def refuse_values(path: Path, rank: int, model: Any, optimizer: Any) -> None:
    part, strange = adamw(model), Strange(model.parameters(), 0.1)
    if rank == 0:
        take_step(model, part)
    strange.step()
    for optimizers, options, words in (
        (optimizer, {"max_to_keep": 0}, "max_to_keep is 0; pass how many to keep"),
        (optimizer, {"extra": {"odd": object() if rank else 1}}, "the extra 'odd': torch.load(weights_only=True)"),
        (optimizer, {"extra": {"ema": model}}, "the extra 'ema' is a model"),
        (None, {"extra": {"second": optimizer}}, "the extra 'second' is an optimizer of a sharded model"),
        (None, {"extra": optimizer}, "pass a mapping from names to values, such as {'scheduler': scheduler}"),
        (None, {"extra": {"1's": 1} if rank else {}}, "the list of names in extra differs between ranks: rank 0 has"),
        ([optimizer, adamw(model)], {}, "parameter 'layers.0.weight' is in 2 optimizers"),
        (part, {}, "the optimizer's state of parameter 'layers.0.weight' differs between ranks"),
        (strange, {}, "'factor' of parameter 'layers.0.weight': it has shape (3,)"),
    ):
        fails(partial(tz.save, path, model, optimizers, **options), words)
    on_state = {"side_effect": ValueError("no state here")} if rank else {"return_value": 3}
    of_first = optimizer.state[next(model.parameters())]
    for change, words in (
        (mock.patch.dict(optimizer.state, total=torch.ones(3)), "AdamW has a state for 'total', which is not one of"),
        (mock.patch.dict(optimizer.param_groups[0], rule=object()), "cannot save hyper-parameter 'rule' of param"),
        (mock.patch.dict(of_first, {"ema.fast": 1.0}), "the optimizer's state 'ema.fast' of parameter 'lay"),
        (mock.patch.object(type(model._model), "get_extra_state", **on_state), "no state here"),
    ):
        with change:
            fails(lambda: tz.save(path, model, optimizer), words)


def refuse_saves(rank: int, world_size: int, root: Path) -> None:
    model = sharded(fresh(Mlp), tz.Policy(stage=2))
    optimizer = adamw(model)
    take_step(model, optimizer)
    tz.save(root / "good", model, optimizer)
    refuse_disks(root, rank, model, optimizer)
    refuse_values(root / "next", rank, model, optimizer)
    with model.no_sync():
        model(torch.ones(2, 7)).sum().backward()
    fails(lambda: tz.save(root / "next", model, optimizer), "cannot save: no_sync still holds unreduced gradients")
    model.zero_grad()
    tz.load(root / "latest", model, optimizer)


def test_a_failed_save_gives_every_rank_the_reason_and_changes_nothing(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, refuse_saves, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "good", "latest"]
    manifest.require_no_faults(tmp_path / "good", manifest.read(tmp_path / "good").files)


def let_rates_differ(rank: int, world_size: int, root: Path) -> None:
    """Give each rank's scheduler its own loss; then let rates be tensors that differ."""
    for stage in (0, 3):
        model = sharded(fresh(Mlp), stage)
        first, *rest = model.parameters()
        optimizers = [torch.optim.SGD([first], 0.5), torch.optim.AdamW([{"params": [param]} for param in rest], 0.5)]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[1], patience=0, factor=0.5)
        save = partial(tz.save, root / f"{stage}", model, optimizers)
        save(extra={"schedule": scheduler})
        for loss in (1.0, 0.5 + rank):
            scheduler.step(loss)
        words = "'lr' of group 0 of AdamW differs between ranks: rank 0 has 0.5, rank 1 has 0.25; set it alike on every"
        fails(save, words)
        fails(partial(save, wait=False), "give a scheduler such as ReduceLROnPlateau the mean of its metric over ranks")
        for number, group in enumerate(optimizers[1].param_groups):
            group["lr"] = torch.tensor(0.5 + number * rank)
        fails(save, "'lr' of group 1 of AdamW differs between ranks: rank 0 has 0.5, rank 1 has 1.5")


def test_options_that_differ_between_ranks_are_not_saved(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, let_rates_differ, tmp_path)


# Asynchronous saves


def save_in_background(rank: int, world_size: int, root: Path) -> None:
    model = sharded(fresh(Mlp), 3)
    optimizer = adamw(model)
    take_step(model, optimizer)
    train_during_save(root, model, optimizer)
    tell_errors(root, rank, model, optimizer)
    wait_for_saves(root, model, optimizer)


def train_during_save(root: Path, model: Any, optimizer: Any) -> None:
    """Train while the writer is held up; check that the checkpoint has the values from before."""
    before = state_of(model, optimizer)
    go_on, write = threading.Event(), HashedFile.write
    groups, make_group = list[tuple[Any, Any]](), dist.new_group  # time-outs that groups are made with, and groups

    def new_group(*args: Any, **options: Any) -> Any:
        groups.append((args[1], make_group(*args, **options)))
        return groups[-1][1]

    def write_later(file: Any, data: Any) -> int:
        assert go_on.wait(30)
        return write(file, data)

    with mock.patch.object(HashedFile, "write", write_later), mock.patch.object(dist, "new_group", new_group):
        saved = tz.save(root / "a", model, optimizer, wait=False, max_to_keep=1)
        for _ in range(2):
            take_step(model, optimizer)
            trained = state_of(model, optimizer)
        assert not saved.done(), "training waited"
        assert not (root / "a").exists()
        go_on.set()
        assert saved.result(30) == root / "a"
    ((timeout, group),) = groups
    assert timeout_of(group, CPU) >= 5 * timeout  # gloo waits for a connection five times as long
    assert timeout_of(group, CPU) == timeout_of(model.state.group, CPU)
    tz.load(root / "latest", model, optimizer)
    assert differing(state_of(model, optimizer), before) == []
    assert differing(trained, before) != []


def tell_errors(root: Path, rank: int, model: Any, optimizer: Any) -> None:
    """Check that the result, a warning and the next save give the error."""
    full = "cannot write __1_0.distcp: the disk is full"
    with warnings.catch_warnings(record=True) as caught, full_disk(0 if rank == 1 else 10**9):
        warnings.simplefilter("always")
        fails(tz.save(root / "b", model, optimizer, wait=False).result, full)
        dist.barrier()
    warned = [str(warning.message) for warning in caught if "asynchronous" in str(warning.message)]
    assert [full in warning for warning in warned] == [True], warned
    error = error_of(lambda: tz.save(root / "c", model, optimizer, wait=False))
    assert error.startswith("RuntimeError: the previous asynchronous save failed: "), error
    assert error.endswith("; call save again"), error


def wait_for_saves(root: Path, model: Any, optimizer: Any) -> None:
    tz.save(root / "c1", model, optimizer, wait=False)
    tz.save(root / "c2", model, optimizer, wait=False, max_to_keep=2).result()
    with torch.no_grad():
        model.get_parameter("layers.0.weight").add_(1)
    before = state_of(model, optimizer)
    write, delays = HashedFile.write, iter([0.5])  # before the first write
    with mock.patch.object(HashedFile, "write", lambda *args: time.sleep(next(delays, 0.0)) or write(*args)):
        tz.save(root / "c3", model, optimizer, wait=False, max_to_keep=2)
        take_step(model, optimizer)
        tz.load(root / "latest", model, optimizer)  # waits for the save on every rank
    assert differing(state_of(model, optimizer), before) == []


def test_an_asynchronous_save_lets_training_go_on_and_loses_no_error(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, save_in_background, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c2", "c3", "latest"]


# Ignored parameters, and several copies of a model


class SharedAndExpert(nn.Module):
    """A model with an expert that ranks do not share, and with an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = nn.Linear(7, 7), nn.Linear(7, 7)
        self.note = "as built"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def build(rank: int, value: int) -> tuple[Any, Any]:
    module = fresh(SharedAndExpert)
    with torch.no_grad():
        module.expert.weight.fill_(value + rank)
    model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3, ignored=("expert",))])
    return model, adamw(model)


def save_ignored(rank: int, world_size: int, root: Path) -> None:
    model, optimizer = build(rank, 10)
    take_step(model, optimizer)
    model._model.note = "saved"
    tz.save(root / "apart", model, optimizer)
    loaded, loaded_optimizer = build(rank, 50)
    tz.load(root / "apart", loaded, loaded_optimizer)
    assert differing(state_of(loaded, loaded_optimizer), state_of(model, optimizer)) == []
    experts = [trained.get_parameter("expert.weight") for trained in (model, loaded)]
    assert torch.equal(*experts), experts
    assert torch.equal(optimizer.state[experts[0]]["exp_avg"], loaded_optimizer.state[experts[1]]["exp_avg"])
    assert loaded._model.note == "saved"


def load_ignored_from_torch(rank: int, world_size: int, root: Path) -> None:
    """Load another tool's checkpoint, which has one value for all ranks."""
    models = []
    for value in (1.0 + rank, 50.0):
        module = fresh(Mlp)
        with torch.no_grad():
            module.layers[1].bias.fill_(value)
        models.append(thunder.jit(module, transforms=[tz.ZeroTransform(stage=3, ignored=("layers.1",))]))
    torch_dcp.save({"model": models[0].state_dict()}, checkpoint_id=root / "torchs")
    tz.load(root / "torchs", models[1], verify_files=False)
    bias = models[1].get_parameter("layers.1.bias")
    assert bias.eq(bias[0]).all(), bias
    assert bias[0] in range(1, 1 + world_size), bias


def load_ignored_elsewhere(rank: int, world_size: int, root: Path) -> None:
    words = f"cannot load on {world_size} ranks: the checkpoint has values of ignored parameters from each of 2"
    fails(lambda: tz.load(root / "apart", *build(rank, 10)), words)


def test_each_rank_gets_its_ignored_parameters_back(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, save_ignored, tmp_path)
    ranks_pool.run(2, load_ignored_from_torch, tmp_path)
    for world_size in (1, 3):
        ranks_pool.run(world_size, load_ignored_elsewhere, tmp_path)


def save_copies(rank: int, world_size: int, root: Path) -> None:
    """Save two copies of a model, on two ranks each; load into four shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = thunder.jit(fresh(Zoo), transforms=[tz.ZeroTransform(stage=3, mesh=mesh)])
    optimizer = adamw(model)
    take_step(model, optimizer)
    tz.save(root / "copies", model, optimizer, extra={"rng": torch.get_rng_state()})
    loaded = sharded(Zoo(), 3)
    loaded_optimizer = adamw(loaded)
    assert len(tz.load(root / "copies", loaded, loaded_optimizer).of_rank) == world_size
    assert differing(state_of(loaded, loaded_optimizer), state_of(model, optimizer)) == []


@pytest.mark.slow
def test_several_copies_are_written_once(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(4, save_copies, tmp_path)
    for stored in read_metadata(tmp_path / "copies").state_dict_metadata.values():
        if not isinstance(stored, torch_dcp.BytesStorageMetadata):
            assert sum(chunk.sizes.numel() for chunk in stored.chunks) == stored.size.numel()
