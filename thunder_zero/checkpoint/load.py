"""``tz.load``: finds, checks and reads a checkpoint, then changes the model; all or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from thunder_zero.checkpoint import folder, manifest
from thunder_zero.checkpoint.agreed import agreed, require_at_rest
from thunder_zero.checkpoint.averages import emas_of, read_averages, require_own, without_emas
from thunder_zero.checkpoint.background import wait_for_last
from thunder_zero.checkpoint.commit import OwnState, Pairs, States, write_all_or_none
from thunder_zero.checkpoint.contents import Contents, Optimizers
from thunder_zero.checkpoint.dcp_check import require_files
from thunder_zero.checkpoint.dcp_read import read_metadata
from thunder_zero.checkpoint.extras import NO_EXTRAS, own_extras, read_extras, require_extras, require_stateful
from thunder_zero.checkpoint.manifest import Manifest
from thunder_zero.checkpoint.read_model import read_model
from thunder_zero.checkpoint.read_optimizers import read_optimizers
from thunder_zero.comm.agree import all_or_none
from thunder_zero.comm.small_collectives import broadcast_object_from_rank_0
from thunder_zero.runtime.ema import EMA
from thunder_zero.runtime.optimizers import load_exactly
from thunder_zero.runtime.sharded_model import sharded_model, tagged
from thunder_zero.runtime.state import State


@dataclass(frozen=True, slots=True)
class Loaded:
    """The extras of a checkpoint.

    Attributes:
        own: the extras that this rank saved, by name. If another number of ranks saved, only those whose values are
            equal on all of them: ``own.get("rng")`` is None then.
        of_rank: the extras of each rank that saved, in rank order.
    """

    own: Mapping[str, Any]
    of_rank: tuple[Mapping[str, Any], ...] = field(repr=False)  # it includes what `own` has


@tagged("tz.load")
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Stateful | EMA] = NO_EXTRAS,
    verify_files: bool = True,
) -> Loaded:
    """Load a checkpoint, on any number of ranks and in any stage: all of it, or nothing.

    A collective: all ranks must call it. Before anything changes, every file is checked against its SHA-256 (the ranks
    share the files), and each rank reads its part into new memory.

    >>> loaded = tz.load("runs/latest", model, optimizer, extra={"scheduler": scheduler})
    >>> torch.set_rng_state(loaded.own["rng"])

    Args:
        path: the folder that :func:`save` wrote, or the link ``latest``; or one that another tool wrote with
            ``dcp.save``, with model and optimizer under their usual names.
        model: a model with ZeroTransform.
        optimizer: one or several, of the same classes and parameter groups as when they were saved.
        extra: objects whose ``load_state_dict`` takes what was saved under their names, as in :attr:`Loaded.own`; EMAs.
        verify_files: False loads a checkpoint of another tool, which has no manifest to compare the files with.

    Returns:
        The extras that were saved.

    Raises:
        TypeError: ``model`` has no ZeroTransform; an extra has no ``load_state_dict``.
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, or of another model or optimizer; an extra is not in it, or differs between ranks.
        RuntimeError: another rank refused; ranks differ; ``no_sync`` holds gradients; inside ``EMA.applied``.
    """
    sharded, emas, others = sharded_model(model), emas_of(extra), without_emas(extra)
    group = sharded.state.group
    contents, optimizers = agreed("load from", Path(path), model, optimizer, extra, verify_files=verify_files)
    with all_or_none(group, "to load"):
        _require_ready(sharded.state, others, emas)
    where, written = find_checkpoint(Path(path), group, verify_files=verify_files)
    with all_or_none(group, "to load"):
        with refuse_replaced(where, written):
            metadata, ranks = read_metadata(where), written.ranks if written else 0
            tensors, states, of_rank = read_checkpoint(where, metadata, contents, sharded.plain, optimizers, ranks)
            averages, counts = read_averages(where, contents, metadata, emas)
        loaded = Loaded(own_extras(of_rank, group.rank(), group.size()), of_rank)
        require_extras(list(others), loaded.own, of_rank, group.size())
    of_extras = [(thing, partial(thing.load_state_dict, loaded.own[name])) for name, thing in others.items()]
    write_all_or_none([*tensors, *averages], [*of_extras, *states, *counts], group)
    sharded.state.mark_stale(sharded.state.shards)
    return loaded


def read_checkpoint(
    folder: Path, metadata: Metadata, contents: Contents, plain: nn.Module, optimizers: Sequence[Optimizer], ranks: int
) -> tuple[Pairs, States, tuple[dict[str, Any], ...]]:
    """This rank's part of a checkpoint in new memory: of the model's tensors, the states of its modules and optimizers
    with the calls that load them, and the extras of each rank; changes nothing.

    Args:
        folder: the checkpoint's.
        metadata: DCP's description of it.
        contents: this rank's part of the model.
        plain: the plain module, whose submodules take their extra states.
        optimizers: those to load.
        ranks: how many saved, if known, or 0.

    Raises:
        ValueError: it is of another model or another optimizer, or damaged.
    """
    require_files(folder, metadata)
    of_rank = read_extras(folder, metadata, ranks)
    tensors, found = read_model(folder, metadata, contents)
    states: list[tuple[Any, Callable[[], object]]] = []
    for name, value in found.items():
        module = OwnState(plain.get_submodule(name.rpartition(".")[0]))
        states.append((module, partial(module.load_state_dict, value)))
    if optimizers:
        state_dicts = read_optimizers(folder, metadata, contents, optimizers)
        states += [(of, partial(load_exactly, of, saved)) for of, saved in zip(optimizers, state_dicts, strict=True)]
    return tensors, states, of_rank


def _require_ready(state: State, extra: Mapping[str, object], emas: Mapping[str, EMA]) -> None:
    require_own(emas, state)
    wait_for_last(state)
    require_at_rest(state, "load")
    require_stateful(extra)


def find_checkpoint(path: Path, group: dist.ProcessGroup, *, verify_files: bool) -> tuple[Path, Manifest | None]:
    """The folder that rank 0 finds, for all ranks (a link may move meanwhile); and, with
    ``verify_files``, its manifest, after the files were compared with it. A collective.

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
            written = manifest.require_manifest(where) if verify_files else None
    where, written = broadcast_object_from_rank_0((where, written), group)
    with all_or_none(group, "to load"):
        if not where.is_dir():
            raise OSError(
                f"rank 0 found {where}, this rank does not see it; load from a file system that all ranks share"
            )
        with refuse_replaced(where, written):
            if written is not None:
                files = written.files[group.rank() :: group.size()]
                manifest.require_no_faults(where, manifest.find_faults(where, files))
    return where, written


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
