"""``tz.load``: finds, checks and reads a checkpoint, then changes the model; all or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from thunder_zero.checkpoint import folder, manifest
from thunder_zero.checkpoint.background import wait_for_last
from thunder_zero.checkpoint.extras import own_extras, require_extras, require_named, require_stateful
from thunder_zero.checkpoint.manifest import Manifest
from thunder_zero.checkpoint.preconditions import require_reduced_gradients, require_same_arguments
from thunder_zero.checkpoint.read_all import Found, read_checkpoint
from thunder_zero.comm.agree import all_or_none
from thunder_zero.comm.small_collectives import broadcast_object_from_rank_0
from thunder_zero.runtime.optimizers import load_exactly
from thunder_zero.runtime.sharded_model import ShardedModel, sharded_model
from thunder_zero.state_dict.all_or_nothing import OwnState, ValuesToWrite, write_all_or_none
from thunder_zero.state_dict.contents import ModelContents, Optimizers, contents_of, optimizer_list


@dataclass(frozen=True, slots=True)
class Loaded:
    """The extras of a checkpoint.

    Attributes:
        own: the extras that this rank saved, by name. If another number of ranks saved, only those whose values are
            equal on all of them: ``own.get("rng")`` is None then.
        of_rank: the extras of each rank that saved, in rank order.
    """

    own: Mapping[str, Any]
    of_rank: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of :func:`load`, with the model's contents by name."""

    path: Path
    model: ShardedModel
    contents: ModelContents
    optimizers: list[Optimizer]
    extra: Mapping[str, Stateful]
    check: bool


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Stateful] = {},
    check: bool = True,
) -> Loaded:
    """Load a checkpoint, on any number of ranks and in any stage: all of it, or nothing.

    A collective: all ranks must call it. Before anything changes, every file is checked against its SHA-256 (the ranks
    share the files), and each rank reads its part into new memory.

    >>> loaded = tz.load("runs/latest", model, optimizer, extra={"scheduler": scheduler})
    >>> torch.set_rng_state(loaded.own["rng"])

    Args:
        path: the folder that :func:`save` wrote, or the link ``latest``, or what DCP wrote of FSDP2's or DDP's
            ``{"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}``.
        model: a model with ZeroTransform.
        optimizer: one or several, of the same classes and parameter groups as when they were saved.
        extra: objects whose ``load_state_dict`` takes what was saved under their names, as in :attr:`Loaded.own`.
        check: False loads a checkpoint of another tool, which has no manifest; then the files are not checked.

    Returns:
        The extras that were saved.

    Raises:
        TypeError: ``model`` has no ZeroTransform; an extra has no ``load_state_dict``.
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, or of another model or optimizer; an extra is not in it, or differs between ranks.
        RuntimeError: another rank refused; ranks differ; ``no_sync`` holds gradients.
    """
    sharded = sharded_model(model)
    with all_or_none(sharded.state.group, "to load"):
        require_named(extra)
        contents, optimizers = contents_of(sharded), optimizer_list(optimizer)
    return _load(Request(Path(path), sharded, contents, optimizers, extra, check))


def _load(request: Request) -> Loaded:
    state = request.model.state
    group = state.group
    arguments = {
        "the path to load from": request.path,
        "the list of names in extra": sorted(request.extra),
        "the number of optimizers": len(request.optimizers),
        "check": request.check,
    }
    require_same_arguments(arguments, group)
    with all_or_none(group, "to load"):
        wait_for_last(state)
        require_reduced_gradients(state, "load")
        require_stateful(request.extra)
    where, written = find_checkpoint(request.path, group, check=request.check)
    with all_or_none(group, "to load"):
        with refuse_replaced(where, written):
            found = read_checkpoint(where, request.contents, request.optimizers, written.ranks if written else 0)
        loaded = Loaded(own_extras(found.extras, group.rank(), group.size()), found.extras)
        require_extras(list(request.extra), loaded.own, loaded.of_rank, group.size())
    write_all_or_none([_values_to_write(request, found, loaded)], group)
    return loaded


def _values_to_write(request: Request, found: Found, loaded: Loaded) -> ValuesToWrite:
    """The values that were read, with the tensors and objects that take them."""
    plain = request.model.plain
    modules = {name: OwnState(plain.get_submodule(name.rpartition(".")[0])) for name in found.states}
    optimizers = zip(request.optimizers, found.optimizers, strict=True)
    states = [
        *((thing, partial(thing.load_state_dict, loaded.own[name])) for name, thing in request.extra.items()),
        *((modules[name], partial(modules[name].load_state_dict, value)) for name, value in found.states.items()),
        *((optimizer, partial(load_exactly, optimizer, saved)) for optimizer, saved in optimizers),
    ]
    return ValuesToWrite(found.tensors, states)


def find_checkpoint(path: Path, group: dist.ProcessGroup, *, check: bool) -> tuple[Path, Manifest | None]:
    """The folder that rank 0 finds, for all ranks (a link may move meanwhile); and, with ``check``, its manifest, after
    the files were compared with it. A collective.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged.
        OSError: a rank does not see it.
        RuntimeError: another rank refused.
    """
    where, written = path, None
    with all_or_none(group, "to load"):
        if group.rank() == 0:
            where = folder.locate(path)
            written = read_manifest(where) if check else None
    where, written = broadcast_object_from_rank_0((where, written), group)
    with all_or_none(group, "to load"):
        if not where.is_dir():
            raise OSError(
                f"rank 0 found {where}, this rank does not see it; load from a file system that all ranks share"
            )
        with refuse_replaced(where, written):
            if written is not None:
                require_intact(where, written, group.rank(), group.size())
    return where, written


def read_manifest(where: Path) -> Manifest:
    """A checkpoint's manifest.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    try:
        return manifest.read(where)
    except FileNotFoundError:
        raise ValueError(
            f"cannot check {where}: it has no {manifest.NAME}, so it is damaged, or another tool wrote it; pass "
            f"check=False to load another tool's checkpoint"
        ) from None
    except ValueError as error:
        raise ValueError(f"{where} is damaged: {error}") from None


def require_intact(where: Path, written: Manifest, rank: int, ranks: int) -> None:
    """Raise unless this rank's share of the files is as it was saved.

    Raises:
        ValueError: files are missing, or were cut or changed.
    """
    wrong = manifest.find_faults(where, written.files[rank::ranks])
    if wrong:
        raise ValueError(f"{where} is damaged: {'; '.join(wrong)}; load another checkpoint, nothing was changed")


@contextmanager
def refuse_replaced(where: Path, written: Manifest | None) -> Iterator[None]:
    """Raise if another save replaced the checkpoint during the block, whatever else the block raised.

    Raises:
        ValueError: it was replaced.
    """
    try:
        yield
    except Exception as error:
        _require_not_replaced(where, written, error)
        raise
    _require_not_replaced(where, written, None)


def _require_not_replaced(where: Path, written: Manifest | None, cause: Exception | None) -> None:
    if written is not None and not folder.is_unchanged(where, written):
        raise ValueError(f"another save replaced or deleted {where} while it was read; load again") from cause
