"""``tz.load``: finds, checks and reads a checkpoint, then changes the whole model or nothing.

Ranks agree after each step, so that all ranks raise if one rank does::

    check_arguments       check the arguments, and compare them between ranks                   save.py
    _find_checkpoint      find the folder, on rank 0
    read_checkpoint       compare names, shapes and dtypes with the model's; read this rank's part into new memory
                          (read.py); read some files in full, and compare their SHA-256 (dcp_read.py)
    _write_all_or_none    the first change: load states, which may raise; then copy tensors
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from thunder_zero.checkpoint import folder, manifest
from thunder_zero.checkpoint.contents import pickle_value
from thunder_zero.checkpoint.dcp_read import METADATA, read_metadata
from thunder_zero.checkpoint.manifest import File, Manifest
from thunder_zero.checkpoint.read import States, read_checkpoint
from thunder_zero.checkpoint.save import NO_EXTRAS, Optimizers, check_arguments, wait_for_last
from thunder_zero.comm.agree import all_or_none
from thunder_zero.comm.small_collectives import broadcast_object_from_rank_0
from thunder_zero.optim.ema import EMA
from thunder_zero.sharded.sharded_model import sharded_model, tagged

VALUES = (int, float, str, bytes, Tensor, dict, list, tuple, type(None))  # types of extras that :class:`Loaded` returns


class OwnExtras(dict[str, Any]):
    """The extras of one rank, by name."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(
            f"no extra {name!r} for this rank, which has {sorted(self)}; where another number of ranks saved it with "
            f"values of their own, they are in Loaded.of_rank: ask own.get({name!r})"
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """The extras of a checkpoint, by name."""

    # the extras that this rank saved. If another number of ranks saved, ``own`` has only those equal on all ranks.
    own: Mapping[str, Any]
    of_rank: tuple[Mapping[str, Any], ...] = field(repr=False)  # the extras that each rank saved, in rank order


@tagged("tz.load")
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] = NO_EXTRAS,
    verify_files: bool = True,
) -> Loaded:
    """Load a checkpoint on any number of ranks and in any stage. If it raises, the model is unchanged.

    A collective: all ranks must call it. Before anything changes, each rank reads its part into new memory. Ranks
    divide the files among them, and compare each file with its SHA-256.

    >>> loaded = tz.load("runs/latest", model, optimizer, extra={"scheduler": scheduler})
    >>> torch.set_rng_state(loaded.own["rng"])

    Args:
        path: the folder that :func:`save` wrote, or the link ``latest``; or a folder that another tool wrote with
            ``dcp.save``, with model and optimizer under usual names.
        model: a model with ZeroTransform.
        optimizer: an optimizer, or several in a list, with the classes and parameter groups of the save.
        extra: objects by name. EMAs and objects with ``load_state_dict`` load their saved states. Other saved
            values are in :attr:`Loaded.own`.
        verify_files: False loads a checkpoint of another tool, which has no manifest with SHA-256.

    Raises:
        ValueError: the checkpoint is damaged, belongs to another model or optimizer, lacks an extra, or has an extra
            that differs between the ranks that saved.
        RuntimeError: another rank raised, arguments differ between ranks, ``no_sync`` holds gradients, or the call is
            inside ``EMA.applied``.
    """
    state = sharded_model(model).state
    with all_or_none(state.group, "to load") as facts:
        contents, optimizers = check_arguments(
            facts, "load from", Path(path), model, optimizer, extra, verify_files=verify_files
        )
        wait_for_last(state)  # the next save raises its error
        _require_loadable(extra)
    location, saved = _find_checkpoint(Path(path), state.group, verify_files=verify_files)
    averages = [contents.averages(name, ema) for name, ema in extra.items() if isinstance(ema, EMA)]
    with all_or_none(state.group, "to load"):
        if not location.is_dir():
            raise OSError(
                f"rank 0 found {location}, this rank does not see it; load from a file system that all ranks share"
            )
        with _refuse_replaced(location, saved):
            files = () if saved is None else _files_to_verify(saved, contents.rank, contents.ranks)
            manifest.require_no_faults(location, files, contents=False)
            metadata_file = next((file for file in saved.files if file.name == METADATA), None) if saved else None
            metadata = read_metadata(location, metadata_file)
            new_values = read_checkpoint(location, metadata, [contents, *averages], optimizers, files)
        loaded = Loaded(own_extras(new_values.of_rank, contents.rank, contents.ranks), new_values.of_rank)
        extra_states = extras_to_load(extra, loaded, contents.ranks)
    _write_all_or_none(new_values.tensors, [*extra_states, *new_values.states], state.group)
    state.mark_stale(state.params)
    return loaded


def _find_checkpoint(path: Path, group: dist.ProcessGroup, *, verify_files: bool) -> tuple[Path, Manifest | None]:
    """Let rank 0 find the checkpoint. Return its folder, and its manifest with ``verify_files``. A collective."""
    location, saved = path, None
    with all_or_none(group, "to load"):
        if group.rank() == 0:  # one rank decides, since the link may move at any time
            location = folder.locate(path)
            saved = manifest.require_manifest(location) if verify_files else None
    return broadcast_object_from_rank_0((location, saved), group)


def _files_to_verify(saved: Manifest, rank: int, ranks: int) -> tuple[File, ...]:
    """Return consecutive files for a rank to verify, which probably have the rows that the rank reads."""
    files = [file for file in saved.files if file.name != METADATA]  # every rank verifies the metadata
    return tuple(files[rank * len(files) // ranks : (rank + 1) * len(files) // ranks])


@contextmanager
def _refuse_replaced(location: Path, saved: Manifest | None) -> Iterator[None]:
    """Raise ValueError if another save replaces the checkpoint during the block, even if the block raises, too."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    if saved is not None and not folder.is_unchanged(location, saved):
        raise ValueError(f"another save replaced or deleted {location} while it was read; load again") from failure
    if failure is not None:
        raise failure


def _require_loadable(extra: Mapping[str, object]) -> None:
    """Raise TypeError unless each extra can load a state, or has a type that :class:`Loaded` returns."""
    for name, value in extra.items():
        if not isinstance(value, (Stateful, EMA, *VALUES)):
            raise TypeError(
                f"cannot load into the extra {name!r}: an object of type {type(value).__name__} has no state_dict and "
                f"load_state_dict; leave it out, and read it from Loaded.own"
            )


def own_extras(of_rank: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> OwnExtras:
    """Return the extras that this rank saved. If another number of ranks saved, return those equal on all ranks."""
    if len(of_rank) == ranks:
        return OwnExtras(of_rank[rank])
    pickled = [{name: pickle_value(name, value) for name, value in extras.items()} for extras in of_rank or ({},)]
    equal = (name for name, value in pickled[0].items() if all(extras.get(name) == value for extras in pickled))
    return OwnExtras({name: of_rank[0][name] for name in equal})


def extras_to_load(extra: Mapping[str, Any], loaded: Loaded, ranks: int) -> States:
    """Return (extra, call that loads its state) tuples, without EMAs, whose averages are loaded by rows."""
    names = [name for name, value in extra.items() if not isinstance(value, EMA)]
    for name in names:
        if not any(name in extras for extras in loaded.of_rank):
            known = sorted(set().union(*loaded.of_rank))
            raise ValueError(f"the checkpoint has no extra {name!r}: it has {known}; leave it out of extra")
        if name not in loaded.own:
            raise ValueError(
                f"cannot load the extra {name!r} on {ranks} ranks: it differs between the {len(loaded.of_rank)} ranks "
                f"that saved; leave it out, and take what you need from Loaded.of_rank"
            )
    stateful = [name for name in names if isinstance(extra[name], Stateful)]
    return [(extra[name], partial(extra[name].load_state_dict, loaded.own[name])) for name in stateful]


@torch.no_grad()
def _write_all_or_none(tensors: Sequence[tuple[Tensor, Tensor]], states: States, group: dist.ProcessGroup) -> None:
    """Write all values. If loading a state raises on any rank, no rank writes a value. This is a collective."""
    with all_or_none(group, "to load"):
        restoring = _restore_at_end([target for target, _ in states])
    with restoring:
        with all_or_none(group, "to load"):
            for _, load_state in states:
                load_state()
        restoring.pop_all()
    for target, value in tensors:
        target.copy_(value)


def _restore_at_end(targets: Sequence[Any]) -> ExitStack:
    """Return an exit stack that restores the objects' current states, unless its ``pop_all`` is called before."""

    def restore(target: Stateful, old_state: Any) -> None:
        with suppress(Exception):  # best effort
            target.load_state_dict(old_state)

    stack = ExitStack()
    for target in targets:
        if isinstance(target, Optimizer):  # loading replaces the tensors of states, so no copy is needed
            stack.callback(vars(target).update, state=target.state, param_groups=target.param_groups)
        else:
            stack.callback(restore, target, copy.deepcopy(target.state_dict()))
    return stack
