"""``tz.save`` and ``tz.load``: sharded checkpoints on disk."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thunder_zero.runtime import saving
from thunder_zero.runtime.contents import Held
from thunder_zero.trace.module import transform_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from thunder.core.module import ThunderModule


def held_by(model: ThunderModule) -> Held:
    """What this rank holds of a model, as checkpoints see it."""
    state = transform_of(model).state
    plan, ranks = state.plan, state.ranks
    parameters = dict(model.named_parameters(remove_duplicate=False))
    plain = {name: value for name, value in model._model.state_dict().items() if name not in plan.by_name}
    return Held(
        plan=plan,
        shards=state.shards,
        ignored={name: parameters[name] for name in plain if name in parameters},
        buffers={
            name: model.get_buffer(name)
            for name, value in plain.items()
            if name not in parameters and isinstance(value, Tensor)
        },
        states={name: value for name, value in plain.items() if not isinstance(value, Tensor)},
        rank=ranks.everyone.rank(),
        writes=ranks.across is None or ranks.across.rank() == 0,
    )


def save(
    path: str | os.PathLike[str],
    model: ThunderModule,
    optimizer: Optimizer | None = None,
    *,
    keep: int | None = None,
    wait: bool = True,
    **extra: Any,
) -> Future[Path]:
    """Save a checkpoint: every rank writes its shards, and any number of ranks loads it, in any stage.

    A collective: all ranks must call it. The folder becomes visible at once and whole, and ``latest`` beside it leads
    to it; whatever dies before, the checkpoints that were there stay as they are.

    >>> tz.save(f"runs/step-{step}", model, optimizer, keep=3, scheduler=scheduler, rng=torch.get_rng_state())

    The files are those of ``torch.distributed.checkpoint`` (DCP), as ``dcp.save({"model": ..., "optim": ...})`` writes
    FSDP2's ``get_state_dict``: names and shapes of the plain module. ``manifest.json`` has the SHA-256 of each.

    Args:
        path: the checkpoint's folder, which all ranks see. An earlier checkpoint of that name is replaced.
        model: a model with ZeroTransform.
        optimizer: built on ``model.parameters()``; its state and hyper-parameters are saved under parameter names.
        keep: how many checkpoints stay in the folder around ``path``: older ones are deleted once this one is there.
        wait: False copies everything to the CPU and writes it in a thread, while training goes on.
        extra: what else each rank has: anything with ``state_dict``, or that ``torch.load(weights_only=True)`` reads
            (numbers, strings, tensors, dicts and lists).

    Returns:
        A future of the path: done, or with ``wait=False`` done when it is visible. An error of such a save is warned of
        at once, and raised by the future's ``result`` and by the next save.

    Raises:
        TypeError: not a model with ZeroTransform.
        ValueError: ``keep`` is below 1; a name that means something else; an extra, or an optimizer's state, that
            cannot be saved.
        FileExistsError: something that is no checkpoint has that name.
        OSError: it cannot be written.
        RuntimeError: another rank refused; ranks differ; an accumulation is open; the asynchronous save before failed.
    """
    state = transform_of(model).state
    return saving.save(state, Path(path), held_by(model), optimizer, extra, keep=keep, wait=wait)


@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    model: ThunderModule,
    optimizer: Optimizer | None = None,
    *,
    check: bool = True,
    **extra: Any,
) -> tuple[dict[str, Any], ...]:
    """Load a checkpoint, on any number of ranks and in any stage: all of it, or nothing at all.

    A collective: all ranks must call it. Before anything changes, all files are checked against their SHA-256, each
    rank a share of them, and read to memory of their own.

    >>> extras = tz.load("runs/latest", model, optimizer, scheduler=scheduler)
    >>> torch.set_rng_state(extras[dist.get_rank()]["rng"])

    Args:
        path: the folder that :func:`save` wrote, or ``latest`` beside it, or what DCP wrote of FSDP2's or DDP's
            ``{"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}``.
        model: a model with ZeroTransform.
        optimizer: built on ``model.parameters()``, in the groups in which it was saved.
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
    state = transform_of(model).state
    loaded = saving.load(state, Path(path), held_by(model), optimizer, extra, check=check)
    for target, value in loaded.found.tensors:
        target.copy_(value)  # which ZeRO-1 sees by the shard's version
    for name, value in loaded.found.states.items():
        model._model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
    return loaded.extras
