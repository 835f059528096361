"""``manifest.json``: the sizes and SHA-256 of a checkpoint's files; compares files with it.

Needs neither torch nor a process group. The manifest is written last, so a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 1
HASHED_AT_ONCE_BYTES = 1 << 20
USE_ANOTHER = "use another checkpoint"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint.

    Attributes:
        name: within the checkpoint's folder.
        size: in bytes.
        sha256: of its content, 64 hex digits.
    """

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint.

    Attributes:
        number: larger than that of every checkpoint that was in the same folder when it was saved.
        ranks: how many ranks saved it.
        files: all files but the manifest.
    """

    number: int
    ranks: int
    files: tuple[File, ...]


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON, with a SHA-256 of itself."""
    body = {"format": FORMAT, **asdict(manifest)}
    return json.dumps({"sha256": _digest(body), **body}, indent=1) + "\n"


def from_text(text: str) -> Manifest:
    """Parse a manifest.

    Raises:
        ValueError: it is not a manifest, of a later version, or changed.
    """
    try:
        document = json.loads(text)
        intact = document.pop("sha256") == _digest(document)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{NAME} is damaged: it is not a manifest ({error!r}); {USE_ANOTHER}") from None
    if not intact:
        raise ValueError(f"{NAME} is damaged: its contents do not match its SHA-256; {USE_ANOTHER}")
    if document.get("format") != FORMAT:
        raise ValueError(
            f"{NAME} has format {document.get('format')}, this thunder_zero reads format {FORMAT}; use the "
            f"thunder_zero that saved it"
        )
    try:
        found = Manifest(document["number"], document["ranks"], tuple(File(**file) for file in document["files"]))
        _require_types(found)
        return found
    except (KeyError, TypeError) as error:
        raise ValueError(f"{NAME} is damaged: it is not a manifest ({error!r}); {USE_ANOTHER}") from None


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    text = (folder / NAME).read_text(errors="replace")
    try:
        return from_text(text)
    except ValueError as error:
        raise ValueError(f"cannot read {folder}: {error}") from None


def read_if_present(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if another tool wrote it.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return read(folder)
    except FileNotFoundError:
        return None


def require_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are to be verified.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if (written := read_if_present(folder)) is not None:
        return written
    raise ValueError(
        f"cannot verify {folder}: it has no {NAME}, so it is damaged, or another tool wrote it; pass "
        f"verify_files=False (--no-verify) to read another tool's checkpoint"
    )


def require_no_faults(folder: Path, faults: Sequence[str]) -> None:
    """Raise if :func:`find_faults` or :func:`find_wrong_sizes` found any.

    Raises:
        ValueError: files are missing, or were cut or changed.
    """
    if faults:
        raise ValueError(f"{folder} is damaged: {'; '.join(faults)}; {USE_ANOTHER}")


def find_faults(folder: Path, files: Iterable[File], done: Callable[[int], None] = lambda count: None) -> list[str]:
    """A sentence for each of these files that is not as it was saved; reads all of them.

    Args:
        folder: the checkpoint's.
        files: the files to check.
        done: called with the bytes read since the last call.
    """
    return [fault for file in files if (fault := _fault(folder / file.name, file, done)) is not None]


def find_wrong_sizes(folder: Path, files: Iterable[File]) -> list[str]:
    """A sentence for each of these files that is missing or has another size; reads none of them."""
    return [fault for file in files if (fault := _wrong_size(folder / file.name, file)) is not None]


def _fault(path: Path, file: File, done: Callable[[int], None]) -> str | None:
    if wrong := _wrong_size(path, file):
        return wrong
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(HASHED_AT_ONCE_BYTES):
            digest.update(block)
            done(len(block))
    return None if digest.hexdigest() == file.sha256 else f"{file.name} was changed: its SHA-256 differs"


def _wrong_size(path: Path, file: File) -> str | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return f"{file.name} is missing"
    if not stat.S_ISREG(status.st_mode):
        return f"{file.name} is not a file, but a link or something else"
    size = status.st_size
    return None if size == file.size else f"{file.name} has {size:,} bytes, it was saved with {file.size:,}"


def _require_types(found: Manifest) -> None:
    """Raise TypeError unless a manifest's fields have their types, and its files are in the checkpoint's folder."""
    numbers = [found.number, found.ranks, *(file.size for file in found.files)]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("a number in it is no number")
    for file in found.files:
        if not isinstance(file.sha256, str) or not isinstance(file.name, str):
            raise TypeError("a file's name or SHA-256 is no string")
        if Path(file.name).name != file.name or "\0" in file.name:
            raise TypeError(f"the file {file.name!r} is not in the folder")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
