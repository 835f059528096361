"""How does a checkpoint become visible at once and whole? Written beside, flushed, renamed; ``latest`` moves last.

Names that begin with a dot are for a while only; what stands under any other name was written to its end::

    runs/step-100/            a checkpoint
    runs/latest               a link to the last one
    runs/.step-200.saving/    one that is being written, or was when the process died
    runs/.step-100.replaced/  the earlier one of that name, for the moment between two renames
    runs/.step-50.removed/    one that is being deleted
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thunder_zero.checkpoint import manifest
from thunder_zero.checkpoint.manifest import Manifest

LATEST = "latest"
STAYS = "nothing of this checkpoint is visible, those before it stay as they were"


def staging_of(path: Path) -> Path:
    """Where a checkpoint is written before it becomes visible."""
    return path.parent / f".{path.name}.saving"


def _replaced(path: Path) -> Path:
    return path.parent / f".{path.name}.replaced"


def locate(path: Path) -> Path:
    """The folder of a checkpoint, whatever leads to it.

    Raises:
        FileNotFoundError: there is none; the message names those beside it.
    """
    path = path.parent / os.readlink(path) if path.is_symlink() else path
    for folder in (path, _replaced(path)):
        if folder.is_dir():
            return folder
    beside = ", ".join(sorted(folder.name for folder in checkpoints(path.parent))) or "none"
    raise FileNotFoundError(f"there is no checkpoint at {path}; checkpoints beside it: {beside}")


def is_still(folder: Path, written: Manifest) -> bool:
    """Whether this checkpoint is there: each save has a number of its own."""
    try:
        return manifest.read(folder) == written
    except (FileNotFoundError, ValueError):
        return False


def checkpoints(parent: Path) -> dict[Path, Manifest]:
    """All visible checkpoints of a folder that have a readable manifest."""
    found = {}
    for folder in parent.iterdir() if parent.is_dir() else ():
        if not folder.name.startswith(".") and not folder.is_symlink() and (folder / manifest.NAME).is_file():
            try:
                found[folder] = manifest.read(folder)
            except (FileNotFoundError, ValueError):
                continue  # being deleted, or damaged: not ours to count or to delete
    return found


@contextmanager
def explain_write_error(what: str, stays: str = STAYS) -> Iterator[None]:
    """Within: what keeps a file from being written is told in a sentence, and what is there in spite of that.

    Raises:
        OSError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise OSError(f"{what} could not be written: {reason}; {stays}") from error


def prepare(path: Path) -> None:
    """Make an empty folder to write to, and clear away what a save of that name that died has left.

    Raises:
        ValueError: a name that means something else.
        FileExistsError: something that is no checkpoint is there.
    """
    if path.name in ("", LATEST) or path.name.startswith(".") or path.is_symlink():
        raise ValueError(
            f"a checkpoint cannot be saved at {str(path)!r}: {LATEST!r}, links and names that begin with a dot mean "
            f"something else; choose a name such as 'runs/step-100'"
        )
    latest = path.parent / LATEST
    if latest.exists() and not latest.is_symlink():
        raise ValueError(f"{latest} is no link, as after a copy that followed it; move it away, a save makes it anew")
    if (path.parent / manifest.NAME).is_file():
        raise ValueError(
            f"{path.parent} is a checkpoint itself, and would be replaced as a whole; choose a path beside it"
        )
    if _replaced(path).is_dir():
        if path.exists():
            remove(_replaced(path))
        else:  # a save died between its two renames
            os.rename(_replaced(path), path)
    empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not empty and not (path / manifest.NAME).is_file():
        raise FileExistsError(f"{path} exists and is no checkpoint of thunder_zero; choose another name")
    staging = staging_of(path)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)


def next_number(path: Path) -> int:
    """A number above those of all checkpoints beside."""
    return 1 + max((found.number for found in checkpoints(path.parent).values()), default=0)


def publish(path: Path, written: Manifest, *, latest: bool = True) -> None:
    """Check that all files are there, add the manifest, and let all of it become visible in one rename.

    Args:
        path: the checkpoint.
        written: what is in it.
        latest: whether the link ``latest`` moves to it.

    Raises:
        OSError: a file of another rank is not seen here; the disk is full.
    """
    staging = staging_of(path)
    for file in written.files:
        if not (staging / file.name).is_file():
            raise OSError(
                f"{file.name} was written by another rank and is not seen by rank 0 in {staging}; save to a file "
                f"system that all ranks share"
            )
    with explain_write_error(manifest.NAME), (staging / manifest.NAME).open("x") as stream:
        stream.write(manifest.to_text(written))
        stream.flush()
        os.fsync(stream.fileno())
    sync(staging)
    if path.exists():
        os.rename(path, _replaced(path))
    os.rename(staging, path)
    sync(path.parent)
    if latest:
        point_latest(path)
    if _replaced(path).is_dir():
        remove(_replaced(path))


def point_latest(path: Path) -> None:
    """Let ``latest`` lead to this checkpoint, in one rename."""
    moving = path.parent / f".{LATEST}.moving"
    moving.unlink(missing_ok=True)
    moving.symlink_to(path.name)
    os.replace(moving, path.parent / LATEST)
    sync(path.parent)


def prune(path: Path, max_to_keep: int) -> None:
    """Delete all but the last ``max_to_keep`` checkpoints whose names differ from this one's in their last number only,
    and what saves and deletions of such names left when their process died. Never fails: it warns."""
    parent, series = path.parent, _series(path.name)
    try:
        for left in (*parent.glob(".*.removed"), *parent.glob(".*.saving")):
            if _series(left.name[1:].rpartition(".")[0].removesuffix(".replaced")) == series:
                shutil.rmtree(left)
        alike = {folder: found for folder, found in checkpoints(parent).items() if _series(folder.name) == series}
        for left in parent.glob(".*.replaced"):
            name = left.name[1:].removesuffix(".replaced")
            if _series(name) == series and parent / name in alike:
                remove(left)
            elif _series(name) == series:  # a save died between its two renames
                alike[left] = manifest.read(left)
        for folder in sorted(alike, key=lambda folder: alike[folder].number)[:-max_to_keep]:
            remove(folder)
    except (OSError, ValueError) as error:
        warnings.warn(f"the checkpoint was saved, but an older one could not be deleted: {error}", stacklevel=2)


def _series(name: str) -> str:
    return re.sub(r"\d+(?=\D*$)", "0", name)


def remove(folder: Path) -> None:
    """Delete a checkpoint: it is gone at once, so that nobody finds half of it."""
    doomed = folder.parent / f".{folder.name.lstrip('.')}.removed"
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def abandon(path: Path) -> None:
    """Give back the room of a save that failed."""
    shutil.rmtree(staging_of(path), ignore_errors=True)


def sync(folder: Path) -> None:
    """Have the names in a folder reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
