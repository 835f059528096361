"""``tz.save`` and ``tz.load`` on real ranks: resumed training, FSDP2 and DDP, damage, and asynchronous saves.

All pairs of worlds and stages are in ``tests/pure/test_checkpoint_worlds.py``, with simulated ranks.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thunder_zero as tz
from tests.harness.models import Mlp, Small, Zoo, error, fresh, sharded
from tests.harness.ranks import RanksPool
from thunder_zero.checkpoint import manifest
from thunder_zero.checkpoint.dcp_read import read_metadata
from thunder_zero.checkpoint.hashed_file import HashedFile
from thunder_zero.runtime.sharded_model import sharded_model

import thunder

BEFORE, AFTER = 2, 10  # steps
ROWS = 12  # of a batch over all ranks


def adamw(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr)


def train(model: Any, optimizer: Any, scheduler: Any, rank: int, world_size: int, steps: range) -> None:
    for step in steps:
        batch = torch.randint(0, 9, (ROWS, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch.chunk(world_size)[rank]).square().mean().backward()
        optimizer.step()
        scheduler.step()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer with state, without a forward that would be compiled."""
    for param in model.parameters():
        if param.requires_grad:
            param.grad = param.detach().cos() * (param.detach() != 0)  # padding stays 0
    optimizer.step()


def state_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Everything in full, on each rank."""
    full = {name: value for name, value in tz.full_state_dict(model).items() if isinstance(value, Tensor)}
    state = sharded_model(model).state
    for path, shard in state.shards.items():
        for key, value in optimizer.state.get(shard, {}).items():
            value = torch.as_tensor(value)
            rows = value.shape == shard.shape
            full[f"{path} {key}"] = state.gather_now(state.plan.by_name[path], value) if rows else value.clone()
    return full


def same(found: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """The names of what differs."""
    return [name for name in found.keys() | right.keys() if name not in found or not found[name].equal(right[name])]


# Resuming


def interrupted(rank: int, world_size: int, root: Path) -> list[dict[str, Tensor]]:
    """Saves in the middle; goes on; loads into the same model and repeats the steps: the same bits."""
    results = []
    for stage in (0, 1, 2, 3):
        model = sharded(fresh(Small), stage)
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(model, optimizer, scheduler, rank, world_size, range(BEFORE))
        tz.save(root / f"stage{stage}", model, optimizer, extra={"scheduler": scheduler, "position": rank})
        train(model, optimizer, scheduler, rank, world_size, range(BEFORE, BEFORE + AFTER))
        uninterrupted = state_of(model, optimizer)
        loaded = tz.load(root / f"stage{stage}", model, optimizer, extra={"scheduler": scheduler})
        assert [extra["position"] for extra in loaded.of_rank] == list(range(world_size))
        assert loaded.own["position"] == rank
        assert scheduler.last_epoch == BEFORE
        train(model, optimizer, scheduler, rank, world_size, range(BEFORE, BEFORE + AFTER))
        assert same(state_of(model, optimizer), uninterrupted) == []
        results.append(uninterrupted)
    return results


def resumed(rank: int, world_size: int, root: Path, pairs: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
    results = []
    for stage, to_stage in pairs:
        torch.manual_seed(9)
        model = sharded(Small(), to_stage)
        optimizer = adamw(model, lr=3.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
        loaded = tz.load(root / f"stage{stage}", model, optimizer, extra={"scheduler": scheduler})
        assert loaded.own.keys() == {"scheduler"}  # which all ranks saved alike, unlike their positions
        train(model, optimizer, scheduler, rank, world_size, range(BEFORE, BEFORE + AFTER))
        results.append(state_of(model, optimizer))
    return results


def test_training_goes_on_in_another_world_and_stage(ranks_pool: RanksPool, tmp_path: Path) -> None:
    right = ranks_pool.run(3, interrupted, tmp_path, timeout=110)[0]
    for world_size, pairs in ((2, [(0, 3), (3, 1)]), (1, [(2, 0)])):
        results = ranks_pool.run(world_size, resumed, tmp_path, pairs, timeout=110)[0]
        for found, (stage, _) in zip(results, pairs, strict=True):
            assert found.keys() == right[stage].keys()
            for name, value in right[stage].items():
                assert error(found[name], value) < 1e-4, (stage, name)


# FSDP2 and DDP


def plain(world_size: int, kind: str) -> tuple[Any, torch.optim.Optimizer]:
    """torch's own model of that kind, with other values."""
    torch.manual_seed(5)
    module: Any = Mlp()
    if kind == "fsdp2":
        for layer in module.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
        fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    else:
        module = DistributedDataParallel(module)
    return module, adamw(module, lr=1.0)


def full_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Everything of torch's own model in full, in the words of :func:`state_of`."""

    def whole(value: Any) -> Tensor:
        return value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value

    found = {name.removeprefix("module."): whole(param.detach()) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{name.removeprefix('module.')} {key}"] = whole(value)
    return found


def exchange(rank: int, world_size: int, root: Path) -> list[list[str]]:
    """Ours to torch's and torch's to ours, by plain DCP on torch's side; what differs."""
    differences = []
    for kind in ("fsdp2", "ddp"):
        for stage in (0, 1, 3):
            model = sharded(fresh(Mlp), stage)
            optimizer = adamw(model, lr=0.05)
            stepped(model, optimizer)
            ours = state_of(model, optimizer)
            tz.save(root / f"ours-{kind}-{stage}", model, optimizer)
            theirs, their_optimizer = plain(world_size, kind)
            in_model, in_optimizer = get_state_dict(theirs, their_optimizer)
            nested = {"model": in_model, "optim": in_optimizer}
            torch_dcp.load(nested, checkpoint_id=root / f"ours-{kind}-{stage}")
            set_state_dict(theirs, their_optimizer, model_state_dict=nested["model"], optim_state_dict=nested["optim"])
            differences.append(same(full_of(theirs, their_optimizer), ours))
            assert their_optimizer.param_groups[0]["lr"] == 0.05

            theirs, their_optimizer = plain(world_size, kind)
            stepped(theirs, their_optimizer)
            in_model, in_optimizer = get_state_dict(theirs, their_optimizer)
            torch_dcp.save({"model": in_model, "optim": in_optimizer}, checkpoint_id=root / f"theirs-{kind}-{stage}")
            tz.load(root / f"theirs-{kind}-{stage}", model, optimizer, check=False)
            differences.append(same(state_of(model, optimizer), full_of(theirs, their_optimizer)))
            assert optimizer.param_groups[0]["lr"] == 1.0
            refused = refusal(partial(tz.load, root / f"theirs-{kind}-{stage}", model, optimizer))
            assert "it has no manifest.json" in refused, refused
    return differences


@pytest.mark.parametrize("world_size", [1, 3])
def test_fsdp2_and_ddp_read_ours_and_we_theirs(ranks_pool: RanksPool, tmp_path: Path, world_size: int) -> None:
    for differences in ranks_pool.run(world_size, exchange, tmp_path):
        assert differences == [[]] * 12


# All or nothing


def flip(path: Path, at: float = 0.5) -> None:
    """Another value in one byte of a file."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("a flipped bit", lambda at: flip(at / "__1_0.distcp"), "__1_0.distcp was changed"),
    ("a cut file", lambda at: cut(at / "__0_0.distcp"), "__0_0.distcp has"),
    ("a missing file", lambda at: (at / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    ("flipped metadata", lambda at: flip(at / ".metadata"), ".metadata was changed"),
    ("no metadata", lambda at: (at / ".metadata").unlink(), ".metadata is missing"),
    ("a flipped manifest", lambda at: flip(at / "manifest.json", 0.01), "manifest.json is damaged"),
    ("no manifest", lambda at: (at / "manifest.json").unlink(), "has no manifest.json"),
    ("a file of another", lambda at: shutil.copy(at.parent / "other/__0_0.distcp", at), "__0_0.distcp"),
    ("nothing", shutil.rmtree, "there is no checkpoint at"),
]


class Stubborn:
    """An extra that does not take what rank 1 gives it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.value = rank, "as it was"

    def state_dict(self) -> dict[str, str]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        if self.rank == 1 and state_dict["value"] == "saved":
            raise KeyError("stubborn")
        self.value = state_dict["value"]


def damaged(rank: int, world_size: int, root: Path) -> dict[str, tuple[str, list[str]]]:
    """Each damage: what load says, and what of model and optimizer it changed."""
    model = sharded(fresh(Mlp), 3)
    optimizer = adamw(model)
    stepped(model, optimizer)
    stubborn = Stubborn(rank)
    with mock.patch.object(stubborn, "value", "saved"):
        tz.save(root / "good", model, optimizer, extra={"stubborn": stubborn})
    stepped(model, optimizer)
    tz.save(root / "other", model, optimizer)
    stepped(model, optimizer)
    before = state_of(model, optimizer)
    results = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        told = refusal(call)
        results[name] = told, same(state_of(model, optimizer), before)

    for name, damage, _ in DAMAGES:
        if rank == 0:
            shutil.copytree(root / "good", root / name)
            damage(root / name)
        dist.barrier()
        attempt(name, lambda at=root / name: tz.load(at, model, optimizer))
    wide = sharded(fresh(Mlp, 8), 3)
    tz.save(root / "wide", wide)
    attempt("another shape", lambda: tz.load(root / "wide", model))
    tz.save(root / "zoo", sharded(fresh(Zoo), 2))
    attempt("another model", lambda: tz.load(root / "zoo", model))
    half = sharded(fresh(Mlp).bfloat16(), 1)
    tz.save(root / "half", half)
    attempt("another dtype", lambda: tz.load(root / "half", model))
    attempt("no optimizer", lambda: tz.load(root / "wide", wide, adamw(wide)))
    two = torch.optim.AdamW([{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:]}])
    attempt("other groups", lambda: tz.load(root / "good", model, two))
    few = torch.optim.AdamW(list(model.parameters())[:2])
    attempt("fewer parameters", lambda: tz.load(root / "good", model, few))
    attempt("a stranger's optimizer", lambda: tz.load(root / "good", model, adamw(nn.Linear(2, 2))))
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    stepped(model, sgd)
    tz.save(root / "sgd", model, sgd)
    stepped(model, optimizer)
    before = state_of(model, optimizer)
    attempt("SGD's into AdamW", lambda: tz.load(root / "sgd", model, optimizer))
    attempt("AdamW's into SGD", lambda: tz.load(root / "good", model, sgd))
    stepped(model, sgd)  # as if nothing had been tried
    before = state_of(model, optimizer)
    with model.no_sync():
        model(torch.ones(2, 7)).sum().backward()
    attempt("an open accumulation", lambda: tz.load(root / "good", model, optimizer))
    model.zero_grad()
    attempt("an optimizer on rank 0 alone", lambda: tz.load(root / "good", model, None if rank else optimizer))
    attempt("no such extra", lambda: tz.load(root / "good", model, optimizer, extra={"scheduler": stubborn}))
    attempt("no state_dict", lambda: tz.load(root / "good", model, optimizer, extra={"stubborn": 3}))
    try:
        tz.load(root / "good", model, optimizer, extra={"stubborn": stubborn})
    except (KeyError, RuntimeError) as refused:
        results["a stubborn extra"] = str(refused), same(state_of(model, optimizer), before)
    assert stubborn.value == "as it was"
    attempt("another path on rank 1", lambda: tz.load(root / f"good{rank}", model, optimizer))
    tz.load(root / "good", model, optimizer)
    assert same(state_of(model, optimizer), before)
    return results


REFUSED = {
    **{name: sentence for name, _, sentence in DAMAGES},
    "another shape": "another model: model.layers.0.weight has shape (8, 8)",
    "another model": "another model (missing: none; unexpected: 'model.empty', 'model.frozen', 'model.lower.bias'",
    "another dtype": "dtype torch.bfloat16 in it, shape (7, 7) and dtype torch.float32 here",
    "no optimizer": "the checkpoint has no optimizer",
    "other groups": "has 1 parameter groups, this one has 2",
    "fewer parameters": "other parameters (missing: none; unexpected: 'layers.1.bias'",
    "a stranger's optimizer": "none of the model's",
    "SGD's into AdamW": "the checkpoint's optimizer is SGD, this one is AdamW",
    "AdamW's into SGD": "the checkpoint's optimizer is AdamW, this one is SGD",
    "an open accumulation": "cannot load: no_sync still holds unreduced gradients of the current weights",
    "an optimizer on rank 0 alone": "the number of optimizers differs between ranks",
    "no such extra": "the checkpoint has no extra 'scheduler'; it has ['stubborn']",
    "no state_dict": "cannot load into the extra 'stubborn': an object of type int has no state_dict",
    "a stubborn extra": "stubborn",
    "another path on rank 1": "the path to load from differs between ranks",
}


def test_damage_is_told_on_every_rank_and_changes_nothing(ranks_pool: RanksPool, tmp_path: Path) -> None:
    for results in ranks_pool.run(2, damaged, tmp_path):
        assert results.keys() == REFUSED.keys()
        for name, (told, changed) in results.items():
            assert REFUSED[name] in told, (name, told)
            assert changed == [], name


# Saves that fail


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """Within: the disk is full after that many bytes of a file."""

    def write(file: Any, data: Any) -> int:
        if file.tell() + len(data) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(file, data)

    whole = HashedFile.write
    with mock.patch.object(HashedFile, "write", write):
        yield


class Strange(torch.optim.SGD):
    """Has a state of neither the parameter's shape nor one number."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["factor"] = torch.ones(3)


def refused_saves(rank: int, world_size: int, root: Path) -> dict[str, str]:
    model = sharded(fresh(Mlp), 2)
    optimizer = adamw(model)
    stepped(model, optimizer)
    tz.save(root / "good", model, optimizer)
    told = {}
    for name, after in (("data", 3000), ("first byte", 0)):
        with full_disk(after if rank == 1 else 10**9):
            told[f"full disk on rank 1, {name}"] = refusal(lambda: tz.save(root / "next", model, optimizer))
    with full_disk(8000 if rank == 0 else 10**9):  # the metadata is longer than rank 0's data
        told["full disk on rank 0"] = refusal(lambda: tz.save(root / "next", model, None))
    (root / "file").touch()
    told["a file"] = refusal(lambda: tz.save(root / "file", model, optimizer))
    told["keep"] = refusal(lambda: tz.save(root / "next", model, optimizer, max_to_keep=0))
    odd = {"odd": object() if rank else 1}
    told["an extra"] = refusal(lambda: tz.save(root / "next", model, optimizer, extra=odd))
    told["a model"] = refusal(lambda: tz.save(root / "next", model, optimizer, extra={"ema": model}))
    told["an optimizer"] = refusal(lambda: tz.save(root / "next", model, extra={"second": optimizer}))
    told["twice"] = refusal(lambda: tz.save(root / "next", model, [optimizer, adamw(model)]))
    with mock.patch.dict(optimizer.state, {"total": torch.ones(3)}):
        told["no parameter"] = refusal(lambda: tz.save(root / "next", model, optimizer))
    with mock.patch.dict(optimizer.param_groups[0], {"rule": object()}):
        told["hyper-parameter"] = refusal(lambda: tz.save(root / "next", model, optimizer))
    told["no mapping"] = refusal(lambda: tz.save(root / "next", model, extra=optimizer))
    told["extras of one rank"] = refusal(lambda: tz.save(root / "next", model, extra={"rank 1's": 1} if rank else {}))
    told["inside"] = refusal(lambda: tz.save(root / "good" / "next", model, optimizer))
    part = adamw(model)
    if rank == 0:
        stepped(model, part)
    told["rank 0 stepped alone"] = refusal(lambda: tz.save(root / "next", model, part))
    with mock.patch.dict(optimizer.state[next(model.parameters())], {"ema.fast": 1.0}):
        told["a dot"] = refusal(lambda: tz.save(root / "next", model, optimizer))
    own = {"side_effect": ValueError("no state here")} if rank else {"return_value": 3}
    with mock.patch.object(type(model._model), "get_extra_state", **own):
        told["extra state on rank 1"] = refusal(lambda: tz.save(root / "next", model))
    told["latest"] = refusal(lambda: tz.save(root / "latest", model, optimizer))
    told["paths"] = refusal(lambda: tz.save(root / f"next{rank}", model, optimizer))
    strange = Strange(model.parameters(), 0.1)
    strange.step()
    told["state"] = refusal(lambda: tz.save(root / "next", model, strange))
    with model.no_sync():
        model(torch.ones(2, 7)).sum().backward()
    told["open"] = refusal(lambda: tz.save(root / "next", model, optimizer))
    model.zero_grad()
    tz.load(root / "latest", model, optimizer)
    return told


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (OSError, RuntimeError, TypeError, ValueError) as failure:
        return str(failure)
    return "nothing"


def test_a_save_that_fails_leaves_what_was_there(ranks_pool: RanksPool, tmp_path: Path) -> None:
    sentences = {
        "full disk on rank 1, data": "cannot write __1_0.distcp: the disk is full",
        "full disk on rank 1, first byte": "cannot write __1_0.distcp: the disk is full",
        "full disk on rank 0": ": the disk is full; no part of this checkpoint is visible",
        "a file": "exists and is not a checkpoint",
        "keep": "max_to_keep is 0",
        "an extra": "the extra 'odd': torch.load(weights_only=True) cannot read an object of type object",
        "a model": "the extra 'ema' is a model",
        "an optimizer": "the extra 'second' is an optimizer of a sharded model",
        "twice": "parameter 'layers.0.weight' is in 2 optimizers",
        "no parameter": "AdamW keeps a state for 'total', which is none of the parameters",
        "hyper-parameter": "cannot save hyper-parameter 'rule' of parameter group 0: torch.load",
        "no mapping": "pass a mapping from names to values, such as {'scheduler': scheduler}",
        "extras of one rank": "the list of names in extra differs between ranks: rank 0 has [], rank 1 has",
        "inside": "good: it is a checkpoint, which a save replaces as a whole",
        "rank 0 stepped alone": "the optimizer's state of parameter 'layers.0.weight' differs between ranks",
        "a dot": "cannot save the optimizer's state 'ema.fast' of parameter 'layers.0.weight'",
        "extra state on rank 1": "no state here",
        "latest": "are reserved",
        "paths": "the path to save at differs between ranks",
        "state": "'factor' of parameter 'layers.0.weight' has shape (3,)",
        "open": "cannot save: no_sync still holds unreduced gradients of the current weights",
    }
    for told in ranks_pool.run(2, refused_saves, tmp_path):
        assert told.keys() == sentences.keys()
        for name, sentence in sentences.items():
            assert sentence in told[name], (name, told[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "good", "latest"]
    good = manifest.read(tmp_path / "good")
    assert manifest.find_faults(tmp_path / "good", good.files) == []


# Asynchronous saves


def asynchronous(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Training goes on, in steps with collectives, while the writer is held up; what is saved is of before."""
    model = sharded(fresh(Mlp), 3)
    optimizer = adamw(model)
    stepped(model, optimizer)
    before = state_of(model, optimizer)
    go_on = threading.Event()
    whole = HashedFile.write

    def held_up(file: Any, data: Any) -> int:
        assert go_on.wait(30)
        return whole(file, data)

    with mock.patch.object(HashedFile, "write", held_up):
        saved = tz.save(root / "a", model, optimizer, wait=False, max_to_keep=1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
        results: dict[str, Any] = {"trained while writing": not saved.done() and not (root / "a").exists()}
        go_on.set()
        results["path"] = saved.result(30)
    trained = state_of(model, optimizer)
    tz.load(root / "latest", model, optimizer)
    results["saved"] = same(state_of(model, optimizer), before), bool(same(trained, before))
    with warnings.catch_warnings(record=True) as heard, full_disk(0 if rank == 1 else 10**9):
        warnings.simplefilter("always")
        failed = tz.save(root / "b", model, optimizer, wait=False)
        results["result"] = refusal(failed.result)
        dist.barrier()
    results["warned"] = [str(warning.message) for warning in heard if "asynchronous" in str(warning.message)]
    results["next"] = refusal(lambda: tz.save(root / "c", model, optimizer, wait=False))
    tz.save(root / "c1", model, optimizer, wait=False)
    tz.save(root / "c2", model, optimizer, wait=False, max_to_keep=2).result()
    with torch.no_grad():
        model.get_parameter("layers.0.weight").add_(1)
    before = state_of(model, optimizer)
    with mock.patch.object(HashedFile, "write", lambda *args: time.sleep(0.01) or whole(*args)):
        tz.save(root / "c3", model, optimizer, wait=False, max_to_keep=2)
        stepped(model, optimizer)
        tz.load(root / "latest", model, optimizer)  # of all ranks the one that is being saved
    results["loaded while saving"] = same(state_of(model, optimizer), before)
    return results


def test_an_asynchronous_save_lets_training_go_on_and_loses_no_error(ranks_pool: RanksPool, tmp_path: Path) -> None:
    for results in ranks_pool.run(2, asynchronous, tmp_path):
        assert results["trained while writing"]
        assert results["path"] == tmp_path / "a"
        assert results["saved"] == ([], True)
        full = "cannot write __1_0.distcp: the disk is full"
        assert full in results["result"]
        assert [full in warning for warning in results["warned"]] == [True]
        assert results["next"].startswith("the previous asynchronous save failed: ")
        assert results["loaded while saving"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c2", "c3", "latest"]


# Parameters apart, and several copies of a model


class Apart(nn.Module):
    """Each rank has an expert of its own, and modules have state of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = nn.Linear(7, 7), nn.Linear(7, 7)
        self.note = "as built"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def apart(rank: int, world_size: int, root: Path, to_world: int) -> list[Any]:
    def build(seed: int) -> tuple[Any, Any]:
        module = fresh(Apart)
        with torch.no_grad():
            module.expert.weight.fill_(seed + rank)
        model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3, ignored=("expert",))])
        return model, adamw(model)

    model, optimizer = build(10)
    if to_world == world_size:
        stepped(model, optimizer)
        model._model.note = "saved"
        tz.save(root / "apart", model, optimizer)
    before = state_of(model, optimizer)
    weight, moment = model.get_parameter("expert.weight"), optimizer.state.get(model.get_parameter("expert.weight"))
    other, other_optimizer = build(50)
    told = refusal(lambda: tz.load(root / "apart", other, other_optimizer))
    if told != "nothing":
        return [told]
    loaded = other_optimizer.state[other.get_parameter("expert.weight")]
    return [
        same(state_of(other, other_optimizer), before),
        torch.equal(weight, other.get_parameter("expert.weight")),
        torch.equal(moment["exp_avg"], loaded["exp_avg"]),
        other._model.note,
    ]


def test_what_is_each_ranks_own(ranks_pool: RanksPool, tmp_path: Path) -> None:
    assert ranks_pool.run(2, apart, tmp_path, 2) == [[[], True, True, "saved"]] * 2
    for world_size in (1, 3):
        for (told,) in ranks_pool.run(world_size, apart, tmp_path, 2):
            assert (
                f"cannot load on {world_size} ranks: the checkpoint has values of ignored parameters from each of 2"
                in told
            )


def copies(rank: int, world_size: int, root: Path) -> list[str]:
    """Two copies of a model on two ranks each; then four shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = thunder.jit(fresh(Zoo), transforms=[tz.ZeroTransform(stage=3, mesh=mesh)])
    optimizer = adamw(model)
    stepped(model, optimizer)
    tz.save(root / "copies", model, optimizer, extra={"rng": torch.get_rng_state()})
    other = sharded(Zoo(), 3)
    other_optimizer = adamw(other)
    assert len(tz.load(root / "copies", other, other_optimizer).of_rank) == world_size
    return same(state_of(other, other_optimizer), state_of(model, optimizer))


def test_of_several_copies_one_is_written(ranks_pool: RanksPool, tmp_path: Path) -> None:
    assert ranks_pool.run(4, copies, tmp_path) == [[]] * 4
    for stored in read_metadata(tmp_path / "copies").state_dict_metadata.values():
        if not isinstance(stored, torch_dcp.BytesStorageMetadata):
            assert sum(chunk.sizes.numel() for chunk in stored.chunks) == stored.size.numel()
