"""What of a model and an optimizer stands in a checkpoint, under which names, and who writes it.

As FSDP2's ``get_state_dict`` has it: ``{"model": ..., "optim": {"state": ..., "param_groups": ...}}``, with the plain
module's names and whole shapes, and no padding. What each rank has for itself (extras, parameters that
the policy ignores and their state) stands under ``"rank<number>"``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thunder_zero import layout
from thunder_zero.checkpoint import dcp
from thunder_zero.checkpoint.dcp import Item, Path_
from thunder_zero.comm.agree import Fact
from thunder_zero.plan import Param, Plan
from thunder_zero.runtime.shards import SIMPLE, real_rows, state_is_rows

MODEL, OPTIM, STATE, GROUPS, EXTRA = "model", "optim", "state", "param_groups", "extra"
KINDS = "optimizers"  # the names of their classes, by number
OWN = re.compile(r"rank(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class ModelContents:
    """What one rank holds of a model.

    Attributes:
        plan: what each parameter is, among the ranks of one copy.
        shards: what the optimizer sees, by path.
        ignored: parameters that are each rank's own, by name.
        buffers: those of the state dict, by name; rank 0's are saved.
        states: what modules add to a state dict themselves (``get_extra_state``), by name; rank 0's are saved.
        rank: which of all ranks this is.
        writes: whether this is the copy of the model that is written (hybrid sharding has several).
        plain: the plain module's state dict: all names in their order, and what hooks add to it.
    """

    plan: Plan
    shards: Mapping[str, Tensor]
    ignored: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    states: Mapping[str, Any]
    rank: int
    writes: bool = True
    plain: Mapping[str, Any] = field(default_factory=dict)

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


def owner_of(key: str) -> tuple[int, str] | None:
    """Which rank has what stands under a key for itself, and the rest of the key; None of what ranks share."""
    found = OWN.fullmatch(key)
    return None if found is None else (int(found[1]), found[2])


def rows_of(held: ModelContents, param: Param) -> tuple[int, int]:
    """Which rows of a parameter, or of its state, are here: all of them, if it is replicated."""
    if not param.sharded:
        return 0, param.shape[0] if param.shape else 1
    return layout.row_range(param.shape[0], held.plan.world_size, held.plan.rank)


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
    items += [_whole((held.own, MODEL, name), tensor) for name, tensor in held.ignored.items()]
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
    groups = all_names(held, optimizers)
    for named, values in states_of(held, optimizers):
        for key, value in values.items():
            items += _state_items(held, named, key, value)
    if held.rank == 0:
        saved = [group for optimizer in optimizers for group in optimizer.param_groups]
        for number, (group, members) in enumerate(zip(saved, groups, strict=True)):
            items += _group_items(number, {**group, "params": [named.name for named in members]})
        kinds = [type(optimizer).__name__ for optimizer in optimizers]
        items += [Item((KINDS, number), dcp.pickled(kind)) for number, kind in enumerate(kinds)]
    return items


def state_lines(held: ModelContents, optimizers: Sequence[Optimizer]) -> list[Fact]:
    """Which states there are of each parameter that ranks share, for them to compare: what one of them lacks, nobody
    can put together."""
    lines = []
    for named, values in states_of(held, optimizers):
        if named.param is not None:
            rows = {key for key, value in values.items() if state_is_rows(str(key), value, named.param, held.plan)}
            shown = ", ".join(f"{key} by rows" if key in rows else str(key) for key in values)
            what = f"the optimizer's state of parameter {named.name!r}"
            lines.append(Fact(what, shown or "nothing", "step the optimizer on every rank alike"))
    return lines


def states_of(held: ModelContents, optimizers: Iterable[Optimizer]) -> list[tuple[Named, Mapping[str, Any]]]:
    """What optimizers step, one group after the other, each with its states by name."""
    return [
        (named, optimizer.state.get(named.tensor, {}))
        for optimizer in optimizers
        for named in chain(*names_of(held, optimizer))
    ]


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
        path = (held.own, *path)
    elif not held.writes_whole(named.number):
        return []
    return [_whole(path, value) if isinstance(value, Tensor) else Item(path, dcp.pickled(value))]


def names_of(held: ModelContents, optimizer: Optimizer) -> list[list[Named]]:
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


def all_names(held: ModelContents, optimizers: Sequence[Optimizer]) -> list[list[Named]]:
    """The parameters of each group of all optimizers, one after the other.

    Raises:
        ValueError: one that is none of the model's; one of two optimizers; a state of none of them.
    """
    groups = [group for optimizer in optimizers for group in names_of(held, optimizer)]
    counts = Counter(named.name for group in groups for named in group)
    for name, count in counts.items():
        if count > 1:
            raise ValueError(f"parameter {name!r} is in {count} optimizers; give each parameter to one of them")
    stepped = {id(named.tensor) for group in groups for named in group}
    for optimizer in optimizers:
        for key in optimizer.state:
            if id(key) not in stepped:
                what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
                raise ValueError(
                    f"{type(optimizer).__name__} keeps a state for {what}, which is none of the parameters that it "
                    f"steps, so a checkpoint has no place for it; take it out of optimizer.state, save it as an extra"
                )
    return groups


def _whole(path: Path_, tensor: Tensor) -> Item:
    return Item(path, tensor.detach(), 0, tuple(tensor.shape))


def copied(item: Item) -> Item:
    """An item that nobody changes any more."""
    if not isinstance(item.value, Tensor):
        return item
    return replace(item, value=item.value.to("cpu", copy=True))
