"""``tz.tools.fake_mesh``: makes a mesh without processes, for traces of tensor-parallel modules.

::

    with tz.tools.fake_mesh((4, 2)) as mesh:                     torch's "fake" process group, which sends nothing
        parallelize_module(module, mesh["tp"], plan)             parameters become DTensors of rank 0
        traces = tz.trace(module, tokens, mesh=mesh)             what rank 0 of 8 runs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thunder_zero.comm.group import has_groups
from thunder_zero.plan.policy import is_count


@contextmanager
def fake_mesh(shape: Sequence[int], names: Sequence[str] = ("dp", "tp"), *, rank: int = 0) -> Iterator[DeviceMesh]:
    """Temporarily make a device mesh whose ranks need no processes. Its collectives send nothing.

    Slice and trace the module inside the block. After the block, the traces remain valid, but the module does not.

    >>> with tz.tools.fake_mesh((4, 2)) as mesh:
    ...     traces = tz.trace(parallelize_module(module, mesh["tp"], plan), tokens, mesh=mesh)

    Args:
        shape: number of ranks along each dimension.
        names: names of the dimensions, data dimensions first, as for :func:`thunder_zero.compile`.
        rank: the rank of this process.
    """
    if not shape or len(shape) != len(names) or not all(is_count(size) and size for size in shape):
        raise ValueError(
            f"shape is {shape!r} and names are {names!r}; give a number of ranks, at least 1, for each name"
        )
    if not is_count(rank) or rank >= prod(shape):
        raise ValueError(f"rank is {rank!r}; the mesh has the ranks 0 to {prod(shape) - 1}")
    if has_groups():
        raise RuntimeError(
            "there is a process group, which a fake mesh would replace; make a mesh of its ranks by torch's "
            "init_device_mesh, or call fake_mesh in another process"
        )
    dist.init_process_group("fake", rank=rank, world_size=prod(shape))
    try:
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
    finally:
        dist.destroy_process_group()
