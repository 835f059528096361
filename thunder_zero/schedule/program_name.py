"""Names the programs of a model, so that ranks compare like with like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProgramName:
    """One program, which ranks compare before it first runs.

    Attributes:
        half: ``"forward"``, ``"backward"``, or ``"forward without backward"`` (evaluation).
        synced: whether it reduces gradients; if not, it defers them (``no_sync``).
        graph: the graph of the model, if a front end compiles several.
    """

    half: str
    synced: bool
    graph: str = ""

    @property
    def reduces(self) -> bool:
        """Whether it is a backward that reduces gradients."""
        return self.half == "backward" and self.synced

    def __str__(self) -> str:
        return self.half + f" of {self.graph}" * bool(self.graph) + " under no_sync" * (not self.synced)
