"""``tz.save``: checks that all ranks save the same, then writes now, or in a thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from thunder_zero.checkpoint.background import background_saves, raise_error_of_last
from thunder_zero.checkpoint.collect import copy_to_cpu, model_items, optimizer_items
from thunder_zero.checkpoint.extras import extra_items, require_named
from thunder_zero.checkpoint.item import Item
from thunder_zero.checkpoint.preconditions import require_reduced_gradients, require_same_arguments
from thunder_zero.checkpoint.write import write_checkpoint
from thunder_zero.comm.agree import all_or_none, require_same
from thunder_zero.runtime.sharded_model import sharded_model
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.contents import ModelContents, Optimizers, contents_of, optimizer_list, state_facts


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of :func:`save`, with the model's contents by name."""

    path: Path
    contents: ModelContents
    optimizers: list[Optimizer]
    extra: Mapping[str, Any]
    max_to_keep: int | None
    wait: bool


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] = {},
    max_to_keep: int | None = None,
    wait: bool = True,
) -> Future[Path]:
    """Save a checkpoint: every rank writes its shards; any number of ranks can load it, in any stage.

    A collective: all ranks must call it. The folder becomes visible when it is complete, and the link ``latest`` in the
    same place moves to it; if a process dies before that, existing checkpoints stay as they are.

    >>> extra = {"scheduler": scheduler, "rng": torch.get_rng_state()}
    >>> tz.save(f"runs/step-{step}", model, optimizer, extra=extra, max_to_keep=3)

    The files are those of ``torch.distributed.checkpoint`` (DCP), as ``dcp.save({"model": ..., "optim": ...})`` writes
    FSDP2's ``get_state_dict``. ``manifest.json`` has the SHA-256 of each.

    Args:
        path: the checkpoint's folder, visible to all ranks. An existing checkpoint of that name is replaced.
        model: a model with ZeroTransform.
        optimizer: one or several, built on ``model.parameters()``; saved under parameter names.
        extra: this rank's own values by name: anything with ``state_dict`` and ``load_state_dict``, or that
            ``torch.load(weights_only=True)`` reads (numbers, strings, tensors, dicts and lists).
        max_to_keep: keep so many checkpoints whose names differ only in their last number, and delete older ones.
        wait: False copies everything to the CPU and writes it in a thread, while training continues.

    Returns:
        A future of the path; with ``wait=False`` it is done once the checkpoint is visible. If such a save fails, it
        warns at once, and the future's ``result`` and the next save raise the error.

    Raises:
        TypeError: ``model`` has no ZeroTransform; an extra is a model.
        ValueError: ``path`` or ``max_to_keep`` is invalid; an extra or an optimizer's state cannot be saved.
        OSError: a file cannot be written; FileExistsError: ``path`` is something other than a checkpoint.
        RuntimeError: another rank refused; ranks differ; ``no_sync`` holds gradients; the previous save failed.
    """
    sharded = sharded_model(model)
    with all_or_none(sharded.state.group, "to save"):
        require_named(extra)
        contents, optimizers = contents_of(sharded), optimizer_list(optimizer)
    request = Request(Path(path), contents, optimizers, extra, max_to_keep, wait)
    return _write(request, _collect_items(request, sharded.state), sharded.state)


def _collect_items(request: Request, state: State) -> list[Item]:
    """The items that this rank writes, once all ranks agree on what is saved; a collective."""
    arguments = {
        "the path to save at": request.path,
        "the list of names in extra": sorted(request.extra),
        "the number of optimizers": len(request.optimizers),
        "max_to_keep": request.max_to_keep,
        "wait": request.wait,
    }
    require_same_arguments(arguments, state.group)
    with all_or_none(state.group, "to save"):
        raise_error_of_last(state)  # it may have failed on one rank alone
        _require_count(request.max_to_keep)
        require_reduced_gradients(state, "save")
        items = model_items(request.contents) + extra_items(request.contents, request.extra)
        items += optimizer_items(request.contents, request.optimizers)
        facts = state_facts(request.contents, request.optimizers)
    require_same(facts, state.group)
    return items


def _write(request: Request, items: list[Item], state: State) -> Future[Path]:
    """Write the items now, or copies of them in a thread; a collective."""
    if request.wait:
        done: Future[Path] = Future()
        done.set_result(write_checkpoint(request.path, items, request.max_to_keep, state.group))
        return done
    saves = background_saves(state)
    with all_or_none(state.group, "to save"):
        items = [copy_to_cpu(item) for item in items]
    return saves.start(request.path, items, request.max_to_keep)


def _require_count(max_to_keep: object) -> None:
    if max_to_keep is None or (type(max_to_keep) is int and max_to_keep >= 1):
        return
    raise ValueError(f"max_to_keep is {max_to_keep!r}; pass a number of checkpoints, 1 or more, or None to keep all")
