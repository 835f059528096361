"""``tz.save``: checks that all ranks save the same, then writes now, or in a thread.

In: a path, a model, optimizers and extras. Out: a future of the path, and a folder that appears in one rename. A
collective::

    agreed              all ranks were given the same path and arguments
    entries_of          what this rank writes, by key: its rows, and its turns of what all ranks have
    require_same        all ranks have the same optimizers' states and averages to save
    write_checkpoint    each rank writes a file into a hidden folder; rank 0 then writes metadata, and publishes

With ``wait=False`` the last step works on copies, in a thread with a process group of its own, since its collectives
must not meet training's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_zero.checkpoint import dcp_write, folder
from thunder_zero.checkpoint.contents import Contents, contents_of, extra_entries
from thunder_zero.checkpoint.dcp_write import Entries, Part, WritePlanner
from thunder_zero.checkpoint.optimizer_states import Optimizers, optimizer_entries
from thunder_zero.comm.agree import Fact, all_or_none, require_same, require_same_arguments
from thunder_zero.comm.group import group_like
from thunder_zero.comm.small_collectives import gather_object_on_rank_0
from thunder_zero.optim.ema import EMA
from thunder_zero.plan.policy import is_count
from thunder_zero.sharded.sharded_model import sharded_model, tagged
from thunder_zero.sharded.state import State

NO_EXTRAS: Mapping[str, Any] = MappingProxyType({})
_saves: WeakKeyDictionary[State, BackgroundSaves] = WeakKeyDictionary()


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
    """Save a checkpoint: every rank writes its shards; any number of ranks can load it, in any stage.

    A collective: all ranks must call it. The folder becomes visible when it is complete, and the link ``latest`` in the
    same place moves to it; if a process dies before that, existing checkpoints stay as they are.

    >>> tz.save("runs/step-100", model, optimizer, extra={"scheduler": scheduler, "rng": torch.get_rng_state()})

    The files are those of ``torch.distributed.checkpoint`` (DCP), as ``dcp.save({"model": ..., "optim": ...})`` writes
    FSDP2's ``get_state_dict``. ``manifest.json`` has the SHA-256 of each.

    Args:
        path: the checkpoint's folder, visible to all ranks. An existing checkpoint of that name is replaced.
        model: a model with ZeroTransform.
        optimizer: one or several, built on ``model.parameters()``; saved under parameter names.
        extra: this rank's own values by name: anything with ``state_dict`` and ``load_state_dict``, or that
            ``torch.load(weights_only=True)`` reads (numbers, strings, tensors, dicts and lists); EMAs.
        max_to_keep: keep so many checkpoints whose names differ only in their last number, and delete older ones.
        wait: False copies everything to the CPU and writes it in a thread, while training continues.

    Returns:
        A future of the path; with ``wait=False`` it is done once the checkpoint is visible. If such a save fails, it
        warns at once, and the future's ``result`` and the next save raise the error.

    Raises:
        TypeError: ``model`` has no ZeroTransform; an extra is a model.
        ValueError: ``path`` or ``max_to_keep`` is invalid; an extra or an optimizer's state cannot be saved.
        OSError: a file cannot be written; FileExistsError: ``path`` is something other than a checkpoint.
        RuntimeError: another rank refused; ranks differ; ``no_sync`` or ``EMA.applied``; the previous save failed.
    """
    state, more = sharded_model(model).state, {"max_to_keep": max_to_keep, "wait": wait}
    contents, optimizers = agreed("save at", Path(path), model, optimizer, extra, **more)
    with all_or_none(state.group, "to save"):
        if (error := error_of_last(state)) is not None:  # it may have failed on one rank alone
            _saves[state].last = None
            raise RuntimeError(f"the previous asynchronous save failed: {error}; call save again") from error
        if max_to_keep is not None and (not is_count(max_to_keep) or max_to_keep == 0):
            raise ValueError(f"max_to_keep is {max_to_keep!r}; pass how many to keep, 1 or more, or None for all")
        require_at_rest(state, "save", extra)
        entries, facts = entries_of(contents, optimizers, extra)
    require_same(facts, state.group)
    if not wait:
        return _save_in_thread(state, Path(path), entries, max_to_keep)
    done: Future[Path] = Future()
    done.set_result(write_checkpoint(Path(path), entries, max_to_keep, state.group))
    return done


def agreed(
    action: str, path: Path, model: nn.Module, optimizer: Optimizers | None, extra: Mapping[str, Any], **others: object
) -> tuple[Contents, list[Optimizer]]:
    """What this rank has of the model, and the optimizers as a list, once all ranks give the same for an action such as
    "save at", with other arguments by name; a collective."""
    sharded = sharded_model(model)
    with all_or_none(sharded.state.group, f"to {action.split()[0]}"):
        if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
            raise TypeError(
                f"extra is {extra!r}; pass a mapping from names to values, such as {{'scheduler': scheduler}}"
            )
        contents = contents_of(sharded)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    arguments = {
        f"the path to {action}": path,
        "the list of names in extra": sorted(extra),
        "the number of optimizers": len(optimizers),
        **others,
    }
    require_same_arguments(arguments, sharded.state.group)
    return contents, optimizers


def require_at_rest(state: State, action: str, extra: Mapping[str, Any]) -> None:
    """Raise in the middle of an accumulation, if the parameters are averages, or if an EMA is of another model."""
    state.require_own_values(action)
    state.require_reduced(action)
    for name, ema in extra.items():
        if isinstance(ema, EMA) and ema.state is not state:
            raise ValueError(
                f"the extra {name!r} is an EMA of {ema.state.name}, and the model is {state.name}; pass the model that "
                f"it averages"
            )


def entries_of(
    contents: Contents, optimizers: Sequence[Optimizer], extra: Mapping[str, Any]
) -> tuple[Entries, list[Fact]]:
    """What this rank writes, and what of it ranks have to agree on."""
    values, facts = optimizer_entries(contents, optimizers)
    facts += [ema.fact(f"the extra {name!r}, an EMA,") for name, ema in extra.items() if isinstance(ema, EMA)]
    return contents.entries() | extra_entries(contents, extra) | values, facts


@torch.no_grad()
def write_checkpoint(path: Path, entries: Entries, max_to_keep: int | None, group: dist.ProcessGroup) -> Path:
    """Write these entries of this rank, and publish the checkpoint once all ranks have written; a collective."""
    rank = group.rank()
    try:
        with all_or_none(group, "to save"):
            if rank == 0:
                folder.prepare(path)
        with all_or_none(group, "to save"):
            part = dcp_write.write_planned(folder.staging_of(path), rank, WritePlanner(entries))
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
    folder.publish(path, len(parts), files)
    if max_to_keep is not None:
        folder.prune(path, max_to_keep)


class BackgroundSaves:
    """A model's asynchronous saves, one after the other: their thread, their process group, and the last of them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.last: Future[Path] | None = None
        self._group = group_like(group, device)
        # A new thread's current CUDA device is the first one: what it did on it would take memory there.
        choose = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "thunder_zero-save", choose)

    def start(self, path: Path, entries: Entries, max_to_keep: int | None) -> Future[Path]:
        """Save in the thread; warn of an error at once, and raise it from the next save, too."""
        self.last = self._thread.submit(write_checkpoint, path, entries, max_to_keep, self._group)
        self.last.add_done_callback(_warn_of_error)
        return self.last


def _save_in_thread(state: State, path: Path, entries: Entries, max_to_keep: int | None) -> Future[Path]:
    """Write copies of the entries, which training does not change; a collective."""
    if state not in _saves:
        _saves[state] = BackgroundSaves(state.group, state.device)
    with all_or_none(state.group, "to save"):
        copies = {
            key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value for key, value in entries.items()
        }
    return _saves[state].start(path, copies, max_to_keep)


def error_of_last(state: State) -> BaseException | None:
    """Wait for an asynchronous save of a model that is running; its error, if it failed."""
    last = _saves[state].last if state in _saves else None
    return None if last is None else last.exception()


def _warn_of_error(saved: Future[Path]) -> None:
    if (error := saved.exception()) is not None:
        warnings.warn(f"an asynchronous save failed: {error}; the next save raises this error", stacklevel=2)
