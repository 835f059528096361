"""``manifest.json``: the sizes and SHA-256 of a checkpoint's files; compares files with it.

Needs neither torch nor a process group. The manifest is written last, so a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 1
BLOCK = 1 << 20


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
        raise ValueError(f"{NAME} is damaged: it is not a manifest ({error!r})") from None
    if not intact:
        raise ValueError(f"{NAME} is damaged: its contents do not match its SHA-256")
    if document.get("format") != FORMAT:
        raise ValueError(f"{NAME} has format {document.get('format')}; this thunder_zero reads format {FORMAT}")
    try:
        return Manifest(document["number"], document["ranks"], tuple(File(**file) for file in document["files"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{NAME} is damaged: it is not a manifest ({error!r})") from None


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    return from_text((folder / NAME).read_text(errors="replace"))


def find_faults(folder: Path, files: Iterable[File], done: Callable[[int], None] = lambda count: None) -> list[str]:
    """A sentence for each of these files that is not as it was saved; reads all of them.

    Args:
        folder: the checkpoint's.
        files: the files to check.
        done: called with each number of further bytes that were read.
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
        while block := stream.read(BLOCK):
            digest.update(block)
            done(len(block))
    return None if digest.hexdigest() == file.sha256 else f"{file.name} was changed: its SHA-256 differs"


def _wrong_size(path: Path, file: File) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{file.name} is missing"
    return None if size == file.size else f"{file.name} has {size:,} bytes, it was saved with {file.size:,}"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
