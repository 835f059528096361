"""Creates files that get their names together, once all of them are complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from thunder_zero.checkpoint.folder import explain_write_error

FILES_UNCHANGED = "existing files are unchanged"
Create = Callable[[Path], AbstractContextManager[BinaryIO]]


@contextmanager
def create_together() -> Iterator[Create]:
    """Yields a function that opens a file to write; at the end of the block all files get their names.

    Raises:
        OSError: one cannot be written; existing files are unchanged.
    """
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
