"""Kills a rank in the middle of a save, at many moments, and checks the files on disk each time.

``kill_at_moments`` runs in its own process because it forks, which starts each pair of ranks in milliseconds, and
pytest has threads. A moment is one file operation: right before the rank makes a folder, opens a file, flushes,
renames, links or deletes, and in the middle of a write; and right before it makes the group of an asynchronous save.
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

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import thunder_zero as tz
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.tiers import of_tier
from thunder_zero.checkpoint import background, folder, manifest
from thunder_zero.checkpoint.dcp_read import read_items, read_metadata
from thunder_zero.checkpoint.hashed_file import HashedFile
from thunder_zero.checkpoint.item import Item
from thunder_zero.comm import group

WORLD = 2
EVENTS = {"os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir"}  # audit events, raised before they happen
SECONDS = 30.0  # the time that the surviving rank may take
BEFORE, AFTER = 1.0, 2.0  # the value of all parameters in the first and the second checkpoint


@dataclass(frozen=True)
class Case:
    victim: int
    name: str  # of the second checkpoint; the first is "step-1"
    spread: int  # number of moments to try, spread over all, most of which are writes
    last: int  # number of moments to try at the end: flushes, renames, links, deletions
    wait: bool = True  # False: the save is asynchronous


CASES = of_tier(
    (
        Case(0, "step-2", 2, 7),
        Case(0, "step-1", 1, 8),
        Case(1, "step-2", 1, 1),
    ),
    (
        Case(0, "step-2", 6, 24),
        Case(0, "step-1", 4, 12),
        Case(1, "step-2", 6, 2),
        Case(0, "step-2", 2, 6, wait=False),
        Case(1, "step-2", 2, 0, wait=False),  # the first: before the group is made
    ),
)


class Moments:
    """Counts file operations, and dies at one of them."""

    def __init__(self, root: Path, deadly: int) -> None:
        self.root, self.deadly, self.count, self.armed = str(root), deadly, 0, False

    def one(self) -> None:
        if self.armed:
            self.count += 1
            if self.count == self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[1], str) and any(letter in args[1] for letter in "wxa+")
        if (event in EVENTS or writes) and str(args[0]).startswith(self.root):
            self.one()

    @contextmanager
    def counted(self) -> Iterator[None]:
        write, flush, make_group = HashedFile.write, os.fsync, group.group_like

        def half(file: Any, data: Any) -> int:
            whole = bytes(data)
            write(file, whole[: len(whole) // 2])
            file.flush()
            self.one()
            write(file, whole[len(whole) // 2 :])
            return len(whole)

        def flushed(handle: int) -> None:
            self.one()
            flush(handle)

        def made(*args: Any) -> dist.ProcessGroup:
            self.one()
            return make_group(*args)

        sys.addaudithook(self.heard)
        with (
            mock.patch.object(HashedFile, "write", half),
            mock.patch.object(os, "fsync", flushed),
            mock.patch.object(background, "group_like", made),
            mock.patch.object(group, "LONGEST_WAIT_FOR_ADDRESS", timedelta(seconds=5)),
        ):
            self.armed = True
            yield
            self.armed = False


def rank_of(rank: int, root: Path, value: float, name: str, deadly: int, wait: bool) -> None:
    """One rank: saves a model whose parameters are all ``value``, and records the result of ``save``."""
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
    moments = Moments(root, deadly)
    said = "saved"
    with moments.counted():
        try:
            tz.save(root / name, model, optimizer, max_to_keep=1, wait=wait, extra={"value": value}).result()
        except (OSError, RuntimeError) as error:
            said = str(error)
    Path(f"{root}.said{rank}").write_text(json.dumps([said, moments.count]))


def save_on_ranks(
    root: Path, value: float, name: str, victim: int = 0, deadly: int = 0, wait: bool = True
) -> dict[int, list[Any]]:
    """The result of each surviving rank, and its number of moments.

    Raises:
        TimeoutError: a rank hangs.
    """
    Path(f"{root}.store").unlink(missing_ok=True)
    children = {}
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            try:
                rank_of(rank, root, value, name, deadly if rank == victim else 0, wait)
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
            raise TimeoutError(f"ranks {[children[child] for child in living]} hang after rank {victim} was killed")
        time.sleep(0.005)
    said = {rank: Path(f"{root}.said{rank}") for rank in range(WORLD)}
    return {rank: json.loads(path.read_text()) for rank, path in said.items() if path.exists()}


def value_of(at: Path) -> float:
    """The one value of everything in a checkpoint that is whole."""
    wrong = manifest.find_faults(at, manifest.read(at).files)
    assert not wrong, wrong
    metadata = read_metadata(at)
    items = [
        Item((key,), torch.zeros(stored.size), 0, tuple(stored.size))
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    ]
    values = read_items(at, metadata, items, ["rank0.extra.value", "rank1.extra.value"])
    found = {float(value) for item in items for value in item.value.flatten()} | set(values.values())
    assert len(found) == 1, f"{at} mixes several saves: {found}"
    return found.pop()


def look(root: Path, case: Case, said: dict[int, list[Any]]) -> dict[str, Any]:
    """The checkpoints on disk after the kill; raises if they are wrong."""
    latest = value_of(folder.locate(root / "latest"))
    visible = {at.name: value_of(at) for at in root.iterdir() if not at.name.startswith(".") and not at.is_symlink()}
    for rank, (words, _) in said.items():
        assert words != "saved" or visible.get(case.name) == AFTER, f"rank {rank} reports a save, but found {visible}"
    assert latest in visible.values() or case.name == "step-1", (latest, visible)
    found = value_of(folder.locate(root / case.name)) if case.name == "step-1" else None
    kept = left_by_another_save(root)
    assert kept <= {f".{case.name}.replaced"} - {f".{name}.replaced" for name in visible}, kept
    assert save_alone(root / case.name) == sorted([case.name, "latest"])
    return {"latest": latest, "visible": visible, "found": found, "said": [words for words, _ in said.values()]}


def left_by_another_save(root: Path) -> set[str]:
    """The temporary folders with contents that stay when a job saves under another name after the kill."""
    folder.prepare(root / "other")
    folder.abandon(root / "other")
    folders = [at for at in root.glob(".*") if at.is_dir() and not at.is_symlink()]
    return {at.name for at in folders if {file.name for file in at.iterdir()} - {"owner.json"}}


def save_alone(path: Path) -> list[str]:
    """Save again, as after a restart, which must remove leftovers; return the names that exist afterwards."""
    folder.prepare(path)
    (folder.staging_of(path) / "a").touch()
    folder.publish(path, manifest.Manifest(folder.next_number(path), 1, ()))
    folder.prune(path, 1)
    return sorted(at.name for at in path.parent.iterdir())


def kill_at_moments(root: Path) -> list[dict[str, Any]]:
    """The findings after each kill, one entry per moment."""
    torch.set_num_threads(1)
    save_on_ranks(root / "first", BEFORE, "step-1")
    results = []
    for case in CASES:
        count_at = root / f"count-{case.victim}-{case.name}-{case.wait}"
        shutil.copytree(root / "first", count_at, symlinks=True)
        total = save_on_ranks(count_at, AFTER, case.name, wait=case.wait)[case.victim][1]
        spread = {1 + step * total // case.spread for step in range(case.spread)}
        for deadly in sorted(spread | set(range(total - case.last + 1, total + 1))):
            at = root / f"{case.victim}-{case.name}-{case.wait}-{deadly}"
            shutil.copytree(root / "first", at, symlinks=True)
            said = save_on_ranks(at, AFTER, case.name, case.victim, deadly, case.wait)
            result: dict[str, Any] = {"victim": case.victim, "name": case.name, "moment": f"{deadly} of {total}"}
            result["wait"] = case.wait
            try:
                result |= {"lives": sorted(said), **look(at, case, said)}
            except (AssertionError, OSError, ValueError) as error:
                result["wrong"] = f"{type(error).__name__}: {error}"
            results.append(result)
    return results
