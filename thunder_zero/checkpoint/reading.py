"""What a rank reads of a checkpoint for its model, its optimizers and its extras, and of which model it has to be.

The other way of ``contents.py``. Everything is read into new memory; whoever calls writes it where it belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from thunder_zero.checkpoint import dcp
from thunder_zero.checkpoint.dcp import Item, Path_
from thunder_zero.checkpoint.items import part
from thunder_zero.state_dict.contents import (
    EXTRA,
    GROUPS,
    KINDS,
    MODEL,
    OPTIM,
    STATE,
    ModelContents,
    Named,
    all_named_groups,
    groups_of,
    named_groups,
    numbered_state_dict,
    rows_of,
    split_rank_prefix,
)


@dataclass(frozen=True, slots=True)
class Found:
    """What was read for one rank, and is not in its model yet.

    Attributes:
        tensors: pairs of what is in the model and what shall be in it, of one shape.
        states: what modules take by ``set_extra_state``, by name.
        optimizers: a state dict for ``Optimizer.load_state_dict`` of each.
        extras: what each rank that saved gave beside these, by name.
    """

    tensors: list[tuple[Tensor, Tensor]]
    states: dict[str, Any]
    optimizers: list[dict[str, Any]]
    extras: tuple[dict[str, Any], ...]


def read_model(
    folder: Any, metadata: Metadata, held: ModelContents
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Any]]:
    """A checkpoint's model for this rank.

    Raises:
        ValueError: it is of another model, or damaged.
    """
    require_model(held, metadata.state_dict_metadata)
    pairs, items, twins = [], [], []
    places = dcp.places_of(metadata)

    def take(path: Path_, target: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
        room = torch.empty_like(target, device="cpu")
        items.append(Item(path, room, start, shape))
        return room

    for param in held.plan.params:
        mine = part(held, param, (MODEL, param.path), held.shards[param.path])
        assert isinstance(mine.value, Tensor), "a parameter is one"
        pairs.append((mine.value, take(mine.path, mine.value, mine.start, mine.shape)))
        for alias in param.aliases:
            if places[dcp.key_of(mine.path)] != places[dcp.key_of((MODEL, alias))]:
                twins.append(
                    (param.path, alias, pairs[-1][1], take((MODEL, alias), mine.value, mine.start, mine.shape))
                )
    for name, tensor in held.buffers.items():
        pairs.append((tensor, take((MODEL, name), tensor, 0, tuple(tensor.shape))))
    for name, tensor in held.ignored.items():
        pairs.append((tensor.detach(), take((held.rank_prefix, MODEL, name), tensor.detach(), 0, tuple(tensor.shape))))
    keys = {dcp.key_of((MODEL, name)): name for name in held.states}
    values = dcp.read(folder, metadata, items, list(keys))
    for path, alias, first, second in twins:  # another tool wrote it twice, or they were not tied
        if not torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8)):
            raise ValueError(
                f"the checkpoint is of another model: {path!r} and {alias!r} differ in it, and are tied here"
            )
    return pairs, {keys[key]: value for key, value in values.items()}


def require_model(held: ModelContents, stored: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint is of this model.

    Raises:
        ValueError: names that are missing or not known; another shape or dtype.
    """
    plan = held.plan
    expected: dict[Path_, tuple[tuple[int, ...], torch.dtype]]
    expected = {(MODEL, name): (param.shape, param.dtype) for param in plan.params for name in param.names}
    expected |= {(MODEL, name): (tuple(tensor.shape), tensor.dtype) for name, tensor in held.buffers.items()}
    expected |= {
        (held.rank_prefix, MODEL, name): (tuple(tensor.shape), tensor.dtype) for name, tensor in held.ignored.items()
    }
    by_key = {dcp.key_of(path): what for path, what in expected.items()}
    ranks = {
        owner[0]
        for owner in map(split_rank_prefix, stored)
        if owner and owner[1].startswith((f"{MODEL}.", f"{OPTIM}."))
    }
    if ranks and ranks != set(range(plan.ranks)):
        raise ValueError(
            f"each rank of the checkpoint has parameters of its own, which the policy ignored, and it is of "
            f"{len(ranks)} ranks; load it on as many, there are {plan.ranks} here"
        )
    names = by_key.keys() | {dcp.key_of((MODEL, name)) for name in held.states}
    in_file = {key for key in stored if key.startswith((f"{MODEL}.", f"{held.rank_prefix}.{MODEL}."))}
    missing, unknown = sorted(names - in_file), sorted(in_file - names)
    if missing or unknown:
        raise ValueError(
            f"the checkpoint is of another model: it lacks {_few(missing)} and has {_few(unknown)} that this model "
            f"does not know"
        )
    for key, (shape, dtype) in by_key.items():
        found = stored[key]
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"the checkpoint is of another model: {key} is no tensor in it")
        if tuple(found.size) != shape or found.properties.dtype != dtype:
            raise ValueError(
                f"the checkpoint is of another model: {key} has shape {tuple(found.size)} and {found.properties.dtype} "
                f"in it, and {shape} and {dtype} here"
            )


@dataclass(frozen=True, slots=True)
class StateRows:
    """A state of a parameter in a checkpoint.

    Attributes:
        named: of which parameter.
        name: of the state, such as ``"exp_avg"``.
        item: this rank's rows, if it is a tensor.
    """

    named: Named
    name: str
    item: Item | None


def read_optimizers(
    folder: Any, metadata: Metadata, held: ModelContents, optimizers: Sequence[Optimizer]
) -> list[dict[str, Any]]:
    """A checkpoint's optimizers for this rank, as ``Optimizer.load_state_dict`` of each takes it.

    Raises:
        ValueError: there is none; it has other parameter groups, or states that are not cut into rows; it is damaged.
    """
    stored = metadata.state_dict_metadata
    groups = all_named_groups(held, optimizers)
    wanted = states_wanted(held, list(chain(*groups)), stored)
    hyper = [key for key in stored if key.startswith(f"{OPTIM}.{GROUPS}.")]
    items = [want.item for want in wanted.values() if want.item is not None]
    items += [
        Item(tuple(key.split(".")), torch.empty(found.size, dtype=found.properties.dtype), 0, tuple(found.size))
        for key in hyper
        if isinstance(found := stored[key], TensorStorageMetadata)
    ]
    kinds = [key for key in map(f"{KINDS}.{{}}".format, range(len(optimizers))) if key in stored]
    plain = [key for key in (*wanted, *hyper, *kinds) if not isinstance(stored[key], TensorStorageMetadata)]
    values = {**dcp.read(folder, metadata, items, plain), **{item.key: item.value for item in items}}
    saved = groups_of({key.removeprefix(f"{OPTIM}.{GROUPS}."): values[key] for key in hyper})
    require_groups(saved, [[named.name for named in group] for group in groups])
    require_kinds([values[key] for key in kinds], optimizers)
    states: dict[str, dict[str, Any]] = {}
    for key, want in wanted.items():
        states.setdefault(want.named.name, {})[want.name] = _padded(held, want, values[key])
    return [
        numbered_state_dict([saved.pop(0) for _ in own], own, states)
        for own in (named_groups(held, each) for each in optimizers)
    ]


def states_wanted(held: ModelContents, members: Sequence[Named], stored: Mapping[str, Any]) -> dict[str, StateRows]:
    """The states of these parameters in a checkpoint, by key.

    Raises:
        ValueError: one that is of no single row.
    """
    prefixes = {
        dcp.key_of((*(() if named.param else (held.rank_prefix,)), OPTIM, STATE, named.name)): named
        for named in members
    }
    wanted = {}
    for key, found in stored.items():
        prefix, dot, name = key.rpartition(".")
        while dot and prefix not in prefixes:  # another tool's states may have dots in their names
            prefix, dot, more = prefix.rpartition(".")
            name = f"{more}.{name}"
        if dot:
            wanted[key] = StateRows(prefixes[prefix], name, _rows_wanted(held, prefixes[prefix], key, found))
    return wanted


def require_kinds(saved: Sequence[str], optimizers: Sequence[Optimizer]) -> None:
    """Raise unless optimizers are of the classes that were saved, where that is known.

    Raises:
        ValueError: of another one: what it makes of another's state may be wrong in silence.
    """
    for kind, optimizer in zip(saved, optimizers, strict=False):
        if kind != type(optimizer).__name__:
            raise ValueError(
                f"the checkpoint's optimizer is {kind}, and this one is {type(optimizer).__name__}; give one of the "
                f"kind that was saved, or load without it"
            )


def _rows_wanted(held: ModelContents, named: Named, key: str, found: Any) -> Item | None:
    if not isinstance(found, TensorStorageMetadata):
        return None
    param, shape, start = named.param, tuple(found.size), 0
    rows = shape
    if param is not None and param.sharded:
        if shape == param.shape:
            start, stop = rows_of(held, param)
            rows = (stop - start, *shape[1:])
        elif found.size.numel() != 1:
            raise ValueError(
                f"{key} has shape {shape} in the checkpoint, which is neither one number nor the parameter's "
                f"{param.shape}, so it cannot be cut into rows; load it where the parameter is not sharded (stage 0)"
            )
    return Item((key,), torch.empty(rows, dtype=found.properties.dtype), start, shape)


def _padded(held: ModelContents, want: StateRows, value: Any) -> Any:
    param, item = want.named.param, want.item
    if item is None or param is None or not param.sharded or item.shape != param.shape:
        return value
    rows = value.new_zeros(held.plan.shard_shape(param))
    rows[: len(value)] = value
    return rows


def require_groups(saved: Sequence[Mapping[str, Any]], here: Sequence[Sequence[str]]) -> None:
    """Raise unless an optimizer's groups have the parameters that they had when it was saved.

    Raises:
        ValueError: other groups, or no optimizer at all.
    """
    if not saved:
        raise ValueError("the checkpoint has no optimizer; load it without one")
    if len(saved) != len(here):
        raise ValueError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, and this one has {len(here)}; build it as "
            f"it was built when it was saved"
        )
    for number, (group, names) in enumerate(zip(saved, here, strict=True)):
        missing, unknown = sorted(set(names) - set(group["params"])), sorted(set(group["params"]) - set(names))
        if missing or unknown:
            raise ValueError(
                f"parameter group {number} of the checkpoint's optimizer lacks {_few(missing)} and has {_few(unknown)} "
                f"that this optimizer's does not have; build it as it was built when it was saved"
            )


def read_extras(folder: Any, metadata: Metadata, ranks: int = 0) -> tuple[dict[str, Any], ...]:
    """What each rank that saved gave beside model and optimizer, by name; ``ranks`` is how many did, if known.

    Raises:
        ValueError: it is damaged.
    """
    owners = {key: owner for key in metadata.state_dict_metadata if (owner := split_rank_prefix(key)) is not None}
    extra = f"{EXTRA}."
    paths = {key: (rank, rest.removeprefix(extra)) for key, (rank, rest) in owners.items() if rest.startswith(extra)}
    values = dcp.read(folder, metadata, [], list(paths))
    most = max((rank + 1 for rank, _ in paths.values()), default=0)
    of_rank: list[dict[str, Any]] = [{} for _ in range(max(most, ranks))]
    for key, (number, name) in paths.items():
        of_rank[number][name] = values[key]
    return tuple(of_rank)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return (shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")) or "nothing"
