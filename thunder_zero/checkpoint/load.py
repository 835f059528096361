"""``tz.load``: finds, checks and reads a checkpoint, then changes the whole model or nothing.

Ranks agree after each step, so that all ranks raise if one rank does::

    check_arguments       check the arguments, and compare them between ranks                   save.py
    _find_checkpoint      find the folder, on rank 0
    read_checkpoint       compare names, shapes and dtypes with the model's; read this rank's part into new memory;
                          read some files in full, and compare their SHA-256 (dcp_read.py)
    _write_all_or_none    the first change: load states, which may raise; then copy tensors

On rank 1::

    model.h.0.w             (10, 8) in the checkpoint, DTensor (10, 8) here     read this rank's rows
    rank1.model.scale       a parameter that the policy ignores                 read the value of this rank
    rank0.extra             the extras of rank 0                                read the extras of all ranks
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from thunder_zero.checkpoint import folder, manifest
from thunder_zero.checkpoint.contents import (
    EXTRA,
    GROUPS,
    MODEL,
    OPTIM,
    STATE,
    Contents,
    name_some,
    pickle_value,
    require_same_names,
    split_rank_prefix,
)
from thunder_zero.checkpoint.dcp_read import METADATA, places_by_key, read_entries, read_metadata
from thunder_zero.checkpoint.dcp_write import key_of
from thunder_zero.checkpoint.manifest import USE_ANOTHER, File, Manifest
from thunder_zero.checkpoint.optimizer_states import SavedOptimizers
from thunder_zero.checkpoint.save import NO_EXTRAS, Optimizers, check_arguments, wait_for_last
from thunder_zero.comm.agree import all_or_none
from thunder_zero.comm.small_collectives import broadcast_object_from_rank_0
from thunder_zero.sharded.beside import RowsBeside
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.frozen import frozen_param
from thunder_zero.sharded.optimizers import load_exactly
from thunder_zero.sharded.sharded_model import sharded_model, tagged

# Prefixes of keys in checkpoints of torch's tutorials, Fabric, Trainer, Accelerate, torchtune and (none) torchtitan.
ROOTS = {
    "model": (MODEL, "app.model", "state_dict", "model_state_dict", "state.model", ""),
    "optimizer": (OPTIM, "optimizer", "app.optim", "app.optimizer", "optimizer_0", "optimizer_state_dict"),
}
NO_MODEL = f"save it as {{{MODEL!r}: get_model_state_dict(...)}}, or load a checkpoint of this model"
NO_OPTIMIZER = f"load without one, or save it as {{{OPTIM!r}: get_optimizer_state_dict(...)}}"
OUTER = "outer"  # the root of a DiLoCo
BUILD = "build the model as it was saved"
States = Sequence[tuple[Any, Callable[[], object]]]  # (object with a state, call that loads the state) tuples
VALUES = (int, float, str, bytes, Tensor, dict, list, tuple, type(None))  # types of extras that :class:`Loaded` returns


class OwnExtras(dict[str, Any]):
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
        optimizer: an optimizer, or several in a list, with the classes and parameter groups of the save.
        extra: objects by name. EMAs and objects with ``load_state_dict`` load their saved states. Other saved
            values are in :attr:`Loaded.own`.
        verify_files: False loads a checkpoint of another tool, which has no manifest with SHA-256.
    """
    state = sharded_model(model).state
    with all_or_none(state.group, "to load") as claims:
        contents, optimizers = check_arguments(
            claims, "load from", Path(path), model, optimizer, extra, verify_files=verify_files
        )
        wait_for_last(state)  # the next save raises its error
        steps_out = any(isinstance(value, RowsBeside) and value.root == OUTER for value in extra.values())
        if state.outer is not None and state.before_first_step is None and not steps_out:
            raise ValueError(
                f"{state.name} has an outer step that has begun, and its agreed parameters would not fit the loaded "
                f"ones; pass its DiLoCo in extra, or load before the first step"
            )
        for name, value in extra.items():
            if not isinstance(value, (Stateful, RowsBeside, *VALUES)):
                raise TypeError(
                    f"cannot load into the extra {name!r}: an object of type {type(value).__name__} has no state_dict "
                    f"and load_state_dict; leave it out, and read it from Loaded.own"
                )
    location, saved = _find_checkpoint(Path(path), state.group, verify_files=verify_files)
    beside = [
        part for name, value in extra.items() if isinstance(value, RowsBeside) for part in contents.beside(name, value)
    ]
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
            new_values = read_checkpoint(location, metadata, [contents, *beside], optimizers, files)
        loaded = Loaded(own_extras(new_values.of_rank, contents.rank, contents.ranks), new_values.of_rank)
        extra_states = extras_to_load(extra, loaded, contents.ranks)
    _write_all_or_none(new_values.tensors, [*extra_states, *new_values.states], state.group)
    state.expire(state.params.values())
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


def own_extras(of_rank: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> OwnExtras:
    """Return the extras that this rank saved. If another number of ranks saved, return those equal on all ranks."""
    if len(of_rank) == ranks:
        return OwnExtras(of_rank[rank])
    pickled = [{name: pickle_value(name, value) for name, value in extras.items()} for extras in of_rank or ({},)]
    equal = (name for name, value in pickled[0].items() if all(extras.get(name) == value for extras in pickled))
    return OwnExtras({name: of_rank[0][name] for name in equal})


def extras_to_load(extra: Mapping[str, Any], loaded: Loaded, ranks: int) -> States:
    """Return (extra, call that loads its state) tuples, without EMAs, whose averages are loaded by rows."""
    names = [name for name, value in extra.items() if not isinstance(value, RowsBeside)]
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


# Reading


class NewValues(NamedTuple):
    tensors: Sequence[tuple[Tensor, Tensor]]  # (local tensor, new value) tuples
    states: States  # modules, averages and optimizers; a call may raise
    of_rank: tuple[Mapping[str, Any], ...]  # the extras of each rank that saved, by name


def read_checkpoint(
    location: Path,
    metadata: Metadata,
    contents: Sequence[Contents],
    optimizers: Sequence[Optimizer],
    files: Sequence[File] = (),
) -> NewValues:
    """Read this rank's part of a checkpoint: of the model, of each EMA, of optimizers. ``files`` are verified."""
    stored, places = metadata.state_dict_metadata, places_by_key(metadata)
    _require_as_many_ranks(contents[0].ranks, stored)
    targets = {key: target for item in contents for key, target in _match(item, stored).items()}
    tensors = {key: tensor for key, tensor in targets.items() if isinstance(tensor, Tensor)}
    twins = {alias: key for alias, key in targets.items() if isinstance(key, str)}
    # Another tool may have written a tied parameter twice, or may have had a model without the tie.
    stored_twice = {alias: key for alias, key in twins.items() if places.get(alias) != places.get(key)}
    extras = {split[0]: key for key in stored if (split := split_rank_prefix(key)) and split[1] == EXTRA}
    parts = tensors | {alias: tensors[key] for alias, key in twins.items()}
    keys = [*(key for key in targets if key not in twins), *stored_twice, *extras.values()]
    states = None
    if optimizers:

        def has_optimizer(prefix: str) -> int:
            return any(key.startswith((f"{prefix}{GROUPS}.", f"{prefix}{STATE}.")) for key in stored)

        prefix = _find_prefix("optimizer", has_optimizer, stored, NO_OPTIMIZER)
        states = SavedOptimizers(metadata, contents[0], optimizers, prefix)
        keys, parts = [*keys, *states.keys], parts | states.parts
    values = read_entries(location, metadata, keys, parts, files)
    for alias, key in stored_twice.items():
        if not torch.equal(values[key].view(-1).view(torch.uint8), values[alias].view(-1).view(torch.uint8)):
            raise ValueError(
                f"the checkpoint has another model: {key!r} and {alias!r} are tied here, and differ in it; {BUILD}"
            )
    stateful = [(key, target) for key, target in targets.items() if not isinstance(target, Tensor | str)]
    loads = [(target, partial(target.load_state_dict, values[key])) for key, target in stateful]
    if states is not None:
        pairs = zip(optimizers, states.state_dicts(values), strict=True)
        loads += [(optimizer, partial(load_exactly, optimizer, saved)) for optimizer, saved in pairs]
    of_rank = tuple(values[extras[rank]] for rank in sorted(extras))
    if not all(isinstance(saved, dict) for saved in of_rank):
        raise ValueError(f"{location} is damaged: the extras of a rank are no dict; {USE_ANOTHER}")
    return NewValues([(local(tensor.detach()), values[key]) for key, tensor in tensors.items()], loads, of_rank)


def _find_prefix(kind: str, score: Callable[[str], int], stored: Iterable[str], action: str) -> str:
    """Return the usual root with the highest score, which is 0 if no key has it, as a prefix."""
    best = max((f"{root}." if root else "" for root in ROOTS[kind]), key=score)
    if score(best):
        return best
    usual = ", ".join(repr(root) for root in ROOTS[kind] if root)
    first_keys = {key.partition(".")[0]: key for key in sorted(stored, reverse=True)}  # by root
    raise ValueError(
        f"the checkpoint has no {kind} under {usual}: it has {name_some(sorted(first_keys.values()))}; {action}"
    )


def _match(contents: Contents, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target of each key: a tensor, the key of the first name (for an alias), or an object with a state."""
    root, label = f"{key_of(contents.root)}.", contents.label
    tensors = {**contents.params, **contents.buffers}

    def score(prefix: str) -> int:  # names of this model count more than other keys, which may belong to another model
        is_used = any(prefix and key.startswith(prefix) for key in stored)
        return 2 * sum(prefix + name in stored for name in tensors) + is_used

    prefix = _find_prefix("model", score, stored, NO_MODEL) if contents.root == (MODEL,) else root
    rank_prefix = f"{contents.rank_prefix}.{root}"
    if not any(key.startswith(prefix) for key in stored):
        raise ValueError(f"the checkpoint has no {label}; leave it out of extra, or load another checkpoint")
    targets: dict[str, Any] = {prefix + name: tensor for name, tensor in tensors.items()}
    for name, tensor in contents.ignored.items():
        is_shared = rank_prefix + name not in stored and prefix + name in stored  # FSDP2 saves one value for all ranks
        targets[(prefix if is_shared else rank_prefix) + name] = tensor
    targets |= {prefix + alias: prefix + name for alias, name in contents.aliases.items()}
    targets |= {prefix + name: loader for name, (_, loader) in contents.states.items()}
    prefixes = (prefix, rank_prefix) if prefix else rank_prefix  # "" would match the keys of optimizers, too
    saved = [key for key in stored if key in targets or key.startswith(prefixes)]
    require_same_names(f"the checkpoint has another {label}", saved, targets, BUILD)
    for key, target in targets.items():
        tensor, entry = targets[target] if isinstance(target, str) else target, stored[key]
        if not isinstance(tensor, Tensor):
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"the checkpoint has another {label}: {key} is not a tensor in it; {BUILD}")
        if entry.size != tensor.shape or entry.properties.dtype != tensor.dtype:
            param = frozen_param(tensor)
            bits = f", which rests as {param.frozen_format}" if param else ""
            raise ValueError(
                f"the checkpoint has another {label}: {key} has shape {tuple(entry.size)} and dtype "
                f"{entry.properties.dtype} in it, shape {tuple(tensor.shape)} and dtype {tensor.dtype} here{bits}; "
                f"{BUILD}"
            )
    return targets


def _require_as_many_ranks(count: int, stored: Mapping[str, Any]) -> None:
    """Raise ValueError if the checkpoint has ignored parameters, and a different number of ranks saved it."""
    split = [split_rank_prefix(key) or (0, "") for key in stored]
    ranks = {rank for rank, key in split if key.startswith((f"{MODEL}.", f"{OPTIM}."))}
    if ranks and ranks != set(range(count)):
        raise ValueError(
            f"cannot load on {count} ranks: the checkpoint has values of ignored parameters from each of {len(ranks)} "
            f"ranks; load it on {len(ranks)} ranks"
        )
