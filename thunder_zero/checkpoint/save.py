"""``tz.save``: checks that all ranks save the same model, then writes, optionally in a thread.

In: a path, a model, optimizers and extras. Out: a future with the path, and a folder that appears in one rename. This
is a collective::

    check_arguments     check the arguments                                                        preamble.py
    entries_of          list the values that this rank writes: its rows, and its share of the values that all ranks have
                        compare arguments, optimizers' states and averages between ranks, in one message
    write_checkpoint    write one file per rank into a hidden folder; on rank 0 write metadata and rename the folder

With ``wait=False`` the last step writes copies, in a thread (background.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from thunder_zero.checkpoint import dcp_write, folder
from thunder_zero.checkpoint.background import raise_error_of_last, save_in_thread
from thunder_zero.checkpoint.contents import Contents, extra_entries
from thunder_zero.checkpoint.dcp_write import Entries, Part, WritePlanner
from thunder_zero.checkpoint.optimizer_states import Optimizers, optimizer_entries
from thunder_zero.checkpoint.preamble import NO_EXTRAS, check_arguments, require_at_rest
from thunder_zero.comm.agree import Fact, all_alike_or_none, all_or_none
from thunder_zero.comm.small_collectives import gather_object_on_rank_0
from thunder_zero.optim.ema import EMA
from thunder_zero.plan.policy import is_count
from thunder_zero.sharded.sharded_model import sharded_model, tagged


@tagged("tz.save")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] = NO_EXTRAS,
    max_to_keep: int | None = None,
    wait: bool = True,
) -> Future[Path]:
    """Save a checkpoint. Every rank writes its shards, and any number of ranks can load them in any stage.

    A collective: all ranks must call it. Once the folder is complete, it becomes visible, and the link ``latest``
    beside it points to it. If a process dies before that, existing checkpoints are unchanged.

    >>> tz.save("runs/step-100", model, optimizer, extra={"scheduler": scheduler, "rng": torch.get_rng_state()})

    The folder has the format of ``torch.distributed.checkpoint`` (DCP), with the keys of FSDP2's ``get_state_dict``, as
    in ``dcp.save({"model": ..., "optim": ...})``. ``manifest.json`` has the SHA-256 of each file.

    Args:
        path: the checkpoint's folder, on a file system that all ranks see. An existing checkpoint is replaced.
        model: a model with ZeroTransform.
        optimizer: an optimizer on ``model.parameters()``, or several in a list. States are saved by parameter name.
        extra: values of this rank by name: EMAs, objects with ``state_dict`` and ``load_state_dict``, or values that
            ``torch.load(weights_only=True)`` reads (numbers, strings, tensors, dicts and lists).
        max_to_keep: the number of checkpoints to keep. Older checkpoints are deleted if their names differ from this
            name only in the last number.
        wait: False copies everything to the CPU and writes it in a thread, while training continues.

    Returns:
        A future with the path of the checkpoint. With ``wait=False`` the future is done once the checkpoint is visible.
        If a save in the thread fails, the thread emits a warning. The future's ``result`` and the next save then raise.

    Raises:
        TypeError: ``model`` has no ZeroTransform, or an extra is a model.
        ValueError: ``path`` or ``max_to_keep`` is invalid, or an extra or an optimizer's state cannot be saved.
        OSError: a file cannot be written.
        FileExistsError: ``path`` exists and is not a checkpoint, or another live run writes it.
        RuntimeError: another rank raised, arguments differ between ranks, the call is inside ``no_sync`` or
            ``EMA.applied``, or the previous save failed.
    """
    state = sharded_model(model).state
    with all_alike_or_none(state.group, "to save") as facts:
        contents, optimizers = check_arguments(
            facts, "save at", Path(path), model, optimizer, extra, max_to_keep=max_to_keep, wait=wait
        )
        raise_error_of_last(state)
        if max_to_keep is not None and (not is_count(max_to_keep) or max_to_keep == 0):
            raise ValueError(f"max_to_keep is {max_to_keep!r}; pass how many to keep, 1 or more, or None for all")
        require_at_rest(state, "save", extra)
        entries, entry_facts = entries_of(contents, optimizers, extra)
        facts += entry_facts
    if not wait:
        return save_in_thread(state, entries, partial(write_checkpoint, Path(path), max_to_keep=max_to_keep))
    future: Future[Path] = Future()
    future.set_result(write_checkpoint(Path(path), entries, state.group, max_to_keep=max_to_keep))
    return future


def entries_of(
    contents: Contents, optimizers: Sequence[Optimizer], extra: Mapping[str, Any]
) -> tuple[Entries, list[Fact]]:
    """Return the entries that this rank writes, and the facts that ranks must agree on."""
    states, facts = optimizer_entries(contents, optimizers)
    facts += [ema.fact(f"the extra {name!r}, an EMA,") for name, ema in extra.items() if isinstance(ema, EMA)]
    return contents.entries() | extra_entries(contents, extra) | states, facts


@torch.no_grad()
def write_checkpoint(path: Path, entries: Entries, group: dist.ProcessGroup, *, max_to_keep: int | None) -> Path:
    """Write this rank's entries. Once all ranks have written, make the checkpoint visible (a collective)."""
    rank = group.rank()
    try:
        with all_or_none(group, "to save"):
            if rank == 0:
                folder.prepare(path)
        part, failure = _write_part(path, entries, rank)
        parts = gather_object_on_rank_0(part, group)
        with all_or_none(group, "to save"):
            if failure is not None:
                raise failure
            complete = [part for part in parts if part is not None]
            if rank == 0 and len(complete) == len(parts):  # otherwise another rank raises now
                finish_checkpoint(path, complete, max_to_keep)
    except BaseException:
        if rank == 0:
            folder.abandon(path)
        raise
    return path


def _write_part(path: Path, entries: Entries, rank: int) -> tuple[Part | None, Exception | None]:
    """Write this rank's part. Return the part and None, or None and the error."""
    try:
        return dcp_write.write_planned(folder.staging_of(path), rank, WritePlanner(entries)), None
    except Exception as error:
        return None, error


def finish_checkpoint(path: Path, parts: Sequence[Part], max_to_keep: int | None) -> None:
    """Write the metadata, make the checkpoint visible, and delete older checkpoints. This runs on rank 0 only."""
    files = dcp_write.write_metadata(folder.staging_of(path), parts)
    folder.publish(path, len(parts), files)
    if max_to_keep is not None:
        folder.prune(path, max_to_keep)
