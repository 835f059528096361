"""Creates files that get their names together, once all of them are complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from thunder_zero.checkpoint.folder import explain_write_error

STAYS = "what was there before stays"
Create = Callable[[Path], AbstractContextManager[BinaryIO]]


@contextmanager
def create_together() -> Iterator[Create]:
    """Files that have their names once all of them are whole; what it yields opens one to write.

    Raises:
        OSError: one cannot be written; what was there stays.
    """
    written: list[tuple[Path, Path]] = []

    @contextmanager
    def create(path: Path) -> Iterator[BinaryIO]:
        beside = path.with_name(f".{path.name}.writing")
        written.append((beside, path))
        with explain_write_error(str(path), STAYS), beside.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    try:
        yield create
        for beside, path in written:
            with explain_write_error(str(path), STAYS):
                beside.replace(path)
    finally:
        for beside, _ in written:
            beside.unlink(missing_ok=True)
