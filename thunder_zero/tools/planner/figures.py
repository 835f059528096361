"""What a plan of training says. Frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from thunder_zero.policy import STAGES
from thunder_zero.tools.planner.meshes import Mesh


@dataclass(frozen=True)
class Row:
    """A stage on a mesh, with the least computed again that fits; bytes and seconds of the busiest rank and of a step.

    Attributes:
        stage: 0 to 3.
        mesh: ranks that share a copy of the model, and copies.
        recompute: of the policy.
        fits: whether ``needed_bytes`` fit.
        needed_bytes: at the peak, with what is beside tensors.
        peak_bytes: of tensors at the peak, the optimizer's step included.
        at_rest_bytes: of tensors between two steps.
        peak_half: "forward", "loss", "backward" or "optimizer step".
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
    peak_half: str
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
    rows: tuple[Row, ...]
    chosen: Row | None
    reason: str
    code: str
    assumed: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Of numbers, strings, lists and dicts alone."""
        return asdict(self)
