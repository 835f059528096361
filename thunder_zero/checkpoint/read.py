"""Compares a checkpoint's names, shapes and dtypes with the model's, then reads this rank's part.

This module changes and sends nothing. On rank 1::

    model.h.0.w             (10, 8) in the checkpoint, DTensor (10, 8) here     read this rank's rows
    rank1.model.scale       a parameter that the policy ignores                 read the value of this rank
    rank0.extra             the extras of rank 0                                read the extras of all ranks

Other tools use other prefixes of keys (``ROOTS``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from thunder_zero.checkpoint.contents import (
    EXTRA,
    GROUPS,
    MODEL,
    OPTIM,
    STATE,
    Contents,
    name_some,
    require_same_names,
    split_rank_prefix,
)
from thunder_zero.checkpoint.dcp_read import places_by_key, read_entries
from thunder_zero.checkpoint.dcp_write import key_of
from thunder_zero.checkpoint.manifest import USE_ANOTHER, File
from thunder_zero.checkpoint.optimizer_states import SavedOptimizers
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.frozen import frozen_param
from thunder_zero.sharded.optimizers import load_exactly

# Prefixes of keys in checkpoints of torch's tutorials, Fabric, Trainer, Accelerate, torchtune and (none) torchtitan.
ROOTS = {
    "model": (MODEL, "app.model", "state_dict", "model_state_dict", "state.model", ""),
    "optimizer": (OPTIM, "optimizer", "app.optim", "app.optimizer", "optimizer_0", "optimizer_state_dict"),
}
NO_MODEL = f"save it as {{{MODEL!r}: get_model_state_dict(...)}}, or load a checkpoint of this model"
NO_OPTIMIZER = f"load without one, or save it as {{{OPTIM!r}: get_optimizer_state_dict(...)}}"
BUILD = "build the model as it was saved"


States = Sequence[tuple[Any, Callable[[], object]]]  # (object with a state, call that loads the state) tuples


class NewValues(NamedTuple):
    """Values that were read from a checkpoint, in new memory."""

    tensors: Sequence[tuple[Tensor, Tensor]]  # (local tensor, new value) tuples
    states: States  # modules, averages and optimizers; a call may raise
    of_rank: tuple[Mapping[str, Any], ...]  # the extras of each rank that saved, by name


def read_checkpoint(
    folder: Path,
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
    states = SavedOptimizers(metadata, contents[0], optimizers, _optimizer_prefix(stored)) if optimizers else None
    if states is not None:
        keys, parts = [*keys, *states.keys], parts | states.parts
    values = read_entries(folder, metadata, keys, parts, files)
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
        raise ValueError(f"{folder} is damaged: the extras of a rank are no dict; {USE_ANOTHER}")
    return NewValues([(local(tensor.detach()), values[key]) for key, tensor in tensors.items()], loads, of_rank)


def _find_prefix(kind: str, score: Callable[[str], int], stored: Iterable[str], action: str) -> str:
    """Return the usual root with the highest score, which is 0 if no key has the prefix."""
    best = max((f"{root}." if root else "" for root in ROOTS[kind]), key=score)
    if score(best):
        return best
    usual = ", ".join(repr(root) for root in ROOTS[kind] if root)
    first_keys = {key.partition(".")[0]: key for key in sorted(stored, reverse=True)}  # by root
    raise ValueError(
        f"the checkpoint has no {kind} under {usual}: it has {name_some(sorted(first_keys.values()))}; {action}"
    )


def _model_prefix(names: Collection[str], keys: Collection[str]) -> str:
    def score(prefix: str) -> int:  # names of this model count more than other keys, which may belong to another model
        return 2 * sum(prefix + name in keys for name in names) + any(prefix and key.startswith(prefix) for key in keys)

    return _find_prefix("model", score, keys, NO_MODEL)


def _optimizer_prefix(keys: Collection[str]) -> str:
    def score(prefix: str) -> int:
        return any(key.startswith((f"{prefix}{GROUPS}.", f"{prefix}{STATE}.")) for key in keys)

    return _find_prefix("optimizer", score, keys, NO_OPTIMIZER)


def _match(contents: Contents, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target of each key: a tensor, the key of the first name (for an alias), or an object with a state.

    Raise ValueError if names, shapes or dtypes differ.
    """
    root, label = f"{key_of(contents.root)}.", contents.label
    prefix = _model_prefix([*contents.params, *contents.buffers], stored) if contents.root == (MODEL,) else root
    rank_prefix = f"{contents.rank_prefix}.{root}"
    if not any(key.startswith(prefix) for key in stored):
        raise ValueError(f"the checkpoint has no {label}; leave it out of extra, or load another checkpoint")
    targets: dict[str, Any] = {
        prefix + name: tensor for name, tensor in {**contents.params, **contents.buffers}.items()
    }
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
