"""SIGKILL of a rank in the middle of a save: what was there stays, and nothing false is said.

A moment is one file operation: right before the rank makes a folder, opens a file, flushes, renames, links or deletes,
and in the middle of a write; and right before it makes the group of an asynchronous save. Ranks are forked, which takes
milliseconds, so a save runs in a process of its own, as pytest has threads.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import thunder_zero as tz
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import CAN_FORK, call_alone
from tests.harness.tiers import slow
from thunder_zero.checkpoint import background, folder, manifest
from thunder_zero.checkpoint.dcp_read import read_entries, read_metadata
from thunder_zero.checkpoint.dcp_write import HashedFile
from thunder_zero.comm import group

WORLD = 2
EVENTS = {"os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir"}  # audit events, raised before they happen
WRITE, FLUSH, GROUP = "write", "flush", "make the group"
SECONDS = 30.0  # the time that the surviving rank may take
BEFORE, AFTER = 1.0, 2.0  # the value of all parameters in the first and the second checkpoint

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="forks")


@dataclass(frozen=True)
class Save:
    """The second save; the first is "step-1"."""

    victim: int
    name: str
    wait: bool = True  # False: it is asynchronous


class Moments:
    """The names of a rank's file operations. The rank dies at the first operation of a name, or at a number."""

    def __init__(self, root: Path, deadly: str | int | None) -> None:
        self.root, self.deadly, self.names, self.armed = str(root), deadly, list[str](), False

    def one(self, name: str) -> None:
        if self.armed:
            if self.deadly in (name, len(self.names)):
                os.kill(os.getpid(), signal.SIGKILL)
            self.names.append(name)

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[1], str) and any(letter in args[1] for letter in "wxa+")
        if (event in EVENTS or writes) and str(args[0]).startswith(self.root):
            self.one(f"{event} {Path(args[0]).name}")

    @contextmanager
    def noted(self) -> Iterator[None]:
        write, flush, make_group = HashedFile.write, os.fsync, group.group_like

        def half(file: Any, data: Any) -> int:
            whole = bytes(data)
            write(file, whole[: len(whole) // 2])
            file.flush()
            self.one(WRITE)
            write(file, whole[len(whole) // 2 :])
            return len(whole)

        sys.addaudithook(self.heard)
        with (
            mock.patch.object(HashedFile, "write", half),
            mock.patch.object(os, "fsync", lambda handle: (self.one(FLUSH), flush(handle))),
            mock.patch.object(background, "group_like", lambda *args: (self.one(GROUP), make_group(*args))[1]),
            mock.patch.object(group, "LONGEST_WAIT_FOR_ADDRESS", timedelta(seconds=5)),
        ):
            self.armed = True
            yield
            self.armed = False


def rank_of(rank: int, root: Path, value: float, save: Save, deadly: str | int | None) -> None:
    """Run a rank: save a model whose parameters are all ``value``; record the outcome of ``save``, and the moments."""
    dist.init_process_group("gloo", init_method=f"file://{root}.store", rank=rank, world_size=WORLD)
    module = fresh(Mlp, 3, 2)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(value)
    model = sharded(module, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    for param in model.parameters():
        param.grad = param.detach().clone()  # so that the momentum is ``value``, too
    optimizer.step()
    moments, said = Moments(root, deadly if rank == save.victim else None), "saved"
    with moments.noted():
        try:
            options: Any = {"max_to_keep": 1, "wait": save.wait, "extra": {"value": value}}
            tz.save(root / save.name, model, optimizer, **options).result()
        except (OSError, RuntimeError) as error:
            said = str(error)
    Path(f"{root}.said{rank}").write_text(json.dumps([said, moments.names]))


def save_on_ranks(root: Path, value: float, save: Save, deadly: str | int | None = None) -> dict[int, list[Any]]:
    """What the surviving ranks recorded.

    Raises:
        TimeoutError: a rank hangs.
    """
    children = {}
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            try:
                rank_of(rank, root, value, save, deadly)
            finally:
                os._exit(0)
        children[child] = rank
    end = time.monotonic() + SECONDS
    living = set(children)
    while living:
        living -= {child for child in living if os.waitpid(child, os.WNOHANG)[0]}
        if time.monotonic() > end:
            for child in living:
                os.kill(child, signal.SIGKILL)
            raise TimeoutError(f"ranks {[children[child] for child in living]} hang: {save}, {deadly}")
        time.sleep(0.005)
    said = {rank: Path(f"{root}.said{rank}") for rank in range(WORLD)}
    return {rank: json.loads(path.read_text()) for rank, path in said.items() if path.exists()}


def value_of(at: Path) -> float:
    """Return the one value that everything in a whole checkpoint has."""
    manifest.require_no_faults(at, manifest.read(at).files)
    metadata = read_metadata(at)
    stored = metadata.state_dict_metadata.items()
    tensors = [key for key, of in stored if isinstance(of, TensorStorageMetadata)]
    read = read_entries(at, metadata, [*tensors, "rank0.extra", "rank1.extra"])
    values = [value["value"] if isinstance(value, dict) else value for value in read.values()]
    found = {float(number) for value in values for number in torch.as_tensor(value).flatten()}
    assert len(found) == 1, f"{at} mixes several saves: {found}"
    return found.pop()


def look(root: Path, save: Save, said: str) -> tuple[float, dict[str, float]]:
    """The value that ``latest`` leads to, and those of the visible checkpoints.

    Raises:
        AssertionError: a part of a checkpoint is visible; a rank says saved, and it is not; leftovers stay after the
            next saves.
    """
    latest = value_of(folder.locate(root / "latest"))
    visible = {at.name: value_of(at) for at in root.iterdir() if not at.name.startswith(".") and not at.is_symlink()}
    assert said != "saved" or visible.get(save.name) == AFTER, (said, visible)
    if save.name == "step-1":
        assert value_of(folder.locate(root / "step-1")) in (BEFORE, AFTER)  # also between two renames
    else:
        assert latest in visible.values(), (latest, visible)
    folder.prepare(root / "other")  # a save under another name: what is surely dead goes
    folder.abandon(root / "other")
    folders = [at for at in root.glob(".*") if at.is_dir() and not at.is_symlink()]
    kept = {at.name for at in folders if {file.name for file in at.iterdir()} - {"owner.json"}}
    assert kept <= {f".{save.name}.replaced"} - {f".{name}.replaced" for name in visible}, kept
    path = root / save.name
    folder.prepare(path)  # the save again, as after a restart
    (folder.staging_of(path) / "a").touch()
    folder.publish(path, 1, ())
    folder.prune(path, 1)
    assert sorted(at.name for at in root.iterdir()) == sorted([save.name, "latest"])
    return latest, visible


Moment = tuple[Save, str | int]


def kill(root: Path, moments: list[Moment] | Save) -> list[Any]:
    """After each kill: what ``latest`` is, what is visible, and what the other rank said. Of a save: kills at all
    moments but most writes."""
    torch.set_num_threads(1)
    save_on_ranks(root / "first", BEFORE, Save(0, "step-1"))
    if isinstance(moments, Save):
        shutil.copytree(root / "first", root / "count", symlinks=True)
        names = save_on_ranks(root / "count", AFTER, moments)[moments.victim][1]
        numbers = [number for number, name in enumerate(names) if name != WRITE or number % 100 == 50]
        moments = [(moments, number) for number in numbers]
    found = []
    for number, (save, moment) in enumerate(moments):
        at = root / f"{number}"
        shutil.copytree(root / "first", at, symlinks=True)
        said = save_on_ranks(at, AFTER, save, moment)
        assert said.keys() == {1 - save.victim}, (save, moment, said)
        words = said[1 - save.victim][0]
        found.append((*look(at, save, words), words))
    return found


OLD, NEW, BOTH = {"step-1": BEFORE}, {"step-1": AFTER}, {"step-1": BEFORE, "step-2": AFTER}
Row = tuple[Save, str, float, dict[str, float]]  # what dies when; what ``latest`` is then, and what is visible
FIRST: list[Row] = [(Save(0, "step-1"), "os.rename .step-1.saving", BEFORE, {})]  # between two renames
OTHERS: list[Row] = [
    (Save(0, "step-1"), "os.rename step-1", BEFORE, OLD),
    (Save(0, "step-1"), "os.rename .latest.moving", AFTER, NEW),
    (Save(0, "step-2"), WRITE, BEFORE, OLD),
    (Save(0, "step-2"), "os.rename .latest.moving", BEFORE, BOTH),
    (Save(0, "step-2"), "os.rename step-1", AFTER, BOTH),
    (Save(1, "step-2"), WRITE, BEFORE, OLD),
    (Save(0, "step-2", wait=False), "os.rename .step-2.saving", BEFORE, OLD),
    (Save(1, "step-2", wait=False), GROUP, BEFORE, OLD),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rows", [FIRST, *slow(OTHERS)], ids=["between two renames", "at other moments"])
def test_a_kill_leaves_a_whole_checkpoint(tmp_path: Path, rows: list[Row]) -> None:
    """What is visible is whole, ``latest`` leads to some of it, who says saved is right, and the next save works."""
    results = call_alone(kill, tmp_path, [(save, moment) for save, moment, _, _ in rows], timeout=110)
    for (save, moment, *right), (*found, said) in zip(rows, results, strict=True):
        assert found == right, (save, moment)
        if moment == GROUP:  # and not after half an hour, the group's time-out
            assert "rank 0 got no answer from rank 1" in said


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("victim", "name"), [(0, "step-1"), (0, "step-2"), (1, "step-2")])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, victim: int, name: str, wait: bool) -> None:
    assert call_alone(kill, tmp_path, Save(victim, name, wait), timeout=580)
