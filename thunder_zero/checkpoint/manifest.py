"""What a checkpoint on disk consists of, as frozen data: each file with its size and SHA-256.

Needs neither torch nor a process group, so that a tool can read, check and list a checkpoint by itself. A manifest is
written last, so a folder that has one was written to its end.
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
        name: in the checkpoint's folder.
        size: in bytes.
        sha256: of all of them, 64 hex digits.
    """

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint.

    Attributes:
        number: larger than that of any checkpoint that was beside it when it was saved.
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
    """The other way.

    Raises:
        ValueError: not a manifest, one of a later version, or one that was changed.
    """
    try:
        document = json.loads(text)
        told = document.pop("sha256")
        intact = told == _digest(document)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{NAME} is damaged: it is no manifest ({error!r})") from None
    if not intact:
        raise ValueError(f"{NAME} is damaged: its SHA-256 is not the one that it names")
    if document.get("format") != FORMAT:
        raise ValueError(f"{NAME} has format {document.get('format')}; this thunder_zero reads format {FORMAT}")
    try:
        return Manifest(document["number"], document["ranks"], tuple(File(**file) for file in document["files"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{NAME} is damaged: it is no manifest ({error!r})") from None


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    return from_text((folder / NAME).read_text(errors="replace"))


def faults(folder: Path, files: Iterable[File], read: Callable[[int], None] = lambda count: None) -> list[str]:
    """What is wrong with these files of a checkpoint, a sentence for each; they are read to their ends.

    Args:
        folder: the checkpoint's.
        files: those to look at.
        read: is told how many bytes more of them were read.
    """
    return [fault for file in files if (fault := _fault(folder / file.name, file, read)) is not None]


def faults_of_size(folder: Path, files: Iterable[File]) -> list[str]:
    """Which of these files are missing, or have another size, a sentence for each; none is read."""
    return [fault for file in files if (fault := _fault_of_size(folder / file.name, file)) is not None]


def _fault(path: Path, file: File, read: Callable[[int], None]) -> str | None:
    if wrong := _fault_of_size(path, file):
        return wrong
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(BLOCK):
            digest.update(block)
            read(len(block))
    return None if digest.hexdigest() == file.sha256 else f"{file.name} was changed: its SHA-256 is another"


def _fault_of_size(path: Path, file: File) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{file.name} is missing"
    return None if size == file.size else f"{file.name} has {size:,} bytes and was saved with {file.size:,}"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
