"""The manifest, and the names of checkpoints in a folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from thunder_zero.checkpoint import folder, manifest, owner
from thunder_zero.checkpoint.manifest import File, Manifest

CONTENT = b"what was saved"


def written(number: int = 1) -> Manifest:
    file = File("a.distcp", len(CONTENT), sha256(CONTENT).hexdigest())
    return Manifest(number, 2, (file,))


def save(path: Path) -> None:
    folder.prepare(path)
    (folder.staging_of(path) / "a.distcp").write_bytes(CONTENT)
    folder.publish(path, written(folder.next_number(path)))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def note_of_this_process(tmp_path: Path) -> dict[str, Any]:
    owner.write(tmp_path)
    note: dict[str, Any] = json.loads((tmp_path / owner.NAME).read_text())
    owner.erase(tmp_path)
    return note


def pid_of_a_dead_process() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def test_a_manifest_comes_back() -> None:
    assert manifest.from_text(manifest.to_text(written())) == written()


@pytest.mark.parametrize("number", range(0, 240, 20))
def test_any_changed_byte_of_a_manifest_is_found(number: int) -> None:
    text = bytearray(manifest.to_text(written()).encode())
    text[number] ^= 1
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        manifest.from_text(text.decode())


def test_a_manifest_of_another_format_or_none_is_refused() -> None:
    later = json.loads(manifest.to_text(written()))
    del later["sha256"]
    later["format"] = 2
    later["sha256"] = sha256(json.dumps(later, sort_keys=True).encode()).hexdigest()
    with pytest.raises(
        ValueError, match="has format 2, this thunder_zero reads format 1; use the thunder_zero that saved it"
    ):
        manifest.from_text(json.dumps(later))
    for text in ("", "[1]", "{}", "{"):
        with pytest.raises(ValueError, match=r"is damaged: it is not a manifest .*; use another checkpoint"):
            manifest.from_text(text)


def test_faults_are_named(tmp_path: Path) -> None:
    path, files = tmp_path / "a.distcp", written().files
    assert manifest.find_faults(tmp_path, files) == ["a.distcp is missing"]
    path.write_bytes(CONTENT)
    assert manifest.find_faults(tmp_path, files) == []
    path.write_bytes(CONTENT[:-1])
    assert manifest.find_faults(tmp_path, files) == ["a.distcp has 13 bytes, it was saved with 14"]
    path.write_bytes(b"W" + CONTENT[1:])
    assert manifest.find_faults(tmp_path, files) == ["a.distcp was changed: its SHA-256 differs"]


def test_sizes_are_compared_without_reading(tmp_path: Path) -> None:
    path, files, read = tmp_path / "a.distcp", written().files, list[int]()
    assert manifest.find_wrong_sizes(tmp_path, files) == ["a.distcp is missing"]
    path.write_bytes(b"W" + CONTENT[1:])
    assert manifest.find_wrong_sizes(tmp_path, files) == []
    path.write_bytes(CONTENT)
    assert manifest.find_faults(tmp_path, files, read.append) == []
    assert sum(read) == len(CONTENT)  # the progress bar's bytes


def test_latest_moves_if_it_is_asked_to(tmp_path: Path) -> None:
    save(tmp_path / "a")
    folder.prepare(tmp_path / "b")
    folder.publish(tmp_path / "b", replace(written(), files=()), latest=False)
    assert folder.locate(tmp_path / "latest") == tmp_path / "a"


def test_a_disk_that_is_full_at_the_last_moment(tmp_path: Path) -> None:
    save(tmp_path / "a")
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(os, "fsync", side_effect=full),
        pytest.raises(OSError, match="json: the disk is full"),
    ):
        save(tmp_path / "b")
    assert names(tmp_path) == [".b.saving", "a", "latest"]
    save(tmp_path / "c")
    assert names(tmp_path) == [".b.saving", "a", "c", "latest"]  # its process lives


def test_what_is_surely_dead_is_deleted_whatever_its_name(tmp_path: Path) -> None:
    """The process is dead; its ID is another process's now; another machine's, or nobody's note, proves nothing."""
    for name in ("replaced", "aside"):
        save(tmp_path / name)
    shutil.copytree(tmp_path / "replaced", tmp_path / ".replaced.replaced")
    (tmp_path / "aside").rename(tmp_path / ".aside.replaced")  # the only copy
    (tmp_path / ".step.replaced.removed").mkdir()
    own = note_of_this_process(tmp_path)
    for name, note in {
        "lives": own,
        "dead": {**own, "pid": pid_of_a_dead_process()},
        "dead-too": {**own, "start": "1"},
        "elsewhere": {**own, "pid": pid_of_a_dead_process(), "place": "another machine"},
        "damaged": {**own, "pid": "no number"},
        "group": {**own, "pid": 0},  # to the system, all processes
    }.items():
        (tmp_path / f".{name}.saving").mkdir()
        (tmp_path / f".{name}.saving" / owner.NAME).write_text(json.dumps(note))
    (tmp_path / ".nobody.saving").mkdir()
    save(tmp_path / "a")
    alive = [".damaged.saving", ".elsewhere.saving", ".group.saving", ".lives.saving", ".nobody.saving"]
    assert names(tmp_path) == [".aside.replaced", *alive, "a", "latest", "replaced"]
    assert names(tmp_path / "a") == ["a.distcp", "manifest.json"]
    (tmp_path / ".lives.saving").rename(tmp_path / ".b1.saving")
    save(tmp_path / "b2")
    folder.prune(tmp_path / "b2", max_to_keep=1)
    assert (tmp_path / ".b1.saving").is_dir()  # of the same series, but alive


def test_checkpoints_are_published_counted_and_pruned(tmp_path: Path) -> None:
    for name in ("best", "s3", "s2", "s11"):
        save(tmp_path / name)
        assert folder.locate(tmp_path / "latest") == tmp_path / name
    save(tmp_path / "s2")  # again: now the last
    assert [found.number for found in folder.list_checkpoints(tmp_path).values()].count(5) == 1
    (tmp_path / "notes").mkdir()
    (tmp_path / "s3").rename(tmp_path / ".s3.replaced")  # a save died between its two renames: it is one of them
    for left in (".s1.removed", ".s5.replaced.removed", ".s7.saving", ".other7.saving"):
        (tmp_path / left).mkdir()
    folder.prune(tmp_path / "s2", max_to_keep=2)
    assert names(tmp_path) == [".other7.saving", "best", "latest", "notes", "s11", "s2"]  # others are of another series
    with pytest.raises(FileNotFoundError, match=r"at .*/s3; checkpoints in .*: best, s11, s2; check the path"):
        folder.locate(tmp_path / "s3")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save(tmp_path / "a")
    assert names(tmp_path) == ["a", "latest"]
    assert manifest.read(tmp_path / "a").number == 1


def test_the_earlier_one_is_found_between_two_renames(tmp_path: Path) -> None:
    save(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / ".a.replaced")
    assert folder.locate(tmp_path / "latest") == tmp_path / ".a.replaced"
    save(tmp_path / "a")
    assert names(tmp_path) == ["a", "latest"]
    assert manifest.read(tmp_path / "a").number == 2


@pytest.mark.parametrize("name", ["latest", ".hidden", "link"])
def test_names_that_mean_something_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(ValueError, match="are reserved"):
        folder.prepare(tmp_path / name)


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    with pytest.raises(FileExistsError, match="is not a checkpoint of thunder_zero"):
        folder.prepare(tmp_path / "thesis")
    assert names(tmp_path) == ["thesis"]


def test_files_that_rank_0_does_not_see(tmp_path: Path) -> None:
    folder.prepare(tmp_path / "a")
    with pytest.raises(OSError, match=r"rank 0 does not see a\.distcp in .* all ranks share"):
        folder.publish(tmp_path / "a", replace(written(), ranks=3))
    assert not (tmp_path / "a").exists()
