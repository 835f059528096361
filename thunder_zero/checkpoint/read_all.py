"""Reads all that this rank needs of a checkpoint into new memory; changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thunder_zero.checkpoint.dcp_check import require_files
from thunder_zero.checkpoint.dcp_read import read_metadata
from thunder_zero.checkpoint.extras import read_extras
from thunder_zero.checkpoint.read_model import read_model
from thunder_zero.checkpoint.read_optimizers import read_optimizers
from thunder_zero.state_dict.contents import ModelContents


@dataclass(frozen=True, slots=True)
class Found:
    """One rank's part of a checkpoint, in new memory.

    Attributes:
        tensors: pairs of the model's tensors and their new values, of one shape.
        states: the modules' extra states, by name.
        optimizers: a state dict for ``Optimizer.load_state_dict`` of each.
        extras: the extras of each rank that saved, by name.
    """

    tensors: list[tuple[Tensor, Tensor]]
    states: dict[str, Any]
    optimizers: list[dict[str, Any]]
    extras: tuple[dict[str, Any], ...]


def read_checkpoint(folder: Path, contents: ModelContents, optimizers: Sequence[Optimizer], ranks: int = 0) -> Found:
    """Read all of it; ``ranks`` is how many saved, if known.

    Raises:
        ValueError: it is of another model or another optimizer, or damaged.
    """
    metadata = read_metadata(folder)
    require_files(folder, metadata)
    extras = read_extras(folder, metadata, ranks)
    tensors, states = read_model(folder, metadata, contents)
    state_dicts = read_optimizers(folder, metadata, contents, optimizers) if optimizers else []
    return Found(tensors, states, state_dicts, extras)
