"""Text that every machine has: the sources of Python's standard library.

    files, sorted by path       ->  every 16th: validation; the others: training
    bytes of the files, joined  ->  one uint8 tensor each; a token is a byte

A batch depends only on the seed and the step. All ranks take their rows from the same global
batch, so runs on 1, 2 or 4 ranks see the same text in the same step::

    global batch, 16 rows     [0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15]
    4 ranks                     rank 0    rank 1    rank 2      rank 3
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Installed packages, tests, generated tables, and modules that some distributions leave out.
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "lib2to3", "idlelib", "tkinter"}
)
VALIDATION_EVERY = 16  # every 16th file is for validation


@dataclass(frozen=True)
class Text:
    """The bytes for training and for validation, each a 1-d uint8 tensor."""

    train: Tensor
    validation: Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """A global batch of ``rows`` (a multiple of ``world_size``) times ``context`` tokens, seen from one rank."""

    rows: int
    context: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.rows % self.world_size:
            raise ValueError(f"rows is {self.rows}; on {self.world_size} ranks give a multiple of {self.world_size}")


def stdlib_files(root: Path) -> list[Path]:
    """Return the library's Python files below ``root``, sorted by their path relative to it."""
    inside = {path: path.relative_to(root) for path in root.rglob("*.py")}
    wanted = [path for path, name in inside.items() if SKIPPED.isdisjoint(name.parts)]
    return sorted(wanted, key=lambda path: inside[path].as_posix())


def load_text(root: Path | None = None) -> Text:
    """Read the sources and split them by file; ``root`` is this Python's standard library if None.

    Raises:
        FileNotFoundError: ``root`` has too few sources (a Python that ships only compiled files).
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = stdlib_files(root)
    if len(files) < 2 * VALIDATION_EVERY:
        raise FileNotFoundError(
            f"too few sources: {root} has {len(files)} Python files; use a Python that ships its sources"
        )
    train = [path for index, path in enumerate(files) if index % VALIDATION_EVERY]
    return Text(train=_read(train), validation=_read(files[::VALIDATION_EVERY]))


def packed_text(end_of_text: int, root: Path | None = None) -> Tensor:
    """Return all files as one int16 tensor of bytes, with the token ``end_of_text`` after each."""
    end = torch.tensor([end_of_text], dtype=torch.int16)
    files = stdlib_files(root or Path(sysconfig.get_paths()["stdlib"]))
    texts = [_bytes_of(path.read_bytes()).short() for path in files if path.stat().st_size]
    return torch.cat([part for text in texts for part in (text, end)])


def train_batch(text: Text, step: int, shape: Shape, seed: int) -> Tensor:
    """Return this rank's rows of one step's global batch: int64, (rows / world_size, context + 1).

    The last column is only a target.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text.train) - shape.context, (shape.rows,), generator=generator)
    return _windows(text.train, starts, shape)


def validation_batches(text: Text, count: int, shape: Shape) -> list[Tensor]:
    """Return this rank's rows of ``count`` fixed batches, spread evenly over the validation text."""
    last = len(text.validation) - shape.context - 1
    starts = torch.arange(count * shape.rows) * last // max(count * shape.rows - 1, 1)
    return [_windows(text.validation, batch, shape) for batch in starts.chunk(count)]


def _windows(data: Tensor, starts: Tensor, shape: Shape) -> Tensor:
    mine = starts.chunk(shape.world_size)[shape.rank]
    return data[mine[:, None] + torch.arange(shape.context + 1)].long()


def _read(files: list[Path]) -> Tensor:
    return _bytes_of(b"\n".join(path.read_bytes() for path in files))


def _bytes_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
