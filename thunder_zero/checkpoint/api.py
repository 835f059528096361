"""``tz.save`` and ``tz.load``: sharded checkpoints on disk."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn

from thunder_zero.checkpoint import saving
from thunder_zero.comm.agree import all_or_none
from thunder_zero.runtime.sharded_model import ShardedModel, sharded_model
from thunder_zero.state_dict.all_or_nothing import OwnState
from thunder_zero.state_dict.contents import Optimizers, contents_of, optimizer_list


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    max_to_keep: int | None = None,
    wait: bool = True,
    **extra: Any,
) -> Future[Path]:
    """Save a checkpoint: every rank writes its shards, and any number of ranks loads it, in any stage.

    A collective: all ranks must call it. The folder becomes visible at once and whole, and ``latest`` beside it leads
    to it; whatever dies before, the checkpoints that were there stay as they are.

    >>> tz.save(f"runs/step-{step}", model, optimizer, max_to_keep=3, scheduler=scheduler, rng=torch.get_rng_state())

    The files are those of ``torch.distributed.checkpoint`` (DCP), as ``dcp.save({"model": ..., "optim": ...})`` writes
    FSDP2's ``get_state_dict``: names and shapes of the plain module. ``manifest.json`` has the SHA-256 of each.

    Args:
        path: the checkpoint's folder, which all ranks see. An earlier checkpoint of that name is replaced.
        model: a model with ZeroTransform.
        optimizer: one or several, built on ``model.parameters()``; state and hyper-parameters are saved under parameter
            names.
        max_to_keep: how many checkpoints stay whose names differ from this one's in the last number only: older ones
            beside it are deleted once this one is there.
        wait: False copies everything to the CPU and writes it in a thread, while training goes on.
        extra: what else each rank has: anything with ``state_dict`` and ``load_state_dict``, or that
            ``torch.load(weights_only=True)`` reads (numbers, strings, tensors, dicts and lists).

    Returns:
        A future of the path: done, or with ``wait=False`` done when it is visible. An error of such a save is warned of
        at once, and raised by the future's ``result`` and by the next save.

    Raises:
        TypeError: not a model with ZeroTransform; an extra that is a model.
        ValueError: ``max_to_keep`` is below 1; a name that means something else; an extra, or an optimizer's state, that
            cannot be saved.
        FileExistsError: something that is no checkpoint has that name.
        OSError: it cannot be written.
        RuntimeError: another rank refused; ranks differ; an accumulation is open; the asynchronous save before failed.
    """
    sharded = sharded_model(model)
    state = sharded.state
    with all_or_none(state.group, "to save"):
        for name, value in extra.items():
            if isinstance(value, ShardedModel):
                raise TypeError(f"the extra {name!r} is a model; save it as a checkpoint of its own, beside this one")
        held, optimizers = contents_of(sharded), optimizer_list(optimizer)
    return saving.save(state, Path(path), held, optimizers, extra, max_to_keep=max_to_keep, wait=wait)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    check: bool = True,
    **extra: Any,
) -> tuple[dict[str, Any], ...]:
    """Load a checkpoint, on any number of ranks and in any stage: all of it, or nothing at all.

    A collective: all ranks must call it. Before anything changes, all files are checked against their SHA-256, each
    rank a share of them, and read to memory of their own.

    >>> extras = tz.load("runs/latest", model, optimizer, scheduler=scheduler)
    >>> if len(extras) == dist.get_world_size():
    ...     torch.set_rng_state(extras[dist.get_rank()]["rng"])

    Args:
        path: the folder that :func:`save` wrote, or ``latest`` beside it, or what DCP wrote of FSDP2's or DDP's
            ``{"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}``.
        model: a model with ZeroTransform.
        optimizer: one or several, of the kinds and in the groups in which they were saved.
        check: False loads what has no manifest, as another tool writes it; then nothing is checked.
        extra: objects with ``load_state_dict`` that take what was saved under their names: what this rank saved or,
            if another number of ranks did, what all of them saved alike.

    Returns:
        The extras of each rank that saved, by name.

    Raises:
        TypeError: not a model with ZeroTransform; an extra without ``load_state_dict``.
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, or of another model or optimizer; an extra that is not in it.
        RuntimeError: another rank refused, or ranks differ.
    """
    sharded = sharded_model(model)
    state = sharded.state
    with all_or_none(state.group, "to load"):
        held, optimizers = contents_of(sharded), optimizer_list(optimizer)
        owners = {name: OwnState(sharded.plain.get_submodule(name.rpartition(".")[0])) for name in held.states}
    return saving.load(state, Path(path), held, optimizers, extra, owners, check=check)
