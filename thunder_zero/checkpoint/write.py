"""Writes a checkpoint: rank 0 makes the folder, every rank writes, rank 0 publishes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from thunder_zero.checkpoint import dcp_write, folder
from thunder_zero.checkpoint.dcp_write import Entries, Part
from thunder_zero.checkpoint.manifest import Manifest
from thunder_zero.comm.agree import all_or_none
from thunder_zero.comm.small_collectives import gather_object_on_rank_0


@torch.no_grad()
def write_checkpoint(path: Path, entries: Entries, max_to_keep: int | None, group: dist.ProcessGroup) -> Path:
    """Write these entries of this rank, and publish the checkpoint once all ranks have written; a collective.

    Raises:
        ValueError: no checkpoint can have this name, or rows are missing.
        OSError: a file cannot be written, or rank 0 does not see it.
        RuntimeError: another rank failed.
    """
    rank = group.rank()
    try:
        with all_or_none(group, "to save"):
            if rank == 0:
                folder.prepare(path)
        with all_or_none(group, "to save"):
            part = dcp_write.write_entries(folder.staging_of(path), rank, entries)
        parts = gather_object_on_rank_0(part, group)
        with all_or_none(group, "to save"):
            if rank == 0:
                finish_checkpoint(path, parts, max_to_keep)
    except BaseException:
        if rank == 0:
            folder.abandon(path)
        raise
    return path


def finish_checkpoint(path: Path, parts: Sequence[Part], max_to_keep: int | None) -> None:
    """Write the metadata of all ranks' parts, publish the checkpoint, and delete older ones; on rank 0."""
    files = dcp_write.write_metadata(folder.staging_of(path), parts)
    folder.publish(path, Manifest(folder.next_number(path), len(parts), files))
    if max_to_keep is not None:
        folder.prune(path, max_to_keep)
