"""``tz.save``: checks that all ranks save the same model, then writes, optionally in a thread.

::

    check_arguments     check the arguments, and the model's state
    entries_of          list the values that this rank writes: its rows, and its share of the values that all ranks have
                        compare arguments, optimizers' states and averages between ranks, in one message
    write_checkpoint    write one file per rank into a hidden folder; on rank 0 write metadata and rename the folder

With ``wait=False`` a thread writes copies, with a separate process group.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_zero.checkpoint import dcp_write, folder
from thunder_zero.checkpoint.contents import Contents, contents_of, extra_entries
from thunder_zero.checkpoint.dcp_write import Entries, Part, WritePlanner
from thunder_zero.checkpoint.optimizer_states import optimizer_entries
from thunder_zero.comm.agree import Claim, Failures, all_or_none, argument_claims
from thunder_zero.comm.group import group_like
from thunder_zero.comm.small_collectives import gather_object_on_rank_0
from thunder_zero.plan.policy import is_count
from thunder_zero.sharded.beside import RowsBeside
from thunder_zero.sharded.sharded_model import sharded_model, tagged
from thunder_zero.sharded.state import State

NO_EXTRAS: Mapping[str, Any] = MappingProxyType({})
Optimizers = Optimizer | Iterable[Optimizer]


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
        optimizer: an optimizer on ``model.parameters()``, or several in a list. States are saved by parameter name.
        extra: values of this rank by name: EMAs, objects with ``state_dict`` and ``load_state_dict``, or values that
            ``torch.load(weights_only=True)`` reads (numbers, strings, tensors, dicts and lists).
        max_to_keep: the number of checkpoints to keep. Older checkpoints are deleted if their names differ from this
            name only in the last number.
        wait: False copies everything to the CPU and writes it in a thread, while training continues. The future, with
            the checkpoint's path, is then done once the checkpoint is visible. If a save in the thread fails, the
            thread emits a warning, and the future's ``result`` and the next save raise.
    """
    state = sharded_model(model).state
    with all_or_none(state.group, "to save") as claims:
        contents, optimizers = check_arguments(
            claims, "save at", Path(path), model, optimizer, extra, max_to_keep=max_to_keep, wait=wait
        )
        if (error := wait_for_last(state)) is not None:
            state.saves.last = None  # an error is raised only once
            raise RuntimeError(f"the previous asynchronous save failed: {error}; call save again") from error
        if max_to_keep is not None and (not is_count(max_to_keep) or max_to_keep == 0):
            raise ValueError(f"max_to_keep is {max_to_keep!r}; pass how many to keep, 1 or more, or None for all")
        entries, entry_claims = entries_of(contents, optimizers, extra)
        claims += entry_claims
    if not wait:
        return save_in_thread(state, Path(path), entries, max_to_keep)
    future: Future[Path] = Future()
    future.set_result(write_checkpoint(Path(path), entries, state.group, max_to_keep=max_to_keep))
    return future


def check_arguments(
    claims: list[Claim],
    action: str,
    path: Path,
    model: nn.Module,
    optimizer: Optimizers | None,
    extra: Mapping[str, Any],
    **options: object,
) -> tuple[Contents, list[Optimizer]]:
    """Check that a model can be saved or loaded now. Return this rank's values of it, and a list of the optimizers.

    Append the arguments that ranks must agree on to ``claims``. ``action`` is "save at" or "load from".
    """
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise TypeError(f"extra is {extra!r}; pass a mapping from names to values, such as {{'scheduler': scheduler}}")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    claims += argument_claims(
        {
            f"the path to {action}": path,
            "the list of names in extra": sorted(extra),
            "the number of optimizers": len(optimizers),
            **options,
        }
    )
    sharded, verb = sharded_model(model), action.split()[0]
    state = sharded.state
    state.require_own_values(verb)
    state.require_reduced(verb)
    for name, value in extra.items():
        if isinstance(value, RowsBeside) and value.state is not state:
            raise ValueError(
                f"the extra {name!r} is {value.what} of {value.state.name}, and the model is {state.name}; pass the "
                f"model that it was made of"
            )
    return contents_of(sharded), optimizers


def entries_of(
    contents: Contents, optimizers: Sequence[Optimizer], extra: Mapping[str, Any]
) -> tuple[Entries, list[Claim]]:
    states, claims = optimizer_entries(contents, optimizers)
    claims += [
        value.claim(f"the extra {name!r}, {value.what},")
        for name, value in extra.items()
        if isinstance(value, RowsBeside)
    ]
    return contents.entries() | extra_entries(contents, extra) | states, claims


@torch.no_grad()
def write_checkpoint(path: Path, entries: Entries, group: dist.ProcessGroup, *, max_to_keep: int | None) -> Path:
    """Write this rank's entries. Once all ranks have written, rank 0 makes the checkpoint visible. A collective."""
    rank = group.rank()
    try:
        with all_or_none(group, "to save"):
            if rank == 0:
                folder.prepare(path)
        part, failures = None, Failures()
        with failures.capture():
            part = dcp_write.write_planned(folder.staging_of(path), rank, WritePlanner(entries))
        parts = gather_object_on_rank_0(part, group)
        with all_or_none(group, "to save"):
            failures.raise_first()
            complete = [part for part in parts if part is not None]
            if rank == 0 and len(complete) == len(parts):  # otherwise another rank raises now
                finish_checkpoint(path, complete, max_to_keep)
    except BaseException:
        if rank == 0:
            folder.abandon(path)
        raise
    return path


def finish_checkpoint(path: Path, parts: Sequence[Part], max_to_keep: int | None) -> None:
    files = dcp_write.write_metadata(folder.staging_of(path), parts)
    folder.publish(path, len(parts), files)
    if max_to_keep is not None:
        folder.prune(path, max_to_keep)


# Saves in a thread


class BackgroundSaves:
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.last: Future[Path] | None = None
        self.group = group_like(group, device)  # so that collectives of saves and training do not mix
        # The current CUDA device of a new thread is device 0, where the thread would allocate memory.
        set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, "thunder_zero-save", set_device)


def save_in_thread(state: State, path: Path, entries: Entries, max_to_keep: int | None) -> Future[Path]:
    """Copy entries to the CPU, and start writing the copies in a thread. This is a collective."""
    saves: BackgroundSaves = state.saves or BackgroundSaves(state.group, state.device)
    state.saves = saves
    with all_or_none(state.group, "to save"):
        copies = {
            key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value for key, value in entries.items()
        }
    saves.last = saves.thread.submit(write_checkpoint, path, copies, saves.group, max_to_keep=max_to_keep)
    saves.last.add_done_callback(_warn_of_error)
    return saves.last


def wait_for_last(state: State) -> BaseException | None:
    """Wait for the last asynchronous save of a model; return its error, or None."""
    last: Future[Path] | None = state.saves and state.saves.last
    return None if last is None else last.exception()


def _warn_of_error(future: Future[Path]) -> None:
    if (error := future.exception()) is not None:
        warnings.warn(f"an asynchronous save failed: {error}; the next save raises this error", stacklevel=2)
