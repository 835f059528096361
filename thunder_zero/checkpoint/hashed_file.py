"""Hashes a file while writing it, so that a disk that stores other bytes is detected."""

from __future__ import annotations

import hashlib
import os
from typing import Any, BinaryIO

from thunder_zero.checkpoint.manifest import File


class HashedFile:
    """The stream that DCP writes to."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write all of it."""
        self._digest.update(data)
        return self._stream.write(data)

    def tell(self) -> int:
        """How many bytes were written."""
        return self._stream.tell()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._stream.flush()

    def close(self) -> None:
        """Does nothing: the code that opened the stream flushes it to disk and closes it."""

    def seal(self, name: str) -> File:
        """Flush the file to disk; returns its size and SHA-256 for the manifest."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return File(name, self._stream.tell(), self._digest.hexdigest())
