"""A sharded model's state dict as FSDP2 has it, made and loaded: DTensors or full tensors, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from thunder_zero.comm.agree import all_or_none
from thunder_zero.plan import Param
from thunder_zero.rows import real_rows
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.all_or_nothing import OwnState, Pending
from thunder_zero.state_dict.contents import ModelContents, listed
from thunder_zero.state_dict.source import Source

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions


def is_returned(state: State, options: StateDictOptions) -> bool:
    """Whether this rank returns a state dict: as in torch, a full one on the CPU is returned by rank 0 alone."""
    return not (options.full_state_dict and options.cpu_offload and state.group.rank() != 0)


def rows_value(state: State, param: Param, rows: Tensor, options: StateDictOptions) -> Tensor:
    """The state dict's value of a parameter, or of an optimizer's state of it, out of this rank's rows: a DTensor
    without padding, or a full tensor, which is a collective."""
    rows = rows.detach()
    if options.full_state_dict:
        value = state.gather_now(param, rows)
        if not is_returned(state, options):
            return value.new_empty(0)
    elif param.sharded:
        mesh = DeviceMesh.from_group(state.ranks.inside, state.device.type)
        stride = torch.empty(param.shape, device="meta").stride()
        shape = torch.Size(param.shape)
        rows = real_rows(rows, param, state.plan)
        value = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    else:
        value = rows
    return value.cpu() if options.cpu_offload else value


def whole_value(value: Any, options: StateDictOptions) -> Any:
    """The state dict's value of something that each rank has all of: a copy in a full state dict, otherwise a view."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().clone() if options.full_state_dict else value.detach()
    return value.cpu() if options.cpu_offload else value


@torch.no_grad()
def model_state_dict(state: State, contents: ModelContents, options: StateDictOptions) -> dict[str, Any]:
    """The plain module's state dict with the model's values; values that hooks add stay as they are."""
    whole = {**contents.ignored, **contents.buffers, **contents.states}
    frozen = {name for name, param in contents.plan.by_name.items() if not param.requires_grad}
    frozen |= {name for name, tensor in contents.ignored.items() if not tensor.requires_grad}
    found: dict[str, Any] = {}
    made: dict[str, Tensor] = {}  # by path: a tied parameter is gathered once
    for name, plain in contents.plain.items():
        if options.ignore_frozen_params and name in frozen:
            continue
        param = contents.plan.by_name.get(name)
        if param is None:
            found[name] = whole_value(whole.get(name, plain), options)
            continue
        if param.path not in made:
            made[param.path] = rows_value(state, param, contents.shards[param.path], options)
        found[name] = made[param.path]
    return found if is_returned(state, options) else {}


# Loading


@dataclass(frozen=True, slots=True)
class Target:
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
    """What a state dict has for a model.

    Attributes:
        missing: names of the model that the state dict does not have.
        unexpected: names of the state dict that the model does not have.
        pending: this rank's part of the values, not written yet.
    """

    missing: list[str]
    unexpected: list[str]
    pending: Pending


@torch.no_grad()
def values_for_model(
    contents: ModelContents, module: nn.Module, values: Mapping[str, Any], source: Source, *, strict: bool
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
    names, targets = list(contents.plain), targets_of(contents)
    values = values if source.is_read() else {}
    packed: Any = None
    with all_or_none(source.state.group, "to load"):
        if source.is_read():
            require_values(values, names, targets, source, strict=strict)
        packed = source.pack((list(values), {name: values[name] for name in contents.states if name in values}))
    saved, extras = source.exchange(packed)
    source.require_same_gathers(
        {
            repr(name): [name] if source.must_gather(values.get(name), target.param) else []
            for name, target in targets.items()
        }
    )
    tensors = [
        (target.tensor, source.rows(values.get(name), target.param, target.shape, target.dtype))
        for name, target in _once(names, saved, targets)
    ]
    owners = {name: OwnState(module.get_submodule(name.rpartition(".")[0])) for name in extras}
    states = [(owner, partial(owner.load_state_dict, extras[name])) for name, owner in owners.items()]
    has, known = set(saved), set(names)
    missing, unexpected = [name for name in names if name not in has], [name for name in saved if name not in known]
    return ModelValues(missing, unexpected, Pending(tensors, states))


def targets_of(contents: ModelContents) -> dict[str, Target]:
    """The model's tensors that a state dict has values for, by all of their names."""
    shards = {name: Target(contents.shards[param.path], param) for name, param in contents.plan.by_name.items()}
    others = {**contents.ignored, **contents.buffers}
    return {**shards, **{name: Target(tensor, None) for name, tensor in others.items()}}


def _once(names: Iterable[str], saved: Iterable[str], targets: Mapping[str, Target]) -> list[tuple[str, Target]]:
    """The targets that a state dict has a value for, by the first name that it has: a tied parameter once."""
    has, found = set(saved), dict[int, tuple[str, Target]]()
    for name in names:
        if name in has and name in targets:
            found.setdefault(id(targets[name].tensor), (name, targets[name]))
    return list(found.values())


def require_values(
    values: Mapping[str, Any], names: Sequence[str], targets: Mapping[str, Target], source: Source, *, strict: bool
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
            f"the state dict does not fit the model: missing: {listed(missing)}; unexpected: {listed(unexpected)}; "
            f"set strict=False to load what fits"
        )
    for name in names:
        if name in values and name in targets:
            source.require_tensor(repr(name), values[name], targets[name].shape, targets[name].dtype)
    first: dict[int, str] = {}
    for name in filter(targets.__contains__, values):
        other = first.setdefault(id(targets[name].tensor), name)
        if other != name and not same_values(values[other], values[name]):
            raise ValueError(
                f"{other!r} and {name!r} are tied in the model, but differ in the state dict; give both the same values"
            )


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a state dict are equal, as far as this rank has them."""
    mine, its = (value.to_local() if isinstance(value, DTensor) else value for value in (one, other))
    return mine is its or (mine.shape == its.shape and torch.equal(mine.cpu(), its.cpu()))
