"""What of a model and an optimizer stands in a checkpoint, under which names, and who writes it.

As FSDP2's ``get_state_dict`` has it: ``{"model": ..., "optim": {"state": ..., "param_groups": ...}}``, with the plain
module's names and whole shapes, and no padding. What each rank has for itself (extras, parameters that
the policy ignores and their state) stands under ``"rank<number>"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from thunder_zero import layout
from thunder_zero.plan import Param, Plan
from thunder_zero.runtime import dcp
from thunder_zero.runtime.dcp import Item, Path_
from thunder_zero.runtime.shards import real_rows

MODEL, OPTIM, STATE, GROUPS, EXTRA = "model", "optim", "state", "param_groups", "extra"
SIMPLE = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a model.

    Attributes:
        plan: what each parameter is, among the ranks of one copy.
        shards: what the optimizer sees, by path.
        ignored: parameters that are each rank's own, by name.
        buffers: those of the state dict, by name; rank 0's are saved.
        states: what modules add to a state dict themselves (``get_extra_state``), by name; rank 0's are saved.
        rank: which of all ranks this is.
        writes: whether this is the copy of the model that is written (hybrid sharding has several).
    """

    plan: Plan
    shards: Mapping[str, Tensor]
    ignored: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    states: Mapping[str, Any]
    rank: int
    writes: bool = True

    def writes_whole(self, number: int) -> bool:
        """Whether this rank writes the parameter of this number, which all ranks have in full: they take turns."""
        return self.writes and number % self.plan.world_size == self.plan.rank

    @property
    def own(self) -> str:
        """Where it stands what is this rank's own."""
        return own(self.rank)


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter that an optimizer steps: its name, its number among all, and what it is, unless it is ignored."""

    name: str
    number: int
    param: Param | None
    tensor: Tensor


def own(rank: int) -> str:
    """Where it stands what is a rank's own."""
    return f"rank{rank}"


def rows_of(held: Held, param: Param) -> tuple[int, int]:
    """Which rows of a parameter, or of its state, are here: all of them, if it is replicated."""
    if not param.sharded:
        return 0, param.shape[0] if param.shape else 1
    return layout.row_range(param.shape[0], held.plan.world_size, held.plan.rank)


def part(held: Held, param: Param, path: Path_, shard: Tensor, also: Iterable[Path_] = ()) -> Item:
    """The rows of a shard as an item, without padding: a view."""
    start, _ = rows_of(held, param)
    return Item(path, real_rows(shard.detach(), param, held.plan), start, param.shape, tuple(also))


def model_items(held: Held) -> list[Item]:
    """What this rank writes of the model."""
    items = []
    for number, param in enumerate(held.plan.params):
        start, stop = rows_of(held, param)
        if (held.writes and start < stop) if param.sharded else held.writes_whole(number):
            also = [(MODEL, alias) for alias in param.aliases]
            items.append(part(held, param, (MODEL, param.path), held.shards[param.path], also))
    items += [_whole((held.own, MODEL, name), tensor) for name, tensor in held.ignored.items()]
    if held.rank == 0:
        items += [_whole((MODEL, name), tensor) for name, tensor in held.buffers.items()]
        items += [Item((MODEL, name), dcp.pickled(value)) for name, value in held.states.items()]
    return items


def optimizer_items(held: Held, optimizer: Optimizer) -> list[Item]:
    """What this rank writes of the optimizer.

    Raises:
        ValueError: a parameter of another model; a state that belongs to no single row, so that it has no whole shape.
    """
    items = []
    for named in (named for group in names_of(held, optimizer) for named in group):
        for key, value in optimizer.state.get(named.tensor, {}).items():
            items += _state_items(held, named, key, value)
    if held.rank == 0:
        for number, (group, members) in enumerate(zip(optimizer.param_groups, names_of(held, optimizer), strict=True)):
            values = {**group, "params": [named.name for named in members]}
            for key, value in values.items():
                path = (OPTIM, GROUPS, number, key)
                items.append(_whole(path, value) if isinstance(value, Tensor) else Item(path, dcp.pickled(value)))
    return items


def _state_items(held: Held, named: Named, key: str, value: Any) -> list[Item]:
    name, param = named.name, named.param
    if not isinstance(value, Tensor) and not isinstance(value, SIMPLE):
        raise ValueError(
            f"the optimizer's {key!r} of parameter {name!r} is a {type(value).__name__}, which cannot be put together "
            f"from ranks; save it on each rank by itself, as an extra"
        )
    if param is None:
        path: Path_ = (held.own, OPTIM, STATE, name, key)
        return [_whole(path, value) if isinstance(value, Tensor) else Item(path, dcp.pickled(value))]
    path = (OPTIM, STATE, name, key)
    if isinstance(value, Tensor) and param.sharded and tuple(value.shape) == held.plan.shard_shape(param):
        start, stop = rows_of(held, param)
        return [part(held, param, path, value)] if held.writes and start < stop else []
    if isinstance(value, Tensor) and param.sharded and value.numel() != 1:
        raise ValueError(
            f"the optimizer's {key!r} of parameter {name!r} has shape {tuple(value.shape)}, which is neither one "
            f"number nor the shard's {held.plan.shard_shape(param)}, so it cannot be put together from ranks; save it "
            f"on each rank by itself, as an extra"
        )
    if not held.writes_whole(named.number):
        return []
    return [_whole(path, value) if isinstance(value, Tensor) else Item(path, dcp.pickled(value))]


def names_of(held: Held, optimizer: Optimizer) -> list[list[Named]]:
    """The parameters of each group of an optimizer.

    Raises:
        ValueError: one that is none of the model's.
    """
    known: dict[int, tuple[str, int, Param | None]] = {
        **{id(tensor): (name, 0, None) for name, tensor in held.ignored.items()},
        **{id(held.shards[param.path]): (param.path, at, param) for at, param in enumerate(held.plan.params)},
    }
    found = []
    for group in optimizer.param_groups:
        members = []
        for tensor in group["params"]:
            if id(tensor) not in known:
                raise ValueError(
                    f"{type(optimizer).__name__} steps a parameter of shape {tuple(tensor.shape)} that is none of the "
                    f"model's; give the optimizer that was built on model.parameters()"
                )
            members.append(Named(*known[id(tensor)], tensor))
        found.append(members)
    return found


def _whole(path: Path_, tensor: Tensor) -> Item:
    return Item(path, tensor.detach(), 0, tuple(tensor.shape))


def copied(item: Item) -> Item:
    """An item that nobody changes any more."""
    if not isinstance(item.value, Tensor):
        return item
    return replace(item, value=item.value.to("cpu", copy=True))


# The other way


@dataclass(frozen=True, slots=True)
class Found:
    """What was read for one rank, and is not in its model yet.

    Attributes:
        tensors: pairs of what is in the model and what shall be in it, of one shape.
        states: what modules take by ``set_extra_state``, by name.
        optimizer: a state dict for ``Optimizer.load_state_dict``, or None.
    """

    tensors: list[tuple[Tensor, Tensor]]
    states: dict[str, Any]
    optimizer: dict[str, Any] | None


def read_model(folder: Any, metadata: Metadata, held: Held) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Any]]:
    """A checkpoint's model for this rank.

    Raises:
        ValueError: it is of another model, or damaged.
    """
    stored = metadata.state_dict_metadata
    require_model(held, stored)
    pairs, items = [], []

    def take(path: Path_, target: Tensor, start: int, shape: tuple[int, ...]) -> None:
        items.append(Item(path, torch.empty_like(target, device="cpu"), start, shape))
        pairs.append((target, items[-1].value))

    for param in held.plan.params:
        mine = part(held, param, (MODEL, param.path), held.shards[param.path])
        take(mine.path, mine.value, mine.start, mine.shape)  # type: ignore[arg-type]
    for name, tensor in held.buffers.items():
        take((MODEL, name), tensor, 0, tuple(tensor.shape))
    for name, tensor in held.ignored.items():
        take((held.own, MODEL, name), tensor.detach(), 0, tuple(tensor.shape))
    keys = {dcp.key_of((MODEL, name)): name for name in held.states}
    values = dcp.read(folder, metadata, items, list(keys))
    return pairs, {keys[key]: value for key, value in values.items()}  # type: ignore[return-value]


def require_model(held: Held, stored: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint is of this model.

    Raises:
        ValueError: names that are missing or not known; another shape or dtype.
    """
    plan = held.plan
    expected: dict[Path_, tuple[tuple[int, ...], torch.dtype]]
    expected = {(MODEL, name): (param.shape, param.dtype) for param in plan.params for name in param.names}
    expected |= {(MODEL, name): (tuple(tensor.shape), tensor.dtype) for name, tensor in held.buffers.items()}
    expected |= {(held.own, MODEL, name): (tuple(tensor.shape), tensor.dtype) for name, tensor in held.ignored.items()}
    by_key = {dcp.key_of(path): what for path, what in expected.items()}
    names = by_key.keys() | {dcp.key_of((MODEL, name)) for name in held.states}
    in_file = {key for key in stored if key.startswith((f"{MODEL}.", f"{held.own}.{MODEL}."))}
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


def read_optimizer(folder: Any, metadata: Metadata, held: Held, optimizer: Optimizer) -> dict[str, Any]:
    """A checkpoint's optimizer for this rank, as ``Optimizer.load_state_dict`` takes it.

    Raises:
        ValueError: there is none; it has other parameter groups; it is damaged.
    """
    stored = metadata.state_dict_metadata
    groups = names_of(held, optimizer)
    members = [named for group in groups for named in group]
    wanted: dict[str, tuple[int, Item | None, str]] = {}  # by key: of which parameter, its rows, its name there
    for index, named in enumerate(members):
        prefix: Path_ = (OPTIM, STATE, named.name) if named.param is not None else (held.own, OPTIM, STATE, named.name)
        start_of_key = dcp.key_of(prefix) + "."
        for key in (key for key in stored if key.startswith(start_of_key)):
            path = (*prefix, key.removeprefix(start_of_key))
            wanted[key] = index, _rows_wanted(held, named.param, path, stored[key]), str(path[-1])
    hyper = {key: None for key in stored if key.startswith(f"{OPTIM}.{GROUPS}.")}
    items = [item for _, item, _ in wanted.values() if item is not None]
    items += [
        Item(tuple(key.split(".")), torch.empty(found.size, dtype=found.properties.dtype), 0, tuple(found.size))
        for key in hyper
        if isinstance(found := stored[key], TensorStorageMetadata)
    ]
    plain = [key for key in (*wanted, *hyper) if not isinstance(stored[key], TensorStorageMetadata)]
    values = {**dcp.read(folder, metadata, items, plain), **{item.key: item.value for item in items}}
    saved = groups_of({key.removeprefix(f"{OPTIM}.{GROUPS}."): values[key] for key in hyper})
    require_groups(saved, [[named.name for named in group] for group in groups])
    states: dict[int, dict[str, Any]] = {}
    for key, (index, item, name) in wanted.items():
        value = values[key]
        param = members[index].param
        if item is not None and param is not None and param.sharded and item.shape == param.shape:
            padded = value.new_zeros(held.plan.shard_shape(param))
            padded[: len(value)] = value
            value = padded
        states.setdefault(index, {})[name] = value
    packed, at = [], 0
    for hyper_parameters, group in zip(saved, groups, strict=True):
        packed.append({**hyper_parameters, "params": list(range(at, at + len(group)))})
        at += len(group)
    return {"state": states, "param_groups": packed}


def _rows_wanted(held: Held, param: Param | None, path: Path_, found: Any) -> Item | None:
    if not isinstance(found, TensorStorageMetadata):
        return None
    shape, start = tuple(found.size), 0
    rows = shape
    if param is not None and param.sharded and shape == param.shape:
        start, stop = rows_of(held, param)
        rows = (stop - start, *shape[1:])
    return Item(path, torch.empty(rows, dtype=found.properties.dtype), start, shape)


def groups_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An optimizer's parameter groups, of hyper-parameters by ``"<group>.<name>"``."""
    groups: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        number, _, name = key.partition(".")
        groups.setdefault(int(number), {})[name] = value
    return [groups[number] for number in sorted(groups)]


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


def read_extras(folder: Any, metadata: Metadata) -> tuple[dict[str, Any], ...]:
    """What each rank that saved gave beside model and optimizer, by name.

    Raises:
        ValueError: it is damaged.
    """
    paths = {}
    for key in metadata.state_dict_metadata:
        rank, _, rest = key.partition(".")
        if rank.startswith("rank") and rest.startswith(f"{EXTRA}."):
            paths[key] = (int(rank.removeprefix("rank")), rest.removeprefix(f"{EXTRA}."))
    values = dcp.read(folder, metadata, [], list(paths))
    ranks: list[dict[str, Any]] = [{} for _ in range(1 + max((rank for rank, _ in paths.values()), default=-1))]
    for key, (number, name) in paths.items():
        ranks[number][name] = values[key]
    return tuple(ranks)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return (shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")) or "nothing"
