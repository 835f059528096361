"""Reads meshes as users write them, and tells which of their axes divide the batch, by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DATA_AXES = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard")  # beginnings of names
MODEL_AXES = ("tp", "tensor", "model", "sp", "seq", "cp", "context")
UNSURE = ("ep", "expert", "pp", "pipe")  # with batches of their own in some programs


def mesh_of(mesh: Mapping[str, int] | str) -> dict[str, int]:
    """Return the axes of a mesh, such as those of ``"dp=7,tp=2"``."""
    if isinstance(mesh, str):
        parts = [part.partition("=") for part in mesh.split(",")]
        if not all(name.strip() and size.strip().isdigit() for name, _, size in parts):
            raise ValueError(f"cannot read the mesh {mesh!r}; give axes and ranks, such as dp=7,tp=2")
        mesh = {name.strip(): int(size) for name, _, size in parts}
    return dict(mesh)


def axes_of_batches(axes: Mapping[str, int], given: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the axes along which ranks have batches of their own. By default all but those of other parallelisms."""
    if given is None:
        return tuple(name for name in axes if not name.startswith((*MODEL_AXES, *UNSURE)))
    return tuple(given)


def unknown_axes(axes: Mapping[str, int]) -> list[str]:
    """Return the axes with names that do not say whether they divide the batch."""
    return [name for name in axes if not name.startswith((*DATA_AXES, *MODEL_AXES))]
