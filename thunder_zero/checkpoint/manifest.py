"""``manifest.json``: the sizes and SHA-256 of a checkpoint's files; compares files with it.

Needs neither torch nor a process group. The manifest is written last, so a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 2
HASHED_AT_ONCE_BYTES = 1 << 20
USE_ANOTHER = "use another checkpoint"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint: its name in the folder, its size in bytes, the SHA-256 of its content in hex digits."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint: its number, larger than that of every checkpoint that was in the same folder when it was saved, how
    many ranks saved it, and all files but the manifest."""

    number: int
    ranks: int
    files: tuple[File, ...]


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON, with a SHA-256 of itself."""
    body = {"format": FORMAT, **asdict(manifest)}
    return json.dumps({"sha256": _digest(body), **body}, indent=1) + "\n"


def from_text(text: str) -> Manifest:
    """Parse a manifest."""
    try:
        document = json.loads(text)
        if document.pop("sha256") != _digest(document):
            raise ValueError("its contents do not match its SHA-256")
        if document["format"] == FORMAT:
            return _manifest(document)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{NAME} is damaged: it is not a manifest ({error!r}); {USE_ANOTHER}") from None
    raise ValueError(
        f"{NAME} has format {document['format']}, this thunder_zero reads format {FORMAT}; use the thunder_zero that "
        f"saved it"
    )


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint."""
    text = (folder / NAME).read_text(errors="replace")
    try:
        return from_text(text)
    except ValueError as error:
        raise ValueError(f"cannot read {folder}: {error}") from None


def require_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are to be verified."""
    try:
        return read(folder)
    except FileNotFoundError:
        raise ValueError(
            f"cannot verify {folder}: it has no {NAME}, so it is damaged, or another tool wrote it; pass "
            f"verify_files=False (--no-verify) to read another tool's checkpoint"
        ) from None


def require_no_faults(
    folder: Path, files: Iterable[File], *, contents: bool = True, done: Callable[[int], None] = lambda count: None
) -> None:
    """Raise if any of these files is not as it was saved. Without ``contents`` it compares sizes alone, and reads none
    of them. ``done`` is called with the bytes read since the last call."""
    found = [
        fault
        for file in files
        if (fault := _wrong_size(folder / file.name, file) or (contents and _changed(folder / file.name, file, done)))
    ]
    if found:
        raise ValueError(f"{folder} is damaged: {'; '.join(found)}; {USE_ANOTHER}")


def _changed(path: Path, file: File, done: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(HASHED_AT_ONCE_BYTES):
            digest.update(block)
            done(len(block))
    return "" if digest.hexdigest() == file.sha256 else f"{file.name} was changed: its SHA-256 differs"


def _wrong_size(path: Path, file: File) -> str:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return f"{file.name} is missing"
    if not stat.S_ISREG(status.st_mode):
        return f"{file.name} is not a file, but a link or something else"
    size = status.st_size
    return "" if size == file.size else f"{file.name} has {size:,} bytes, it was saved with {file.size:,}"


def _manifest(document: Mapping[str, Any]) -> Manifest:
    """The manifest, whose fields have their types, and whose files are in the checkpoint's folder."""
    found = Manifest(document["number"], document["ranks"], tuple(File(**file) for file in document["files"]))
    numbers = [found.number, found.ranks, *(file.size for file in found.files)]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("a number in it is no number")
    for name, sha256 in ((file.name, file.sha256) for file in found.files):
        if not isinstance(sha256, str) or not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise TypeError(f"{name!r} is not the name of a file in the folder, or {sha256!r} no SHA-256")
    return found


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
