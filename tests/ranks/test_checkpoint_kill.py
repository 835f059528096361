"""SIGKILL of a rank in the middle of a save leaves whole checkpoints, and no rank claims a save that failed.

A rank is killed right before a file operation, in the middle of a write, or before it makes the group of an
asynchronous save. Ranks are forked from a process of their own, because pytest has threads.
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
from tests.harness.ranks import CAN_FORK, LONG, call_alone
from tests.harness.tiers import slow
from thunder_zero.checkpoint import folder, manifest
from thunder_zero.checkpoint import save as saving
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
    """The second save of a folder, whose first save is "step-1"; ``victim`` is the rank that dies."""

    victim: int
    name: str
    wait: bool = True  # False: asynchronous


class Moments:
    """The names of a rank's file operations; ``deadly`` is the name or the number of the one that kills the rank."""

    def __init__(self, root: Path, deadly: str | int | None) -> None:
        self.root, self.deadly, self.names, self.armed = str(root), deadly, list[str](), False

    def note(self, name: str) -> None:
        if self.armed:
            if self.deadly in (name, len(self.names)):
                os.kill(os.getpid(), signal.SIGKILL)
            self.names.append(name)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[1], str) and any(letter in args[1] for letter in "wxa+")
        if (event in EVENTS or writes) and str(args[0]).startswith(self.root):
            self.note(f"{event} {Path(args[0]).name}")

    @contextmanager
    def noting(self) -> Iterator[None]:
        write, flush, make_group = HashedFile.write, os.fsync, group.group_like

        def write_in_halves(file: Any, data: Any) -> int:
            whole = bytes(data)
            write(file, whole[: len(whole) // 2])
            file.flush()
            self.note(WRITE)
            write(file, whole[len(whole) // 2 :])
            return len(whole)

        sys.addaudithook(self.audit)
        with (
            mock.patch.object(HashedFile, "write", write_in_halves),
            mock.patch.object(os, "fsync", lambda handle: (self.note(FLUSH), flush(handle))),
            mock.patch.object(saving, "group_like", lambda *args: (self.note(GROUP), make_group(*args))[1]),
            mock.patch.object(group, "LONGEST_WAIT_FOR_ADDRESS", timedelta(seconds=5)),
        ):
            self.armed = True
            yield
            self.armed = False


def run_rank(rank: int, root: Path, value: float, save: Save, deadly: str | int | None) -> None:
    """Run a rank that saves a model of parameters ``value``; record the outcome and the moments in a file."""
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
    moments, outcome = Moments(root, deadly if rank == save.victim else None), "saved"
    with moments.noting():
        try:
            options: Any = {"max_to_keep": 1, "wait": save.wait, "extra": {"value": value}}
            tz.save(root / save.name, model, optimizer, **options).result()
        except (OSError, RuntimeError) as error:
            outcome = str(error)
    Path(f"{root}.said{rank}").write_text(json.dumps([outcome, moments.names]))


def save_on_ranks(root: Path, value: float, save: Save, deadly: str | int | None = None) -> dict[int, list[Any]]:
    """Return what the surviving ranks recorded, by rank.

    Raises:
        TimeoutError: a rank hangs.
    """
    children = {}
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            try:
                run_rank(rank, root, value, save, deadly)
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
    paths = {rank: Path(f"{root}.said{rank}") for rank in range(WORLD)}
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


def value_of(path: Path) -> float:
    """Return the value that all numbers of a whole checkpoint have."""
    manifest.require_no_faults(path, manifest.read(path).files)
    metadata = read_metadata(path)
    stored = metadata.state_dict_metadata.items()
    tensors = [key for key, kind in stored if isinstance(kind, TensorStorageMetadata)]
    read = read_entries(path, metadata, [*tensors, "rank0.extra", "rank1.extra"])
    values = [value["value"] if isinstance(value, dict) else value for value in read.values()]
    numbers = {float(number) for value in values for number in torch.as_tensor(value).flatten()}
    assert len(numbers) == 1, f"{path} mixes several saves: {numbers}"
    return numbers.pop()


def check_folder(root: Path, save: Save, outcome: str) -> tuple[float, dict[str, float]]:
    """Return the value of ``latest``, and the values of visible checkpoints by name; check that each is whole."""
    latest = value_of(folder.locate(root / "latest"))
    visible = {path.name: value_of(path) for path in root.iterdir() if path.name[0] != "." and not path.is_symlink()}
    assert outcome != "saved" or visible.get(save.name) == AFTER, (outcome, visible)
    if save.name == "step-1":
        assert value_of(folder.locate(root / "step-1")) in (BEFORE, AFTER)  # also between two renames
    else:
        assert latest in visible.values(), (latest, visible)
    folder.prepare(root / "other")  # a save under another name deletes what dead ranks left
    folder.abandon(root / "other")
    folders = [path for path in root.glob(".*") if path.is_dir() and not path.is_symlink()]
    leftovers = {path.name for path in folders if {file.name for file in path.iterdir()} - {"owner.json"}}
    assert leftovers <= {f".{save.name}.replaced"} - {f".{name}.replaced" for name in visible}, leftovers
    path = root / save.name
    folder.prepare(path)  # save again, as after a restart
    (folder.staging_of(path) / "a").touch()
    folder.publish(path, 1, ())
    folder.prune(path, 1)
    assert sorted(path.name for path in root.iterdir()) == sorted([save.name, "latest"])
    return latest, visible


Moment = tuple[Save, str | int]


def kill(root: Path, moments: list[Moment] | Save) -> list[Any]:
    """Return after each kill: the value of ``latest``, the visible values, and the other rank's outcome.

    A ``Save`` in place of moments means kills at all its moments, except most writes.
    """
    torch.set_num_threads(1)
    save_on_ranks(root / "first", BEFORE, Save(0, "step-1"))
    if isinstance(moments, Save):
        shutil.copytree(root / "first", root / "count", symlinks=True)
        names = save_on_ranks(root / "count", AFTER, moments)[moments.victim][1]
        numbers = [number for number, name in enumerate(names) if name != WRITE or number % 100 == 50]
        moments = [(moments, number) for number in numbers]
    results = []
    for number, (save, moment) in enumerate(moments):
        folder_of_kill = root / f"{number}"
        shutil.copytree(root / "first", folder_of_kill, symlinks=True)
        outcomes = save_on_ranks(folder_of_kill, AFTER, save, moment)
        assert outcomes.keys() == {1 - save.victim}, (save, moment, outcomes)
        outcome = outcomes[1 - save.victim][0]
        results.append((*check_folder(folder_of_kill, save, outcome), outcome))
    return results


OLD, NEW, BOTH = {"step-1": BEFORE}, {"step-1": AFTER}, {"step-1": BEFORE, "step-2": AFTER}
Row = tuple[Save, str, float, dict[str, float]]  # save, deadly moment, expected value of ``latest``, visible values
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


@pytest.mark.parametrize("rows", [FIRST, *slow(OTHERS)], ids=["between two renames", "at other moments"])
def test_a_kill_leaves_a_whole_checkpoint(tmp_path: Path, rows: list[Row]) -> None:
    results = call_alone(kill, tmp_path, [(save, moment) for save, moment, _, _ in rows])
    for (save, moment, *expected), (*actual, outcome) in zip(rows, results, strict=True):
        assert actual == expected, (save, moment)
        if moment == GROUP:  # and not after half an hour, the group's time-out
            assert "rank 0 got no answer from rank 1" in outcome


@pytest.mark.deep
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("victim", "name"), [(0, "step-1"), (0, "step-2"), (1, "step-2")])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, victim: int, name: str, wait: bool) -> None:
    assert call_alone(kill, tmp_path, Save(victim, name, wait), timeout=LONG)
