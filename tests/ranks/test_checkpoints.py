"""``tz.save`` and ``tz.load`` on real ranks: resumed training, FSDP2 and DDP, damage, and asynchronous saves.

All pairs of worlds and stages are in ``tests/one/test_checkpoint_worlds.py``, with simulated ranks.
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.checkpoints import adamw, full_of, plain, same, state_of, stepped
from tests.harness.errors import raised
from tests.harness.models import Mlp, Small, Zoo, error, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from thunder_zero.checkpoint import manifest
from thunder_zero.checkpoint.dcp_read import read_metadata
from thunder_zero.checkpoint.hashed_file import HashedFile
from thunder_zero.comm.lost_ranks import CPU, timeout_of

import thunder

BOTH_FRONT_ENDS = True

STAGES = of_tier((3,), (0, 1, 2, 3))  # all pairs: tests/one/test_checkpoint_worlds.py
BEFORE, AFTER = 2, 10  # steps
ROWS = 12  # of a batch over all ranks


def train(model: Any, optimizer: Any, scheduler: Any, rank: int, world_size: int, steps: range) -> None:
    for step in steps:
        batch = torch.randint(0, 9, (ROWS, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch.chunk(world_size)[rank]).square().mean().backward()
        optimizer.step()
        scheduler.step()


# Resuming


def interrupted(rank: int, world_size: int, root: Path) -> list[dict[str, Tensor]]:
    """Saves in the middle; goes on; loads into the same model and repeats the steps: the same bits."""
    results = []
    for stage in STAGES:
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
    for world_size, pairs in of_tier([(2, [(3, 1)])], [(2, [(0, 3), (3, 1)]), (1, [(2, 0)])]):
        results = ranks_pool.run(world_size, resumed, tmp_path, pairs, timeout=110)[0]
        for found, (stage, _) in zip(results, pairs, strict=True):
            assert found.keys() == right[STAGES.index(stage)].keys()
            for name, value in right[STAGES.index(stage)].items():
                assert error(found[name], value) < 1e-4, (stage, name)


# FSDP2 and DDP


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
            nested: Any = {"model": in_model, "optim": in_optimizer}
            torch_dcp.load(nested, checkpoint_id=root / f"ours-{kind}-{stage}")
            set_state_dict(theirs, their_optimizer, model_state_dict=nested["model"], optim_state_dict=nested["optim"])
            differences.append(same(full_of(theirs, their_optimizer), ours))
            assert their_optimizer.param_groups[0]["lr"] == 0.05

            theirs, their_optimizer = plain(world_size, kind)
            stepped(theirs, their_optimizer)
            in_model, in_optimizer = get_state_dict(theirs, their_optimizer)
            torch_dcp.save({"model": in_model, "optim": in_optimizer}, checkpoint_id=root / f"theirs-{kind}-{stage}")
            tz.load(root / f"theirs-{kind}-{stage}", model, optimizer, verify_files=False)
            differences.append(same(state_of(model, optimizer), full_of(theirs, their_optimizer)))
            assert optimizer.param_groups[0]["lr"] == 1.0
            refused = raised(partial(tz.load, root / f"theirs-{kind}-{stage}", model, optimizer))
            assert "it has no manifest.json" in refused, refused
    return differences


@pytest.mark.parametrize("world_size", of_tier([3], [1, 3]))
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


@dataclass
class Attempts:
    """Loads that must fail: each one's message, and the parts of model and optimizer that it changed."""

    model: Any
    optimizer: torch.optim.Optimizer
    before: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, tuple[str, list[str]]] = field(default_factory=dict)

    def step(self) -> None:
        stepped(self.model, self.optimizer)
        self.before = state_of(self.model, self.optimizer)

    def attempt(self, name: str, path: Path, *arguments: Any, **options: Any) -> None:
        message = raised(lambda: tz.load(path, *(arguments or (self.model, self.optimizer)), **options))
        self.results[name] = message, same(state_of(self.model, self.optimizer), self.before)


def damaged(rank: int, world_size: int, root: Path) -> dict[str, tuple[str, list[str]]]:
    """Each damage and misuse: the message of load, and the parts of model and optimizer that it changed."""
    model = sharded(fresh(Mlp), 3)
    tried = Attempts(model, adamw(model))
    tried.step()
    stubborn = Stubborn(rank)
    with mock.patch.object(stubborn, "value", "saved"):
        tz.save(root / "good", model, tried.optimizer, extra={"stubborn": stubborn})
    tried.step()
    tz.save(root / "other", model, tried.optimizer)
    tried.step()
    for name, damage, _ in DAMAGES:
        if rank == 0:
            shutil.copytree(root / "good", root / name)
            damage(root / name)
        dist.barrier()
        tried.attempt(name, root / name)
    attempt_other_models(tried, root)
    attempt_other_optimizers(tried, root)
    attempt_misuse(tried, root, rank, stubborn)
    tz.load(root / "good", model, tried.optimizer)
    assert same(state_of(model, tried.optimizer), tried.before)
    return tried.results


def attempt_other_models(tried: Attempts, root: Path) -> None:
    wide = sharded(fresh(Mlp, 8), 3)
    tz.save(root / "wide", wide)
    tried.attempt("another shape", root / "wide", tried.model)
    tz.save(root / "zoo", sharded(fresh(Zoo), 2))
    tried.attempt("another model", root / "zoo", tried.model)
    tz.save(root / "half", sharded(fresh(Mlp).bfloat16(), 1))
    tried.attempt("another dtype", root / "half", tried.model)
    tried.attempt("no optimizer", root / "wide", wide, adamw(wide))


def attempt_other_optimizers(tried: Attempts, root: Path) -> None:
    """Steps at its end."""
    model, params = tried.model, list(tried.model.parameters())
    two = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    tried.attempt("other groups", root / "good", model, two)
    tried.attempt("fewer parameters", root / "good", model, torch.optim.AdamW(params[:2]))
    tried.attempt("a stranger's optimizer", root / "good", model, adamw(nn.Linear(2, 2)))
    sgd = torch.optim.SGD(params, 0.1, momentum=0.9)
    stepped(model, sgd)
    tz.save(root / "sgd", model, sgd)
    tried.step()
    tried.attempt("SGD's into AdamW", root / "sgd")
    tried.attempt("AdamW's into SGD", root / "good", model, sgd)
    stepped(model, sgd)  # as if nothing had been tried
    tried.before = state_of(model, tried.optimizer)


def attempt_misuse(tried: Attempts, root: Path, rank: int, stubborn: Stubborn) -> None:
    model, optimizer, good = tried.model, tried.optimizer, root / "good"
    with model.no_sync():
        model(torch.ones(2, 7)).sum().backward()
    tried.attempt("an open accumulation", good)
    model.zero_grad()
    tried.attempt("an optimizer on rank 0 alone", good, model, None if rank else optimizer)
    tried.attempt("no such extra", good, extra={"scheduler": stubborn})
    tried.attempt("no state_dict", good, extra={"stubborn": 3})
    try:
        tz.load(good, model, optimizer, extra={"stubborn": stubborn})
    except (KeyError, RuntimeError) as refused:
        tried.results["a stubborn extra"] = str(refused), same(state_of(model, optimizer), tried.before)
    assert stubborn.value == "as it was"
    tried.attempt("another path on rank 1", root / f"good{rank}")


REFUSED = {
    **{name: sentence for name, _, sentence in DAMAGES},
    "another shape": "another model: model.layers.0.weight has shape (8, 8)",
    "another model": "another model (missing: none; unexpected: 'model.empty', 'model.frozen', 'model.lower.bias'",
    "another dtype": "dtype torch.bfloat16 in it, shape (7, 7) and dtype torch.float32 here; build the",
    "no optimizer": "the checkpoint has no optimizer",
    "other groups": "has 1 parameter groups, this one has 2",
    "fewer parameters": "other parameters (missing: none; unexpected: 'layers.1.bias'",
    "a stranger's optimizer": "not one of this model's; build the optimizer on model.parameters()",
    "SGD's into AdamW": "the checkpoint's optimizer is SGD, this one is AdamW",
    "AdamW's into SGD": "the checkpoint's optimizer is AdamW, this one is SGD",
    "an open accumulation": "cannot load: no_sync still holds unreduced gradients of the current weights; run the last "
    "micro-batch outside no_sync and call optimizer.step(), or drop them with model.zero_grad()",
    "an optimizer on rank 0 alone": "the number of optimizers differs between ranks",
    "no such extra": "the checkpoint has no extra 'scheduler': it has ['stubborn']; leave it out of extra",
    "no state_dict": "cannot load into the extra 'stubborn': an object of type int has no state_dict",
    "a stubborn extra": "stubborn",
    "another path on rank 1": "the path to load from differs between ranks",
}


@pytest.fixture(scope="module")
def refused_loads(ranks_pool: RanksPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks_pool.run(2, damaged, tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("name", REFUSED)
def test_damage_is_told_on_every_rank_and_changes_nothing(refused_loads: list[dict[str, Any]], name: str) -> None:
    for results in refused_loads:
        told, changed = results[name]
        assert REFUSED[name] in told
        assert changed == []


def test_all_damages_have_a_case(refused_loads: list[dict[str, Any]]) -> None:
    assert all(results.keys() == REFUSED.keys() for results in refused_loads)


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

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param]["factor"] = torch.ones(3)


def refused_saves(rank: int, world_size: int, root: Path) -> dict[str, str]:
    model = sharded(fresh(Mlp), tz.Policy(stage=2, trust_optimizer=True))
    optimizer = adamw(model)
    stepped(model, optimizer)
    tz.save(root / "good", model, optimizer)
    told = {}
    for name, after in (("data", 3000), ("first byte", 0)):
        with full_disk(after if rank == 1 else 10**9):
            told[f"full disk on rank 1, {name}"] = raised(lambda: tz.save(root / "next", model, optimizer))
    with full_disk(8000 if rank == 0 else 10**9):  # the metadata is longer than rank 0's data
        told["full disk on rank 0"] = raised(lambda: tz.save(root / "next", model, None))
    (root / "file").touch()
    told["a file"] = raised(lambda: tz.save(root / "file", model, optimizer))
    told["keep"] = raised(lambda: tz.save(root / "next", model, optimizer, max_to_keep=0))
    odd = {"odd": object() if rank else 1}
    told["an extra"] = raised(lambda: tz.save(root / "next", model, optimizer, extra=odd))
    told["a model"] = raised(lambda: tz.save(root / "next", model, optimizer, extra={"ema": model}))
    told["an optimizer"] = raised(lambda: tz.save(root / "next", model, extra={"second": optimizer}))
    told["twice"] = raised(lambda: tz.save(root / "next", model, [optimizer, adamw(model)]))
    with mock.patch.dict(optimizer.state, {"total": torch.ones(3)}):
        told["no parameter"] = raised(lambda: tz.save(root / "next", model, optimizer))
    with mock.patch.dict(optimizer.param_groups[0], {"rule": object()}):
        told["hyper-parameter"] = raised(lambda: tz.save(root / "next", model, optimizer))
    told["no mapping"] = raised(lambda: tz.save(root / "next", model, extra=optimizer))  # type: ignore[arg-type]
    told["extras of one rank"] = raised(lambda: tz.save(root / "next", model, extra={"rank 1's": 1} if rank else {}))
    told["inside"] = raised(lambda: tz.save(root / "good" / "next", model, optimizer))
    part = adamw(model)
    if rank == 0:
        stepped(model, part)
    told["rank 0 stepped alone"] = raised(lambda: tz.save(root / "next", model, part))
    with mock.patch.dict(optimizer.state[next(model.parameters())], {"ema.fast": 1.0}):
        told["a dot"] = raised(lambda: tz.save(root / "next", model, optimizer))
    own = {"side_effect": ValueError("no state here")} if rank else {"return_value": 3}
    with mock.patch.object(type(model._model), "get_extra_state", **own):
        told["extra state on rank 1"] = raised(lambda: tz.save(root / "next", model))
    told["latest"] = raised(lambda: tz.save(root / "latest", model, optimizer))
    told["paths"] = raised(lambda: tz.save(root / f"next{rank}", model, optimizer))
    strange = Strange(model.parameters(), 0.1)
    strange.step()
    told["state"] = raised(lambda: tz.save(root / "next", model, strange))
    with model.no_sync():
        model(torch.ones(2, 7)).sum().backward()
    told["open"] = raised(lambda: tz.save(root / "next", model, optimizer))
    model.zero_grad()
    tz.load(root / "latest", model, optimizer)
    return told


def why_saves_fail() -> dict[str, str]:
    return {
        "full disk on rank 1, data": "cannot write __1_0.distcp: the disk is full",
        "full disk on rank 1, first byte": "cannot write __1_0.distcp: the disk is full",
        "full disk on rank 0": ": the disk is full; no part of this checkpoint is visible",
        "a file": "exists and is not a checkpoint",
        "keep": "max_to_keep is 0; pass how many to keep",
        "an extra": "the extra 'odd': torch.load(weights_only=True) cannot read an object of type object",
        "a model": "the extra 'ema' is a model",
        "an optimizer": "the extra 'second' is an optimizer of a sharded model",
        "twice": "parameter 'layers.0.weight' is in 2 optimizers",
        "no parameter": "AdamW has a state for 'total', which is not one of its parameters",
        "hyper-parameter": "cannot save hyper-parameter 'rule' of parameter group 0: torch.load",
        "no mapping": "pass a mapping from names to values, such as {'scheduler': scheduler}",
        "extras of one rank": "the list of names in extra differs between ranks: rank 0 has [], rank 1 has",
        "inside": "good: it is a checkpoint, which a save replaces as a whole",
        "rank 0 stepped alone": "the optimizer's state of parameter 'layers.0.weight' differs between ranks",
        "a dot": "cannot save the optimizer's state 'ema.fast' of parameter 'layers.0.weight'",
        "extra state on rank 1": "no state here",
        "latest": "are reserved",
        "paths": "the path to save at differs between ranks",
        "state": "'factor' of parameter 'layers.0.weight': it has shape (3,)",
        "open": "cannot save: no_sync still holds unreduced gradients of the current weights; run the last micro-batch",
    }


@pytest.fixture(scope="module")
def failed_saves(ranks_pool: RanksPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], Path]:
    """What each rank was told, and the folder that all wanted to save in."""
    root = tmp_path_factory.mktemp("saves")
    return ranks_pool.run(2, refused_saves, root), root


@pytest.mark.parametrize("name", why_saves_fail())
def test_a_save_that_fails_says_why_on_every_rank(failed_saves: tuple[list[dict[str, str]], Path], name: str) -> None:
    for told in failed_saves[0]:
        assert why_saves_fail()[name] in told[name]


def test_saves_that_fail_leave_what_was_there(failed_saves: tuple[list[dict[str, str]], Path]) -> None:
    results, root = failed_saves
    assert all(told.keys() == why_saves_fail().keys() for told in results)
    assert sorted(path.name for path in root.iterdir()) == ["file", "good", "latest"]
    good = manifest.read(root / "good")
    assert manifest.find_faults(root / "good", good.files) == []


# Asynchronous saves


@contextmanager
def groups_made() -> Iterator[list[tuple[Any, Any]]]:
    """Collect the time-out that each new group is made with, and the group."""
    made: list[tuple[Any, Any]] = []
    make_group = dist.new_group

    def new_group(*args: Any, **options: Any) -> Any:
        made.append((args[1], make_group(*args, **options)))
        return made[-1][1]

    with mock.patch.object(dist, "new_group", new_group):
        yield made


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

    with mock.patch.object(HashedFile, "write", held_up), groups_made() as made:
        saved = tz.save(root / "a", model, optimizer, wait=False, max_to_keep=1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
        results: dict[str, Any] = {"trained while writing": not saved.done() and not (root / "a").exists()}
        go_on.set()
        results["path"] = saved.result(30)
    ((while_made, group),) = made
    results["bounded"] = timeout_of(group, CPU) >= 5 * while_made  # gloo waits for a connection five times as long
    results["time-out"] = timeout_of(group, CPU) == timeout_of(model.state.group, CPU)
    trained = state_of(model, optimizer)
    tz.load(root / "latest", model, optimizer)
    results["saved"] = same(state_of(model, optimizer), before), bool(same(trained, before))
    with warnings.catch_warnings(record=True) as heard, full_disk(0 if rank == 1 else 10**9):
        warnings.simplefilter("always")
        failed = tz.save(root / "b", model, optimizer, wait=False)
        results["result"] = raised(failed.result)
        dist.barrier()
    results["warned"] = [str(warning.message) for warning in heard if "asynchronous" in str(warning.message)]
    results["next"] = raised(lambda: tz.save(root / "c", model, optimizer, wait=False))
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
        assert (results["bounded"], results["time-out"]) == (True, True)
        assert results["saved"] == ([], True)
        full = "cannot write __1_0.distcp: the disk is full"
        assert full in results["result"]
        assert [full in warning for warning in results["warned"]] == [True]
        assert results["next"].startswith("RuntimeError: the previous asynchronous save failed: ")
        assert results["next"].endswith("; call save again")
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
    told = raised(lambda: tz.load(root / "apart", other, other_optimizer))
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
