"""Reads a state dict for a sharded model: checks its names and values, and finds this rank's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thunder_zero.comm.agree import all_or_none
from thunder_zero.plan import Param
from thunder_zero.state_dict.all_or_nothing import OwnState, ValuesToWrite
from thunder_zero.state_dict.contents import ModelContents, listed
from thunder_zero.state_dict.source import StateDictSource


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of the model that takes a value of a state dict: a parameter's shard, or a tensor that every rank has
    all of."""

    tensor: Tensor
    param: Param | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its value in a state dict."""
        return tuple(self.tensor.shape) if self.param is None else self.param.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.tensor.dtype


class ModelValues(NamedTuple):
    """The values that a state dict has for a model, and the names that differ.

    Attributes:
        missing: names of the model that the state dict does not have.
        unexpected: names of the state dict that the model does not have.
        to_write: this rank's part of the values, not written yet.
    """

    missing: list[str]
    unexpected: list[str]
    to_write: ValuesToWrite


@torch.no_grad()
def values_for_model(
    contents: ModelContents, module: nn.Module, values: Mapping[str, Any], source: StateDictSource, *, strict: bool
) -> ModelValues:
    """Read a state dict for this rank, and write nothing yet; a collective.

    Args:
        contents: this rank's part of the model.
        module: the plain module, whose submodules take their extra states.
        values: the state dict.
        source: the ranks whose state dict is read.
        strict: refuse other names than the model's.

    Raises:
        RuntimeError: names differ, and ``strict``; another rank refused.
        ValueError: not a tensor, another shape, or a value that cannot be copied.
    """
    names, slots = list(contents.state_dict), slots_of(contents)
    values = values if source.is_read() else {}
    packed: Any = None
    with all_or_none(source.state.group, "to load"):
        if source.is_read():
            require_values(values, names, slots, source, strict=strict)
        packed = source.pack((list(values), {name: values[name] for name in contents.states if name in values}))
    saved, extras = source.exchange(packed)
    source.require_same_gathers(
        {repr(name): [name] if source.must_gather(values.get(name), slot.param) else [] for name, slot in slots.items()}
    )
    tensors = [
        (slot.tensor, source.rows(values.get(name), slot.param, slot.shape, slot.dtype))
        for name, slot in _once(names, saved, slots)
    ]
    owners = {name: OwnState(module.get_submodule(name.rpartition(".")[0])) for name in extras}
    to_load = [(owner, partial(owner.load_state_dict, extras[name])) for name, owner in owners.items()]
    has, known = set(saved), set(names)
    missing, unexpected = [name for name in names if name not in has], [name for name in saved if name not in known]
    return ModelValues(missing, unexpected, ValuesToWrite(tensors, to_load))


def slots_of(contents: ModelContents) -> dict[str, Slot]:
    """The model's tensors that a state dict has values for, by all of their names."""
    shards = {name: Slot(contents.shards[param.path], param) for name, param in contents.plan.by_name.items()}
    others = {**contents.ignored, **contents.buffers}
    return {**shards, **{name: Slot(tensor, None) for name, tensor in others.items()}}


def _once(names: Iterable[str], saved: Iterable[str], slots: Mapping[str, Slot]) -> list[tuple[str, Slot]]:
    """The slots that a state dict has a value for, by the first name that it has: a tied parameter once."""
    has, found = set(saved), dict[int, tuple[str, Slot]]()
    for name in names:
        if name in has and name in slots:
            found.setdefault(id(slots[name].tensor), (name, slots[name]))
    return list(found.values())


def require_values(
    values: Mapping[str, Any], names: Sequence[str], slots: Mapping[str, Slot], source: StateDictSource, *, strict: bool
) -> None:
    """Raise unless a state dict fits the model.

    Raises:
        RuntimeError: ``strict``, and other names than the model's.
        ValueError: not a tensor, another shape, or a value that cannot be copied; other values for a tied parameter's
            names.
    """
    missing, unexpected = [name for name in names if name not in values], sorted(values.keys() - set(names))
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict: Missing key(s) in state_dict: {listed(missing)}; Unexpected key(s) in "
            f"state_dict: {listed(unexpected)}; set strict=False to load the matching names"
        )
    for name in names:
        if name in values and name in slots:
            source.require_tensor(repr(name), values[name], slots[name].shape, slots[name].dtype)
    first: dict[int, str] = {}
    for name in filter(slots.__contains__, values):
        other = first.setdefault(id(slots[name].tensor), name)
        if other != name and not same_values(values[other], values[name]):
            raise ValueError(
                f"{other!r} and {name!r} are tied in the model, but differ in the state dict; give both the same values"
            )


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a state dict are equal, as far as this rank has them."""
    mine, its = (value.to_local() if isinstance(value, DTensor) else value for value in (one, other))
    return mine is its or (mine.shape == its.shape and torch.equal(mine.cpu(), its.cpu()))
