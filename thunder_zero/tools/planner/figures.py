"""What a plan of training says, for each stage on each mesh. Frozen data.

::

    ZeRO-3 on 128 x 8       128 copies of the model, each sharded over the 8 devices of a node
    ZeRO-3 on 1024          one copy, sharded over all
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from thunder_zero.plan.policy import STAGES, is_count

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


@dataclass(frozen=True)
class PlanRow:
    """A stage on a mesh, with the least computed again that fits; bytes and seconds of the busiest rank and of a step.

    Attributes:
        stage: 0 to 3.
        mesh: ranks that share a copy of the model, and copies.
        recompute: of the policy.
        fits: whether ``needed_bytes`` fit.
        needed_bytes: at the peak, with the overhead that is no tensor.
        peak_bytes: of tensors at the peak, the optimizer's step included.
        at_rest_bytes: of tensors between two steps.
        peak_phase: "forward", "loss", "backward" or "optimizer step".
        by_kind: bytes of tensors at the peak of forward, loss and backward, by what they hold.
        sent_bytes: that a rank sends.
        compute_seconds: of forward and backward.
        exposed_seconds: how long compute waits for communication.
        loss_seconds: of the loss and its gradient.
        optimizer_seconds: of AdamW's step.
        seconds: of the step: the sum of the four.
        tokens_per_second: of a rank.
        mfu: share of the step that the model's FLOPs would take at the device's peak.
        traced_blocks: of the alike blocks, those that were traced; the others repeat them.
    """

    stage: int
    mesh: Mesh
    recompute: str
    fits: bool
    needed_bytes: int
    peak_bytes: int
    at_rest_bytes: int
    peak_phase: str
    by_kind: Mapping[str, int] = field(hash=False)
    sent_bytes: int
    compute_seconds: float
    exposed_seconds: float
    loss_seconds: float
    optimizer_seconds: float
    seconds: float
    tokens_per_second: float
    mfu: float
    traced_blocks: int

    @property
    def name(self) -> str:
        """``ZeRO-3 on 128 x 8``."""
        return f"{STAGES[self.stage].name} on {self.mesh}"

    @property
    def name_with_ranks(self) -> str:
        """``ZeRO-3 on 128 x 8 ranks``."""
        return f"{self.name} rank{'s' if self.mesh.ranks > 1 else ''}"


@dataclass(frozen=True)
class TrainingPlan:
    """Which stage and mesh to train a model with.

    Attributes:
        model: its name.
        parameters: how many it has.
        blocks: of them, those that are alike.
        world_size: ranks.
        device: its name.
        devices_per_node: devices of a node.
        memory_bytes: of a rank.
        tokens: of a rank in a step.
        rows: stages and meshes, in the order of the table.
        chosen: the recommended row; None if none fits.
        reason: why, in one sentence.
        code: to paste; "" if nothing fits.
        assumed: what the figures assume, sentence by sentence.
    """

    model: str
    parameters: int
    blocks: int
    world_size: int
    device: str
    devices_per_node: int
    memory_bytes: int
    tokens: int
    rows: tuple[PlanRow, ...]
    chosen: PlanRow | None
    reason: str
    code: str
    assumed: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Of numbers, strings, lists and dicts alone."""
        return asdict(self)
