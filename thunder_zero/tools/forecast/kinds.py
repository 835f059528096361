"""The kinds of memory that a step holds."""

from __future__ import annotations

from enum import StrEnum


class Holds(StrEnum):
    """What a storage holds; each storage has one kind from its allocation to its end."""

    PARAMETER = "parameters at rest"
    BUFFER = "buffers of the module"
    OPTIMIZER = "optimizer state"
    INPUT = "inputs"
    GATHERED = "gathered parameters"
    SAVED = "saved for backward"
    FULL_GRADIENT = "full gradients"
    REDUCED_GRADIENT = "reduced gradients"
    DEFERRED = "deferred gradients"
    IN_FLIGHT = "buffers of collectives"
    LOSS = "outputs and loss"
    WORKSPACE = "workspaces"
    TEMPORARY = "temporaries"
