"""Makes a complete checkpoint visible in one rename, moves ``latest``, and deletes old checkpoints.

A folder whose name begins with a dot is temporary. Checkpoints under other names are complete::

    runs/step-100/            a checkpoint, which also names the process that wrote it (owner.json)
    runs/latest               a link to the last checkpoint
    runs/.step-200.saving/    a checkpoint that is being written, or whose process died
    runs/.step-100.replaced/  the earlier checkpoint step-100, while a save replaces it
    runs/.step-50.removed/    a checkpoint that is being deleted
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from thunder_zero.checkpoint import manifest, owner
from thunder_zero.checkpoint.manifest import File, Manifest
from thunder_zero.safetensors_files import Create

LATEST = "latest"
OWN_FOLDER = "end one of the two runs, or give each its own folder"
FILES_UNCHANGED = "existing files are unchanged"
CHECKPOINTS_UNCHANGED = "no part of this checkpoint is visible, earlier ones are unchanged"


def staging_of(path: Path) -> Path:
    return path.parent / f".{path.name}.saving"


def _replaced(path: Path) -> Path:
    return path.parent / f".{path.name}.replaced"


def locate(path: Path) -> Path:
    """Return the folder of a checkpoint, even if ``path`` is a link, or a save is replacing the checkpoint."""
    path = path.parent / os.readlink(path) if path.is_symlink() else path
    for folder in (path, _replaced(path)):
        if folder.is_dir():
            return folder
    others = ", ".join(sorted(folder.name for folder in list_checkpoints(path.parent))) or "none"
    raise FileNotFoundError(f"there is no checkpoint at {path}; checkpoints in {path.parent}: {others}; check the path")


def is_unchanged(folder: Path, written: Manifest) -> bool:
    """Return whether a folder still has the checkpoint of a manifest, in which each save has a new number."""
    try:
        return manifest.read(folder) == written
    except (FileNotFoundError, ValueError):
        return False


def list_checkpoints(parent: Path) -> dict[Path, Manifest]:
    manifests = {}
    for folder in parent.iterdir() if parent.is_dir() else ():
        if not folder.name.startswith(".") and not folder.is_symlink() and (folder / manifest.NAME).is_file():
            try:
                manifests[folder] = manifest.read(folder)
            except (FileNotFoundError, ValueError):
                continue  # do not count or delete a damaged checkpoint, or one in deletion
    return manifests


@contextmanager
def explain_write_error(name: str, unchanged: str = CHECKPOINTS_UNCHANGED) -> Iterator[None]:
    """Reword an OSError of the block, to name the file, the reason, and the files that are unchanged."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save raises an error about its zip file, with the OSError as context.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        reason = "the disk is full" if cause.errno == errno.ENOSPC else cause.strerror
        raise OSError(f"cannot write {name}: {reason}; {unchanged}") from error


@contextmanager
def create_together() -> Iterator[Create]:
    """Yield a function that opens a temporary file to write. Rename all files at the end, unless a write failed."""
    written: list[tuple[Path, Path]] = []

    @contextmanager
    def create(path: Path) -> Iterator[BinaryIO]:
        temporary = path.with_name(f".{path.name}.writing")
        written.append((temporary, path))
        with explain_write_error(str(path), FILES_UNCHANGED), temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    try:
        yield create
        for temporary, path in written:
            with explain_write_error(str(path), FILES_UNCHANGED):
                temporary.replace(path)
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)


def prepare(path: Path) -> None:
    if path.name in ("", LATEST) or path.name.startswith(".") or path.is_symlink():
        raise ValueError(
            f"cannot save a checkpoint at {str(path)!r}: {LATEST!r}, links and names that begin with a dot are "
            f"reserved; choose a name such as 'runs/step-100'"
        )
    latest = path.parent / LATEST
    if latest.exists() and not latest.is_symlink():
        raise ValueError(
            f"{latest} is not a link (a copy that follows links makes it a folder); move it away and save again"
        )
    if (path.parent / manifest.NAME).is_file():
        raise ValueError(
            f"cannot save inside of {path.parent}: it is a checkpoint, which a save replaces as a whole; choose a path "
            f"outside of it"
        )
    if _replaced(path).is_dir():
        if path.exists():
            remove(_replaced(path))
        else:  # the process died between the two renames of a save
            os.rename(_replaced(path), path)
    is_empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not is_empty and not (path / manifest.NAME).is_file():
        raise FileExistsError(f"{path} exists and is not a checkpoint of thunder_zero; choose another name")
    staging = staging_of(path)
    if owner.is_alive(staging) and (other := owner.other(staging)):
        raise FileExistsError(f"cannot save a checkpoint at {path}: {other} is writing it; {OWN_FOLDER}")
    if owner.is_alive(latest) and (other := owner.other(latest)):
        warnings.warn(
            f"{other}, which is alive, wrote {latest.resolve().name}, the latest checkpoint in {path.parent}; two runs "
            f"move one link {LATEST!r}, and max_to_keep deletes checkpoints of both; {OWN_FOLDER}",
            stacklevel=2,
        )
    _delete(staging)
    _clear_dead(path.parent)
    staging.mkdir(parents=True)
    with explain_write_error(owner.NAME):
        owner.write(staging)


def publish(path: Path, ranks: int, files: tuple[File, ...], *, latest: bool = True) -> None:
    """Check that all files exist, add the manifest, and make the checkpoint visible in one rename. Move ``latest``."""
    staging = staging_of(path)
    if other := owner.other(staging):
        raise OSError(f"{other} has begun to write {path} during this save; {OWN_FOLDER}")
    for file in files:
        if not (staging / file.name).is_file():
            raise OSError(
                f"rank 0 does not see {file.name} in {staging}, which another rank wrote; save to a file system that "
                f"all ranks share"
            )
    number = 1 + max((other.number for other in list_checkpoints(path.parent).values()), default=0)
    with explain_write_error(manifest.NAME), (staging / manifest.NAME).open("x") as stream:
        stream.write(manifest.to_text(Manifest(number, ranks, files)))
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(staging)
    if path.exists():
        os.rename(path, _replaced(path))
    os.rename(staging, path)
    sync_folder(path.parent)
    if latest:
        moving = path.parent / f".{LATEST}.moving"
        moving.unlink(missing_ok=True)
        moving.symlink_to(path.name)
        os.replace(moving, path.parent / LATEST)
        sync_folder(path.parent)
    if _replaced(path).is_dir():
        remove(_replaced(path))


def prune(path: Path, max_to_keep: int) -> None:
    """Keep the last ``max_to_keep`` checkpoints of a series, whose names differ in their last number. Delete older
    ones, and leftovers of the series. Warn if that fails."""
    parent, series = path.parent, _series(path.name)
    _clear_dead(parent, series)
    try:
        manifests = {
            folder: written for folder, written in list_checkpoints(parent).items() if _series(folder.name) == series
        }
        for leftover in parent.glob(".*.replaced"):
            if _series(leftover.stem[1:]) == series:  # the process died between the two renames of a save
                manifests[leftover] = manifest.read(leftover)
        for folder in sorted(manifests, key=lambda folder: manifests[folder].number)[:-max_to_keep]:
            remove(folder)
    except (OSError, ValueError) as error:
        warnings.warn(f"the checkpoint was saved, but an older one could not be deleted: {error}", stacklevel=2)


def _series(name: str) -> str:
    return re.sub(r"\d+(?=\D*$)", "0", name)


def remove(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that no reader finds a part of it."""
    doomed = folder.parent / f".{folder.name.lstrip('.')}.removed"
    _delete(doomed)
    with suppress(FileNotFoundError):  # another save has removed it
        os.rename(folder, doomed)
    _delete(doomed)


def _clear_dead(parent: Path, series: str | None = None) -> None:
    """Delete a folder if its deletion was interrupted, its process is dead (in ``series``: or may be dead), or another
    checkpoint replaced it. This is best effort."""
    for leftover in (*parent.glob(".*.removed"), *parent.glob(".*.saving")):
        alive = leftover.suffix == ".saving" and owner.is_alive(leftover)
        if alive is False or (alive is None and _series(leftover.stem[1:]) == series):
            shutil.rmtree(leftover, ignore_errors=True)
    for leftover in parent.glob(".*.replaced"):
        replacement, doomed = parent / leftover.stem[1:], parent / f"{leftover.name}.removed"
        if replacement in list_checkpoints(parent):
            with suppress(OSError):
                os.rename(leftover, doomed)
                if replacement.exists():
                    shutil.rmtree(doomed, ignore_errors=True)
                else:  # another save has just renamed it
                    os.rename(doomed, leftover)


def _delete(folder: Path) -> None:
    """Delete a folder with its files, even if another save deletes the folder at the same time."""
    while folder.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)


def abandon(path: Path) -> None:
    """Delete the files of a save that failed, but not another run's files."""
    if owner.other(staging_of(path)) is None:
        shutil.rmtree(staging_of(path), ignore_errors=True)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
