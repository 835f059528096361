"""needed while: torch groups collectives by private names alone, and leaves failed ones queued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager, _set_pg_timeout, _world


@contextmanager
def one_launch(group: ProcessGroup) -> Iterator[Any]:
    """Launch the collectives inside the block as one; yields what has ``wait()`` after it.

    After an exception inside, an interrupt for one, torch would leave what was queued to the group's next collectives,
    which would then never be launched.
    """
    try:
        with _coalescing_manager(group, async_ops=True) as launched:
            yield launched
    except BaseException:
        _world.pg_coalesce_state.pop(group, None)
        raise


def let_go_of_groups(mesh: DeviceMesh) -> None:
    """Drop a mesh's references to its process groups, which were destroyed."""
    mesh._pg_registry.clear()


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Change how long the group's collectives wait, for which torch has no public way."""
    _set_pg_timeout(timeout, group)
