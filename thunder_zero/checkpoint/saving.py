"""Saving and loading a checkpoint on all ranks: what one of them refuses, all refuse, and nothing has changed.

A save is three agreements: rank 0 has made the folder; all have written; rank 0 has published. Asynchronous saves do
the same in a thread, on copies, over a group of their own, since training's collectives must not meet theirs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from thunder_zero.checkpoint import dcp, folder, manifest, reading
from thunder_zero.checkpoint.dcp import Item, Part
from thunder_zero.checkpoint.items import copied, model_items, optimizer_items
from thunder_zero.checkpoint.manifest import Manifest
from thunder_zero.checkpoint.reading import Found
from thunder_zero.comm import agree
from thunder_zero.comm.agree import Fact, all_or_none
from thunder_zero.comm.group import group_like
from thunder_zero.comm.peers import broadcast_object_from_rank_0, gather_object_on_rank_0
from thunder_zero.runtime.optimizers import load_exactly, parameters_of
from thunder_zero.runtime.registry import owners_of
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.all_or_nothing import OwnState, Pending, write_all_or_none
from thunder_zero.state_dict.contents import EXTRA, ModelContents, state_facts

ALIKE = "give every rank the same"


class Background:
    """A model's asynchronous saves, one after the other, and what they talk over."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group_like(group, device)
        self.last: Future[Path] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thunder_zero-save")

    def start(self, path: Path, items: Sequence[Item], max_to_keep: int | None) -> Future[Path]:
        """Save in the thread; an error is told at once, and raised by the next save, too."""
        self.last = self._thread.submit(write, path, items, max_to_keep, self.group)
        self.last.add_done_callback(_warn)
        return self.last


_backgrounds: WeakKeyDictionary[State, Background] = WeakKeyDictionary()


def _warn(saved: Future[Path]) -> None:
    if (error := saved.exception()) is not None:
        warnings.warn(f"an asynchronous save failed: {error}", stacklevel=2)


def finish_last(state: State) -> None:
    """Wait for an asynchronous save that is under way.

    Raises:
        RuntimeError: it failed.
    """
    background = _backgrounds.get(state)
    if background is not None and background.last is not None:
        last, background.last = background.last, None
        if (error := last.exception()) is not None:
            raise RuntimeError(f"the asynchronous save before this one failed: {error}") from error


def save(
    state: State,
    path: Path,
    held: ModelContents,
    optimizers: Sequence[Optimizer],
    extra: Mapping[str, Any],
    *,
    max_to_keep: int | None,
    wait: bool,
) -> Future[Path]:
    """Save on all ranks; the future has the path. See :func:`thunder_zero.save`."""
    agree.require_same(
        [
            Fact("the path to save at", str(path), ALIKE),
            Fact("the extras to save", str(sorted(extra)), ALIKE),
            Fact(
                "max_to_keep, wait and how many optimizers there are", str((max_to_keep, wait, len(optimizers))), ALIKE
            ),
        ],
        state.group,
    )
    with all_or_none(state.group, "to save"):
        finish_last(state)  # it may have failed on one rank alone
        if max_to_keep is not None and (
            not isinstance(max_to_keep, int) or isinstance(max_to_keep, bool) or max_to_keep < 1
        ):
            raise ValueError(
                f"max_to_keep is {max_to_keep!r}; give a number of checkpoints, 1 or more, or None to keep all"
            )
        require_closed(state, "a checkpoint does not have them; save")
        items = model_items(held) + extra_items(held, extra)
        items += optimizer_items(held, optimizers)
        lines = state_facts(held, optimizers)
    agree.require_same(lines, state.group)
    if wait:
        done: Future[Path] = Future()
        done.set_result(write(path, items, max_to_keep, state.group))
        return done
    background = _backgrounds.get(state)
    if background is None:
        background = _backgrounds[state] = Background(state.group, state.device)
    with all_or_none(state.group, "to save"):
        items = [copied(item) for item in items]
    return background.start(path, items, max_to_keep)


def require_closed(state: State, why: str) -> None:
    """Raise in the middle of an accumulation.

    Raises:
        RuntimeError: gradients are deferred.
    """
    if state.open_accumulation(state.shards.values()):
        raise RuntimeError(f"gradients that no_sync deferred are not reduced yet, and {why} after optimizer.step()")


def extra_items(held: ModelContents, extra: Mapping[str, Any]) -> list[Item]:
    """What a rank gives beside model and optimizer.

    Raises:
        ValueError: it cannot be read again by ``torch.load(weights_only=True)``, or it is an optimizer of shards.
    """
    items = []
    for name, value in extra.items():
        if name == "check":
            raise ValueError("an extra is named 'check', which means something else to thunder_zero.load; rename it")
        if isinstance(value, Optimizer) and any(owners_of(parameters_of(value))):
            raise ValueError(
                f"the extra {name!r} is an optimizer of a sharded model, whose state would be rows without a place; "
                f"give it as optimizer, or in a list of several"
            )
        state = value.state_dict() if isinstance(value, Stateful) else value
        try:
            items.append(Item((held.rank_prefix, EXTRA, name), dcp.pickled(state)))
        except ValueError as error:
            raise ValueError(f"the extra {name!r}: {error}") from None
    return items


@torch.no_grad()
def write(path: Path, items: Sequence[Item], max_to_keep: int | None, group: dist.ProcessGroup) -> Path:
    """Write, agree, publish."""
    rank = group.rank()
    try:
        with all_or_none(group, "to save"):
            if rank == 0:
                folder.prepare(path)
        with all_or_none(group, "to save"):
            part = dcp.write(folder.staging_of(path), rank, items)
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
    """What rank 0 does once all ranks have written."""
    files, tensors = dcp.finish(folder.staging_of(path), parts)
    folder.publish(path, Manifest(folder.next_number(path), len(parts), files, tensors))
    if max_to_keep is not None:
        folder.prune(path, max_to_keep)


def load(
    state: State,
    path: Path,
    held: ModelContents,
    optimizers: Sequence[Optimizer],
    into: Mapping[str, Stateful],
    owners: Mapping[str, OwnState],
    *,
    check: bool,
) -> tuple[dict[str, Any], ...]:
    """Load on all ranks; the extras. ``owners`` have states of their own, by name. See :func:`thunder_zero.load`."""
    group = state.group
    what = str((len(optimizers), sorted(into), check))
    lines = [("the path to load from", str(path)), ("how many optimizers there are, the extras, and check", what)]
    agree.require_same([Fact(name, value, ALIKE) for name, value in lines], group)
    with all_or_none(group, "to load"):
        await_last(state)
        require_closed(state, "are of the weights before; load")
        require_stateful(into)
    where, written = located(path, group, check=check)
    with all_or_none(group, "to load"):
        with undisturbed(where, written):
            found = read(where, held, optimizers, 0 if written is None else written.ranks)
        mine = extras_of(found.extras, group.rank(), group.size(), into)
    pairs = zip(optimizers, found.optimizers, strict=True)
    states = [
        *((thing, partial(thing.load_state_dict, mine[name])) for name, thing in into.items()),
        *((owners[name], partial(owners[name].load_state_dict, value)) for name, value in found.states.items()),
        *((optimizer, partial(load_exactly, optimizer, saved)) for optimizer, saved in pairs),
    ]
    write_all_or_none([Pending(found.tensors, states)], group)
    return found.extras


def located(path: Path, group: dist.ProcessGroup, *, check: bool) -> tuple[Path, Manifest | None]:
    """The folder that rank 0 finds, for all ranks: a link may move, and what it leads to be replaced; and its manifest,
    which the files were compared with, if ``check``. A collective.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
        OSError: a rank does not see it.
        RuntimeError: another rank refused.
    """
    where, written = path, None
    with all_or_none(group, "to load"):
        if group.rank() == 0:
            where = folder.locate(path)
            written = require_manifest(where) if check else None
    where, written = broadcast_object_from_rank_0((where, written), group)
    with all_or_none(group, "to load"):
        if not where.is_dir():
            raise OSError(f"{where} is seen by rank 0 and not here; load from a file system that all ranks share")
        if written is not None:
            with undisturbed(where, written):
                require_whole(where, written, group.rank(), group.size())
    return where, written


def await_last(state: State) -> None:
    """Wait for an asynchronous save that is under way; if it failed, the next save says so."""
    background = _backgrounds.get(state)
    if background is not None and background.last is not None:
        background.last.exception()


def require_stateful(into: Mapping[str, object]) -> None:
    """Raise unless all of them can take what was saved.

    Raises:
        TypeError: one that cannot.
    """
    for name, thing in into.items():
        if not isinstance(thing, Stateful):
            raise TypeError(
                f"{name}={thing!r} cannot take what was saved, as it has no state_dict and load_state_dict; load "
                f"without it, and take it from what load returns"
            )


def require_manifest(where: Path) -> Manifest:
    """What a checkpoint consists of.

    Raises:
        ValueError: nothing says it, or it is damaged.
    """
    try:
        return manifest.read(where)
    except FileNotFoundError:
        raise ValueError(
            f"{where} has no {manifest.NAME}, so nothing says what its files should be: it is damaged, or another tool "
            f"wrote it; for the latter give check=False"
        ) from None
    except ValueError as error:
        raise ValueError(f"{where} is damaged: {error}") from None


@contextmanager
def undisturbed(where: Path, written: Manifest | None) -> Iterator[None]:
    """Within: what is read is of one save, which this rank sees as rank 0 saw it.

    Raises:
        ValueError: another save took its place.
    """
    try:
        yield
    finally:
        if written is not None and not folder.is_still(where, written):
            raise ValueError(f"{where} was replaced or deleted by another save while it was read; load it again")


def require_whole(where: Path, written: Manifest, rank: int, ranks: int) -> None:
    """Raise unless every file is as it was saved; ranks share the files.

    Raises:
        ValueError: naming what is missing, cut or changed.
    """
    wrong = manifest.faults(where, written.files[rank::ranks])
    if wrong:
        raise ValueError(f"{where} is damaged: {'; '.join(wrong)}; nothing was loaded, take another checkpoint")


def read(where: Path, held: ModelContents, optimizers: Sequence[Optimizer], ranks: int) -> Found:
    """Everything for one rank, into new memory; ``ranks`` is how many saved it, if known.

    Raises:
        ValueError: another model, another optimizer, or damaged.
    """
    metadata = dcp.read_metadata(where)
    extras = reading.read_extras(where, metadata, ranks)
    tensors, states = reading.read_model(where, metadata, held)
    packed = reading.read_optimizers(where, metadata, held, optimizers) if optimizers else []
    return Found(tensors, states, packed, extras)


def extras_of(extras: Sequence[Mapping[str, Any]], rank: int, ranks: int, names: Mapping[str, Any]) -> dict[str, Any]:
    """What these extras of a rank are: its own, or, where other ranks saved, what all of them had.

    Raises:
        ValueError: there is none; other ranks saved, and had different ones.
    """
    mine = {}
    for name in names:
        having = [of_rank[name] for of_rank in extras if name in of_rank]
        if not having:
            raise ValueError(f"the checkpoint has no extra {name!r}")
        if len(extras) == ranks:
            mine[name] = having[rank]
        elif len({dcp.pickled(value) for value in having}) == 1:
            mine[name] = having[0]
        else:
            raise ValueError(
                f"the extra {name!r} differs between the {len(extras)} ranks that saved, and there are {ranks} now; "
                f"load without it, and take what you need from what load returns"
            )
    return mine
