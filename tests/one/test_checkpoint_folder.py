"""Manifests are checked, and checkpoints in a folder are published, counted, pruned and cleaned up."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import warnings
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

from tests.harness.errors import fails
from thunder_zero.checkpoint import folder, manifest, owner
from thunder_zero.checkpoint.manifest import File, Manifest

CONTENT = b"what was saved"


def written(number: int = 1) -> Manifest:
    file = File("a.distcp", len(CONTENT), sha256(CONTENT).hexdigest())
    return Manifest(number, 2, (file,))


def save(path: Path) -> None:
    folder.prepare(path)
    (folder.staging_of(path) / "a.distcp").write_bytes(CONTENT)
    folder.publish(path, 2, written().files)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def note_of_this_process(tmp_path: Path) -> dict[str, Any]:
    owner.write(tmp_path)
    note: dict[str, Any] = json.loads((tmp_path / owner.NAME).read_text())
    (tmp_path / owner.NAME).unlink()
    return note


def pid_of_a_dead_process() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


# The manifest


def test_a_manifest_is_read_back_or_refused() -> None:
    text = manifest.to_text(written())
    assert manifest.from_text(text) == written()
    for number in range(0, 240, 20):
        changed = bytearray(text.encode())
        changed[number] ^= 1
        fails(partial(manifest.from_text, changed.decode()), "ValueError: manifest.json is damaged")
    later = json.loads(text) | {"format": 3}
    del later["sha256"]
    later["sha256"] = sha256(json.dumps(later, sort_keys=True).encode()).hexdigest()
    words = "has format 3, this thunder_zero reads format 2; use the thunder_zero that saved it"
    fails(lambda: manifest.from_text(json.dumps(later)), words)
    for none in ("", "[1]", "{}", "{"):
        fails(partial(manifest.from_text, none), "is damaged: it is not a manifest ", "; use another checkpoint")


def test_missing_and_changed_files_are_named(tmp_path: Path) -> None:
    path, files, read = tmp_path / "a.distcp", written().files, list[int]()
    sizes, contents = (partial(manifest.require_no_faults, tmp_path, files, contents=reads) for reads in (False, True))
    for check in (sizes, contents):
        fails(check, " is damaged: a.distcp is missing; use another checkpoint")
    path.write_bytes(CONTENT[:-1])
    for check in (sizes, contents):
        fails(check, " is damaged: a.distcp has 13 bytes, it was saved with 14; use another checkpoint")
    path.write_bytes(b"W" + CONTENT[1:])
    fails(contents, " is damaged: a.distcp was changed: its SHA-256 differs; use another checkpoint")
    sizes()
    path.write_bytes(CONTENT)
    contents(done=read.append)
    assert sum(read) == len(CONTENT)  # the progress bar's bytes


# The folder


def test_latest_moves_only_if_asked(tmp_path: Path) -> None:
    save(tmp_path / "a")
    folder.prepare(tmp_path / "b")
    folder.publish(tmp_path / "b", 1, (), latest=False)
    assert folder.locate(tmp_path / "latest") == tmp_path / "a"


def test_a_full_disk_at_the_last_moment_leaves_latest(tmp_path: Path) -> None:
    save(tmp_path / "a")
    with mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        fails(lambda: save(tmp_path / "b"), "json: the disk is full")
    assert names(tmp_path) == [".b.saving", "a", "latest"]
    save(tmp_path / "c")
    assert names(tmp_path) == [".b.saving", "a", "c", "latest"]  # the saving process is alive


def test_folders_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    # A note proves a death, unless it is damaged or of another machine.
    for name in ("replaced", "aside"):
        save(tmp_path / name)
    shutil.copytree(tmp_path / "replaced", tmp_path / ".replaced.replaced")
    (tmp_path / "aside").rename(tmp_path / ".aside.replaced")  # the only copy
    (tmp_path / ".step.replaced.removed").mkdir()
    own_note = note_of_this_process(tmp_path)
    for name, note in {
        "lives": own_note,
        "dead": {**own_note, "pid": pid_of_a_dead_process()},
        "dead-too": {**own_note, "start": "1"},
        "elsewhere": {**own_note, "pid": pid_of_a_dead_process(), "place": "another machine"},
        "damaged": {**own_note, "pid": "no number"},
        "group": {**own_note, "pid": 0},  # for kill, 0 means a whole group
    }.items():
        (tmp_path / f".{name}.saving").mkdir()
        (tmp_path / f".{name}.saving" / owner.NAME).write_text(json.dumps(note))
    (tmp_path / ".nobody.saving").mkdir()
    save(tmp_path / "a")
    alive = [".damaged.saving", ".elsewhere.saving", ".group.saving", ".lives.saving", ".nobody.saving"]
    assert names(tmp_path) == [".aside.replaced", *alive, "a", "latest", "replaced"]
    assert names(tmp_path / "a") == ["a.distcp", "manifest.json", "owner.json"]
    (tmp_path / ".lives.saving").rename(tmp_path / ".b1.saving")
    save(tmp_path / "b2")
    folder.prune(tmp_path / "b2", max_to_keep=1)
    assert (tmp_path / ".b1.saving").is_dir()  # of this series, but alive


def test_two_live_runs_in_one_folder_are_named(tmp_path: Path) -> None:
    """A dead run's folder is taken over; so is a folder of an unknown machine, unless its run goes on."""
    note, path = note_of_this_process(tmp_path), tmp_path / "a"
    with subprocess.Popen(["sleep", "60"]) as run:
        start = owner._stat(run.pid)[owner.START]
        live, dead = {**note, "pid": run.pid, "start": start}, {**note, "pid": pid_of_a_dead_process()}
        elsewhere = {**note, "place": "node7 boot 1"}
        named = f"process {run.pid} on {note['place'].split()[0]}"
        for other in (dead, elsewhere):
            folder.prepare(path)
            (folder.staging_of(path) / owner.NAME).write_text(json.dumps(other))
        folder.prepare(path)
        (folder.staging_of(path) / owner.NAME).write_text(json.dumps(elsewhere))
        fails(lambda: folder.publish(path, 2, ()), f"process {note['pid']} on node7 has begun to write {path}")
        (folder.staging_of(path) / owner.NAME).write_text(json.dumps(live))
        fails(lambda: folder.prepare(path), "FileExistsError", f"{named} is writing it", "its own folder")
        folder.abandon(path)
        assert folder.staging_of(path).is_dir(), "the other run goes on"
        shutil.rmtree(folder.staging_of(path))
        save(path)
        for other, count in ((live, 1), (dead, 0), (note, 0), (elsewhere, 0)):
            (tmp_path / "latest" / owner.NAME).write_text(json.dumps(other))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                save(tmp_path / "b")
            assert sum(f"{named}, which is alive, wrote " in str(warning.message) for warning in caught) == count
        run.kill()


def test_checkpoints_are_published_counted_and_pruned(tmp_path: Path) -> None:
    for name in ("best", "s3", "s2", "s11"):
        save(tmp_path / name)
        assert folder.locate(tmp_path / "latest") == tmp_path / name
    save(tmp_path / "s2")  # again: now the last
    assert [result.number for result in folder.list_checkpoints(tmp_path).values()].count(5) == 1
    (tmp_path / "notes").mkdir()
    (tmp_path / "s3").rename(tmp_path / ".s3.replaced")  # a save died between its two renames: it is one of them
    for left in (".s1.removed", ".s5.replaced.removed", ".s7.saving", ".other7.saving"):
        (tmp_path / left).mkdir()
    folder.prune(tmp_path / "s2", max_to_keep=2)
    assert names(tmp_path) == [".other7.saving", "best", "latest", "notes", "s11", "s2"]  # others are of another series
    fails(lambda: folder.locate(tmp_path / "s3"), "/s3; checkpoints in ", ": best, s11, s2; check the path")


def test_what_is_at_the_path_before(tmp_path: Path) -> None:
    """The path is an empty folder, or a checkpoint, which is found between two renames, too."""
    (tmp_path / "a").mkdir()
    save(tmp_path / "a")
    assert names(tmp_path) == ["a", "latest"]
    assert manifest.read(tmp_path / "a").number == 1
    (tmp_path / "a").rename(tmp_path / ".a.replaced")
    assert folder.locate(tmp_path / "latest") == tmp_path / ".a.replaced"
    save(tmp_path / "a")
    assert names(tmp_path) == ["a", "latest"]
    assert manifest.read(tmp_path / "a").number == 2


def test_reserved_names_links_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    reserved = "are reserved"
    for name, words in (
        ("latest", reserved),
        (".hidden", reserved),
        ("link", reserved),
        ("thesis", "is not a checkpoint of thunder_zero"),
    ):
        fails(partial(folder.prepare, tmp_path / name), words)
    assert names(tmp_path) == ["link", "thesis"]


def test_files_that_rank_0_does_not_see_are_refused(tmp_path: Path) -> None:
    folder.prepare(tmp_path / "a")
    fails(
        lambda: folder.publish(tmp_path / "a", 3, written().files),
        "rank 0 does not see a.distcp in ",
        "all ranks",
    )
    assert not (tmp_path / "a").exists()
