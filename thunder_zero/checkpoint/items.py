"""What of a model and an optimizer stands in a checkpoint, under which names, and who writes it.

As FSDP2's ``get_state_dict`` has it: ``{"model": ..., "optim": {"state": ..., "param_groups": ...}}``, with the plain
module's names and whole shapes, and no padding. What each rank has for itself (extras, parameters that
the policy ignores and their state) stands under ``"rank<number>"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thunder_zero.checkpoint import dcp
from thunder_zero.checkpoint.dcp import Item, Path_
from thunder_zero.plan import Param
from thunder_zero.rows import real_rows
from thunder_zero.runtime.optimizers import SIMPLE, state_is_rows
from thunder_zero.state_dict.contents import (
    GROUPS,
    KINDS,
    MODEL,
    OPTIM,
    STATE,
    ModelContents,
    Named,
    all_named_groups,
    named_states,
    rows_of,
)


def part(held: ModelContents, param: Param, path: Path_, shard: Tensor, also: Iterable[Path_] = ()) -> Item:
    """The rows of a shard as an item, without padding: a view."""
    start, _ = rows_of(held, param)
    return Item(path, real_rows(shard.detach(), param, held.plan), start, param.shape, tuple(also))


def model_items(held: ModelContents) -> list[Item]:
    """What this rank writes of the model."""
    items = []
    for number, param in enumerate(held.plan.params):
        start, stop = rows_of(held, param)
        if (held.writes and start < stop) if param.sharded else held.writes_whole(number):
            also = [(MODEL, alias) for alias in param.aliases]
            items.append(part(held, param, (MODEL, param.path), held.shards[param.path], also))
    items += [_whole((held.rank_prefix, MODEL, name), tensor) for name, tensor in held.ignored.items()]
    if held.rank == 0:
        items += [_whole((MODEL, name), tensor) for name, tensor in held.buffers.items()]
        items += [Item((MODEL, name), dcp.pickled(value)) for name, value in held.states.items()]
    return items


def optimizer_items(held: ModelContents, optimizers: Sequence[Optimizer]) -> list[Item]:
    """What this rank writes of the optimizers, whose groups are numbered one after the other.

    Raises:
        ValueError: a parameter of another model, or of two optimizers; a state that belongs to no single row, so that
            it has no whole shape, or to no parameter, or whose name has a dot; a hyper-parameter that cannot be saved.
    """
    items = []
    groups = all_named_groups(held, optimizers)
    for named, values in named_states(held, optimizers):
        for key, value in values.items():
            items += _state_items(held, named, key, value)
    if held.rank == 0:
        saved = [group for optimizer in optimizers for group in optimizer.param_groups]
        for number, (group, members) in enumerate(zip(saved, groups, strict=True)):
            items += _group_items(number, {**group, "params": [named.name for named in members]})
        kinds = [type(optimizer).__name__ for optimizer in optimizers]
        items += [Item((KINDS, number), dcp.pickled(kind)) for number, kind in enumerate(kinds)]
    return items


def _group_items(number: int, values: Mapping[str, Any]) -> Iterator[Item]:
    for key, value in values.items():
        path = (OPTIM, GROUPS, number, key)
        try:
            yield _whole(path, value) if isinstance(value, Tensor) else Item(path, dcp.pickled(value))
        except ValueError as error:
            raise ValueError(f"the hyper-parameter {key!r} of the optimizer's group {number}: {error}") from None


def _state_items(held: ModelContents, named: Named, key: str, value: Any) -> list[Item]:
    param = named.param
    if not isinstance(key, str) or "." in key:
        raise ValueError(
            f"the optimizer has a state {key!r} of parameter {named.name!r}; names of states are strings without dots, "
            f"or nobody could tell them from parameters' names"
        )
    if not isinstance(value, Tensor) and not isinstance(value, SIMPLE):
        raise ValueError(
            f"the optimizer's {key!r} of parameter {named.name!r} is a {type(value).__name__}, which cannot be put "
            f"together from ranks; save it on each rank by itself, as an extra"
        )
    path: Path_ = (OPTIM, STATE, named.name, key)
    if isinstance(value, Tensor) and param is not None and state_is_rows(key, value, param, held.plan):
        start, stop = rows_of(held, param)
        return [part(held, param, path, value)] if held.writes and start < stop else []
    if param is None:
        path = (held.rank_prefix, *path)
    elif not held.writes_whole(named.number):
        return []
    return [_whole(path, value) if isinstance(value, Tensor) else Item(path, dcp.pickled(value))]


def _whole(path: Path_, tensor: Tensor) -> Item:
    return Item(path, tensor.detach(), 0, tuple(tensor.shape))


def copied(item: Item) -> Item:
    """An item that nobody changes any more."""
    if not isinstance(item.value, Tensor):
        return item
    return replace(item, value=item.value.to("cpu", copy=True))
