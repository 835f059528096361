"""``manifest.json``: the sizes and SHA-256 of all files of a checkpoint, for a later comparison.

The manifest is written last: a folder with a manifest is complete.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 2
BLOCK_BYTES = 1 << 20  # the size of a read that is only hashed
USE_ANOTHER = "use another checkpoint"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint: its name in the folder, size in bytes, and SHA-256 in hex digits."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    number: int  # larger than the numbers of earlier checkpoints in the folder
    ranks: int
    files: tuple[File, ...]  # all files except the manifest


def to_text(manifest: Manifest) -> str:
    body = {"format": FORMAT, **asdict(manifest)}
    return json.dumps({"sha256": _digest(body), **body}, indent=1) + "\n"


def from_text(text: str) -> Manifest:
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
    text = (folder / NAME).read_text(errors="replace")
    try:
        return from_text(text)
    except ValueError as error:
        raise ValueError(f"cannot read {folder}: {error}") from None


def require_manifest(folder: Path) -> Manifest:
    try:
        return read(folder)
    except FileNotFoundError:
        raise ValueError(
            f"cannot verify {folder}: it has no {NAME}, so it is damaged, or another tool wrote it; pass "
            f"verify_files=False (--no-verify) to read another tool's checkpoint"
        ) from None


class ForwardReader:
    """A reader of ascending ranges of an unbuffered file. It reads no byte twice.

    With ``hashed``, it also reads the bytes between ranges. ``done`` gets the number of bytes of each read.
    """

    def __init__(self, file: RawIOBase, *, hashed: bool, done: Callable[[int], None] = lambda count: None) -> None:
        self._file, self._done = file, done
        self._digest = hashlib.sha256() if hashed else None

    def read(self, start: int, length: int) -> bytes:
        if self._digest is None:
            self._file.seek(start)
        while (gap := start - self._file.tell()) > 0:
            self._next(min(gap, BLOCK_BYTES))
        parts = []
        while length:
            parts.append(self._next(length))  # one call reads 2 GiB at most
            length -= len(parts[-1])
        return b"".join(parts)

    def sha256(self) -> str:
        """Read the remaining bytes, and return the SHA-256 of the whole file."""
        assert self._digest is not None, "the reader hashes"
        while block := self._file.read(BLOCK_BYTES):
            self._digest.update(block)
            self._done(len(block))
        return self._digest.hexdigest()

    def _next(self, length: int) -> bytes:
        data = self._file.read(length)
        if not data:
            raise ValueError(f"it ends at byte {self._file.tell():,}")
        if self._digest is not None:
            self._digest.update(data)
        self._done(len(data))
        return data


def fault_of(file: File, sha256: str) -> str:
    return "" if sha256 == file.sha256 else f"{file.name} was changed: its SHA-256 differs"


def raise_faults(folder: Path, faults: Sequence[str]) -> None:
    if faults:
        raise ValueError(f"{folder} is damaged: {'; '.join(faults)}; {USE_ANOTHER}")


def require_no_faults(
    folder: Path, files: Iterable[File], *, contents: bool = True, done: Callable[[int], None] = lambda count: None
) -> None:
    """Raise ValueError unless files have the listed sizes and, with ``contents``, SHA-256. ``done`` gets bytes read."""
    faults = []
    for file in files:
        fault = _fault_of_size(folder / file.name, file)
        if contents and not fault:
            with (folder / file.name).open("rb", buffering=0) as stream:
                fault = fault_of(file, ForwardReader(stream, hashed=True, done=done).sha256())
        faults += [fault] if fault else []
    raise_faults(folder, faults)


def _fault_of_size(path: Path, file: File) -> str:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return f"{file.name} is missing"
    if not stat.S_ISREG(status.st_mode):
        return f"{file.name} is not a file, but a link or something else"
    size = status.st_size
    return "" if size == file.size else f"{file.name} has {size:,} bytes, it was saved with {file.size:,}"


def _manifest(document: Mapping[str, Any]) -> Manifest:
    """Build a manifest from JSON. Raise TypeError if a field has another type, or a name leads out of the folder."""
    manifest = Manifest(document["number"], document["ranks"], tuple(File(**file) for file in document["files"]))
    numbers = [manifest.number, manifest.ranks, *(file.size for file in manifest.files)]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("a number in it is no number")
    for name, sha256 in ((file.name, file.sha256) for file in manifest.files):
        if not isinstance(sha256, str) or not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise TypeError(f"{name!r} is not the name of a file in the folder, or {sha256!r} no SHA-256")
    return manifest


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
