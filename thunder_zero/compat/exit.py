"""needed while: a thread of gloo that still holds tensors aborts a process that exits.

Torch joins such a thread when the last reference to a destroyed group goes, and Python stops no thread cleanly later.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any


def at_exit(function: Callable[..., None], *args: Any) -> None:
    """Call a function when the interpreter exits: what is given later is called earlier."""
    atexit.register(function, *args)
