"""Collects the items that this rank writes of its model and optimizers.

They are laid out as FSDP2's ``get_state_dict`` lays them out: ``{"model": ..., "optim": {"state": ...,
"param_groups": ...}}``, with the plain module's names and whole shapes, and no padding. Each rank's own values (extras,
parameters that the policy ignores and their state) are under ``"rank<number>"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thunder_zero.checkpoint.item import Item, KeyPath, item_of_tensor, pickle_value
from thunder_zero.plan import Param
from thunder_zero.rows import real_rows
from thunder_zero.runtime.optimizers import SIMPLE, class_name, state_is_rows
from thunder_zero.state_dict.contents import (
    GROUPS,
    MODEL,
    OPTIM,
    OPTIMIZER_CLASS,
    STATE,
    ModelContents,
    Named,
    all_named_groups,
    named_states,
    rows_of,
)


def rows_item(
    contents: ModelContents, param: Param, path: KeyPath, shard: Tensor, also: Iterable[KeyPath] = ()
) -> Item:
    """The rows of a shard as an item, without padding: a view."""
    start, _ = rows_of(contents, param)
    return Item(path, real_rows(shard.detach(), param, contents.plan), start, param.shape, tuple(also))


def model_items(contents: ModelContents) -> list[Item]:
    """The items that this rank writes of its model."""
    items = []
    for number, param in enumerate(contents.plan.params):
        start, stop = rows_of(contents, param)
        if (contents.writes and start < stop) if param.sharded else contents.writes_whole(number):
            also = [(MODEL, alias) for alias in param.aliases]
            items.append(rows_item(contents, param, (MODEL, param.path), contents.shards[param.path], also))
    items += [item_of_tensor((contents.rank_prefix, MODEL, name), tensor) for name, tensor in contents.ignored.items()]
    if contents.rank == 0:
        items += [item_of_tensor((MODEL, name), tensor) for name, tensor in contents.buffers.items()]
        items += [Item((MODEL, name), pickle_value(value)) for name, value in contents.states.items()]
    return items


def optimizer_items(contents: ModelContents, optimizers: Sequence[Optimizer]) -> list[Item]:
    """The items that this rank writes of the optimizers, whose groups are numbered consecutively.

    Raises:
        ValueError: a parameter is not the model's, or is in two optimizers; a state belongs to no parameter, has a dot
            in its name, or is neither rows nor one value; a hyper-parameter cannot be saved.
    """
    items = []
    groups = all_named_groups(contents, optimizers)
    for named, values in named_states(contents, optimizers):
        for key, value in values.items():
            items += _state_items(contents, named, key, value)
    if contents.rank == 0:
        saved = [group for optimizer in optimizers for group in optimizer.param_groups]
        for number, (group, members) in enumerate(zip(saved, groups, strict=True)):
            items += _group_items(number, {**group, "params": [named.name for named in members]})
        classes = [class_name(optimizer) for optimizer in optimizers]
        items += [Item((OPTIMIZER_CLASS, number), pickle_value(name)) for number, name in enumerate(classes)]
    return items


def copy_to_cpu(item: Item) -> Item:
    """A copy of an item, which training does not change."""
    if not isinstance(item.value, Tensor):
        return item
    return replace(item, value=item.value.to("cpu", copy=True))


def _group_items(number: int, values: Mapping[str, Any]) -> Iterator[Item]:
    for key, value in values.items():
        path = (OPTIM, GROUPS, number, key)
        try:
            yield item_of_tensor(path, value) if isinstance(value, Tensor) else Item(path, pickle_value(value))
        except ValueError as error:
            raise ValueError(f"cannot save hyper-parameter {key!r} of parameter group {number}: {error}") from None


def _state_items(contents: ModelContents, named: Named, key: str, value: Any) -> list[Item]:
    param = named.param
    if not isinstance(key, str) or "." in key:
        raise ValueError(
            f"cannot save the optimizer's state {key!r} of parameter {named.name!r}: the name of a state must be a "
            f"string without dots; rename it"
        )
    if named.owner is None and not isinstance(value, Tensor) and not isinstance(value, SIMPLE):
        raise ValueError(
            f"cannot save the optimizer's state {key!r} of parameter {named.name!r}: values of type "
            f"{type(value).__name__} cannot be merged across ranks; save it as an extra"
        )
    path: KeyPath = (OPTIM, STATE, named.name, key)
    if named.owner is not None:
        try:
            return [_whole_item(path, value)] if contents.writes and named.owner == contents.plan.rank else []
        except ValueError as error:
            raise ValueError(
                f"cannot save the optimizer's state {key!r} of parameter {named.name!r}: {error}"
            ) from None
    if isinstance(value, Tensor) and param is not None and state_is_rows(key, value, param, contents.plan):
        start, stop = rows_of(contents, param)
        return [rows_item(contents, param, path, value)] if contents.writes and start < stop else []
    if param is None:
        path = (contents.rank_prefix, *path)
    elif not contents.writes_whole(named.number):
        return []
    return [_whole_item(path, value)]


def _whole_item(path: KeyPath, value: Any) -> Item:
    return item_of_tensor(path, value) if isinstance(value, Tensor) else Item(path, pickle_value(value))
