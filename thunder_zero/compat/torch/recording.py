"""Questions about the operator that runs: is it fake, and to which forward does it belong."""

from __future__ import annotations

from collections.abc import Iterable

from thunder_zero.compat.private import (
    current_autograd_node,
    fake_mode_key,
    get_dispatch_mode,
    get_sequence_nr,
    running_backward,
)

# needed while: torch has no public question whether operators run on shapes alone.


def fakes(types: Iterable[type]) -> bool:
    """Return whether an operator runs on tensors without values, as when DTensor plans a layout."""
    return any(kind.__name__ == "FakeTensor" for kind in types) or get_dispatch_mode(fake_mode_key) is not None


# needed while: torch has no public number that a backward's operator shares with its forward's.


def is_backward() -> bool:
    """Return whether a backward runs."""
    return bool(running_backward() != -1)


def next_sequence() -> int:
    """Return the number that autograd gives to the next operator of forward."""
    return int(get_sequence_nr())


def backward_sequence() -> int | None:
    """Return the number of the forward operator whose backward runs, or None outside of a backward."""
    node = current_autograd_node()
    return None if node is None else int(node._sequence_nr())
