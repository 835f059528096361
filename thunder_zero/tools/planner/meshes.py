"""The meshes to compare: ranks that share a copy of a model, and copies."""

from __future__ import annotations

from dataclasses import dataclass

from thunder_zero.policy import STAGES, is_count

APART = 8  # a mesh shards over so many times as many ranks as the one before


@dataclass(frozen=True, slots=True)
class Mesh:
    """``shards`` ranks hold one copy of the model, of which there are ``replicas``."""

    replicas: int
    shards: int

    @property
    def ranks(self) -> int:
        """Of all copies."""
        return self.replicas * self.shards

    def __str__(self) -> str:
        return str(self.shards) if self.replicas == 1 else f"{self.replicas} x {self.shards}"


def meshes(stage: int, world_size: int, devices_per_node: int) -> tuple[Mesh, ...]:
    """Meshes of a stage: all ranks, a node, and between them 8, 64 .. nodes. DDP has one.

    Raises:
        ValueError: no count; several nodes, of which one is not full.
    """
    if not is_count(world_size) or not world_size:
        raise ValueError(f"world_size is {world_size!r}; give the number of ranks, at least 1")
    if world_size > devices_per_node and world_size % devices_per_node:
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {devices_per_node} devices; give a multiple of "
            f"{devices_per_node}, or another number of devices per node"
        )
    whole = (Mesh(1, world_size),)
    if not STAGES[stage].sharded or world_size <= devices_per_node:
        return whole
    found = []
    shards = devices_per_node
    while shards < world_size:
        if world_size % shards == 0:
            found.append(Mesh(world_size // shards, shards))
        shards *= APART
    return (*found, *whole)
