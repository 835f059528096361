"""``tz.save``: checks that all ranks save the same, then writes now, or in a thread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from thunder_zero.checkpoint.agreed import agreed, require_at_rest
from thunder_zero.checkpoint.averages import average_facts, emas_of, require_own
from thunder_zero.checkpoint.background import background_saves, raise_error_of_last
from thunder_zero.checkpoint.contents import (
    Contents,
    Named,
    Optimizers,
    all_named_groups,
    model_entries,
    optimizer_entries,
    state_facts,
)
from thunder_zero.checkpoint.dcp_write import Entries
from thunder_zero.checkpoint.extras import NO_EXTRAS, extra_entries
from thunder_zero.checkpoint.write import write_checkpoint
from thunder_zero.comm.agree import all_or_none, require_same
from thunder_zero.policy import is_count
from thunder_zero.runtime.sharded_model import sharded_model, tagged
from thunder_zero.runtime.state import State


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
        _require_ready(state, max_to_keep, extra)
        groups = all_named_groups(contents, optimizers)
        entries = entries_of(contents, optimizers, groups, extra)
        facts = state_facts(groups) + average_facts(emas_of(extra))
    require_same(facts, state.group)
    return (_write_now if wait else _write_in_thread)(Path(path), entries, max_to_keep, state)


def entries_of(
    contents: Contents, optimizers: Sequence[Optimizer], groups: Sequence[Sequence[Named]], extra: Mapping[str, Any]
) -> Entries:
    """What this rank writes.

    Raises:
        TypeError: an extra is a model.
        ValueError: an extra or an optimizer's state cannot be saved.
    """
    of_model, of_extras = model_entries(contents), extra_entries(contents, extra)
    return of_model | of_extras | optimizer_entries(contents, optimizers, groups)


def _write_now(path: Path, entries: Entries, max_to_keep: int | None, state: State) -> Future[Path]:
    """Write the entries; a collective."""
    done: Future[Path] = Future()
    done.set_result(write_checkpoint(path, entries, max_to_keep, state.group))
    return done


def _write_in_thread(path: Path, entries: Entries, max_to_keep: int | None, state: State) -> Future[Path]:
    """Write copies of the entries in a thread; a collective."""
    saves = background_saves(state)
    with all_or_none(state.group, "to save"):
        copies = entries.on_cpu()
    return saves.start(path, copies, max_to_keep)


def _require_ready(state: State, max_to_keep: int | None, extra: Mapping[str, Any]) -> None:
    raise_error_of_last(state)  # it may have failed on one rank alone
    if max_to_keep is not None and (not is_count(max_to_keep) or max_to_keep == 0):
        raise ValueError(f"max_to_keep is {max_to_keep!r}; pass how many to keep, 1 or more, or None for all")
    require_at_rest(state, "save")
    require_own(emas_of(extra), state)
