"""The functions of ``torch.distributed.checkpoint.state_dict`` for sharded models.

torch's own functions do not know that a sharded model's parameters are padded rows. These take the same arguments and
return the same values, so that a script written for FSDP2 changes one import::

    from thunder_zero.state_dict import StateDictOptions, get_state_dict, set_state_dict

``submodules`` and ``keep_submodule_prefixes=False``, which torch deprecates, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions

from thunder_zero.comm.agree import Fact, all_or_none, require_same
from thunder_zero.runtime.dtensors import local
from thunder_zero.runtime.sharded_model import is_place, sharded_model
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.all_or_nothing import write_all_or_none
from thunder_zero.state_dict.contents import ModelContents, Optimizers, contents_of, optimizer_list
from thunder_zero.state_dict.get_model import make_model_state_dict
from thunder_zero.state_dict.get_optimizer import make_optimizer_state_dict
from thunder_zero.state_dict.set_model import values_for_model
from thunder_zero.state_dict.set_optimizer import values_for_optimizers
from thunder_zero.state_dict.source import source_for


class Incompatible(NamedTuple):
    """The names that did not fit, as ``nn.Module.load_state_dict`` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@is_place("get_model_state_dict")
def get_model_state_dict(
    model: nn.Module, *, submodules: object = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Get parameters and buffers by the plain module's names.

    A collective: all ranks must call it, with equal options.

    >>> full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    Args:
        model: a model with ZeroTransform.
        submodules: must be None.
        options: with ``full_state_dict``, full tensors, gathered one at a time; otherwise DTensors, whose local tensors
            are this rank's rows, and plain tensors where nothing is sharded, both views of the model. ``cpu_offload``
            copies them to the CPU; full ones are then returned on rank 0 alone. ``ignore_frozen_params`` is supported.

    Returns:
        Parameters, buffers and extra states by name; empty on ranks other than 0 if ``options`` ask for full tensors on
        the CPU.

    Raises:
        TypeError: not a model with ZeroTransform.
        ValueError: an option that is not supported.
        RuntimeError: another rank refused; options differ between ranks.
    """
    state, contents, options = _prepared(model, options, submodules)
    return make_model_state_dict(state, contents, options)


@is_place("full_state_dict")
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Get every parameter and buffer of the plain module on every rank, in full.

    A collective: all ranks must call it.

    >>> torch.save(tz.full_state_dict(model), "model.pt")

    Args:
        model: a model with ZeroTransform.

    Returns:
        Unpadded copies on the shards' device, by the plain module's names.

    Raises:
        TypeError: not a model with ZeroTransform.
        RuntimeError: another rank refused.
    """
    options = StateDictOptions(full_state_dict=True)
    found = torch_state_dict.get_model_state_dict(sharded_model(model), options=options)
    at_rest = {_memory_of(local(tensor)) for tensor in (*model.parameters(), *model.buffers())}
    return {name: value.clone() if _memory_of(value) in at_rest else value for name, value in found.items()}


def _memory_of(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


@is_place("get_optimizer_state_dict")
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: object = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Get the optimizers' states and parameter groups by parameter names.

    A collective: all ranks must call it, with equal options. An optimizer that never stepped and has no gradients
    makes its state first, as with torch's function, so that the result can be loaded into.

    >>> get_optimizer_state_dict(model, optimizer)["state"]["0.weight"]["exp_avg"]  # a DTensor

    Args:
        model: a model with ZeroTransform.
        optimizers: one or several, built on ``model.parameters()``.
        submodules: must be None.
        options: as for :func:`get_model_state_dict`. ``flatten_optimizer_state_dict`` gives
            ``{"state.0.weight.exp_avg": ..., "param_groups.0.weight.lr": ...}``.

    Returns:
        ``{"state": {name: ...}, "param_groups": [...]}``, or flattened; empty on ranks other than 0 if ``options`` ask
        for full tensors on the CPU.

    Raises:
        TypeError: not a model with ZeroTransform.
        ValueError: an option that is not supported; an optimizer of another model; a sharded parameter's state that
            is neither of the shard's shape nor one number.
        RuntimeError: another rank refused; options or the optimizer's states differ between ranks.
    """
    state, contents, options = _prepared(model, options, submodules)
    return make_optimizer_state_dict(state, contents, optimizer_list(optimizers), options)


@is_place("get_state_dict")
def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: object = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Get the state dicts of the model and of its optimizers.

    A collective: all ranks must call it, with equal options.

    >>> in_model, in_optimizer = get_state_dict(model, optimizer)
    >>> torch.distributed.checkpoint.save({"model": in_model, "optim": in_optimizer}, checkpoint_id=path)

    Args:
        model: a model with ZeroTransform.
        optimizers: one or several, built on ``model.parameters()``.
        submodules: must be None.
        options: as for :func:`get_model_state_dict` and :func:`get_optimizer_state_dict`.

    Returns:
        The results of these two functions.

    Raises:
        TypeError, ValueError, RuntimeError: as these two functions.
    """
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


@is_place("set_model_state_dict")
def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> Incompatible:
    """Load a state dict into the model: full tensors on each rank, DTensors, or full tensors on rank 0 alone.

    A collective. If it raises, nothing has changed.

    >>> options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    >>> set_model_state_dict(model, torch.load(path) if rank == 0 else {}, options=options)

    Args:
        model: a model with ZeroTransform.
        model_state_dict: values by the plain module's names.
        options: ``broadcast_from_rank0`` sends rank 0's values, one tensor at a time; without ``strict``, values that
            are missing or unexpected are skipped.

    Returns:
        ``missing_keys`` and ``unexpected_keys``; both are empty if ``strict``.

    Raises:
        TypeError: not a model with ZeroTransform.
        RuntimeError: names differ, and ``strict``; another rank refused; options differ between ranks.
        ValueError: a value that is not a tensor, has another shape or cannot be copied; an option that is not
            supported.
        Exception: raised by a module's ``set_extra_state``.
    """
    state, contents, options = _prepared(model, options, None)
    state.require_own_values("load a state dict")
    source, plain = source_for(state, options), sharded_model(model).plain
    found = values_for_model(contents, plain, model_state_dict, source, strict=options.strict)
    write_all_or_none([found.to_write], state.group)
    return Incompatible(found.missing, found.unexpected)


@is_place("set_optimizer_state_dict")
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load a state dict that :func:`get_optimizer_state_dict` returned, full or as DTensors, into optimizers.

    A collective. If it raises, nothing has changed.

    >>> set_optimizer_state_dict(model, optimizer, in_optimizer)

    Args:
        model: a model with ZeroTransform.
        optimizers: one or several, built on ``model.parameters()``.
        optim_state_dict: states by parameter name and groups with names, or flattened; it may have other parameters,
            too.
        options: ``broadcast_from_rank0`` sends rank 0's values, one tensor at a time; without ``strict``, states may
            be missing.

    Raises:
        TypeError: not a model with ZeroTransform.
        ValueError: a parameter has no group; parameters of one group have different ones; a state has another shape;
            an option is not supported.
        RuntimeError: a state is missing, and ``strict``; another rank refused; options differ between ranks; rank 0
            sends, and its optimizers have other groups than another rank's.
        Exception: raised by an optimizer's ``load_state_dict``.
    """
    state, contents, options = _prepared(model, options, None)
    source, found = source_for(state, options), optimizer_list(optimizers)
    to_write = values_for_optimizers(contents, found, optim_state_dict, source, strict=options.strict)
    write_all_or_none([to_write], state.group)


@is_place("set_state_dict")
def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Incompatible:
    """Load the state dicts of a model and its optimizers.

    A collective. If it raises, neither the model nor the optimizers have changed.

    >>> set_state_dict(model, optimizer, model_state_dict=in_model, optim_state_dict=in_optimizer)

    Args:
        model: a model with ZeroTransform.
        optimizers: one or several, built on ``model.parameters()``.
        model_state_dict: as for :func:`set_model_state_dict`.
        optim_state_dict: as for :func:`set_optimizer_state_dict`.
        options: as for these two functions.

    Returns:
        As :func:`set_model_state_dict`: ``missing_keys`` and ``unexpected_keys``; both are empty if ``strict``.

    Raises:
        TypeError: not a model with ZeroTransform.
        ValueError, RuntimeError, Exception: as these two functions.
    """
    state, contents, options = _prepared(model, options, None)
    state.require_own_values("load a state dict")
    source, plain, strict = source_for(state, options), sharded_model(model).plain, options.strict
    found = values_for_model(contents, plain, model_state_dict, source, strict=strict)
    to_write = values_for_optimizers(contents, optimizer_list(optimizers), optim_state_dict, source, strict=strict)
    write_all_or_none([found.to_write, to_write], state.group)
    return Incompatible(found.missing, found.unexpected)


def _prepared(
    model: nn.Module, options: StateDictOptions | None, submodules: object
) -> tuple[State, ModelContents, StateDictOptions]:
    """The model's state, this rank's part of it, and options that all ranks agree on."""
    sharded = sharded_model(model)
    state = sharded.state
    with all_or_none(state.group, "the state dict"):
        contents, options = contents_of(sharded), _supported(options, submodules)
    require_same([Fact("the argument 'options'", str(options), "give every rank the same options")], state.group)
    return state, contents, options


def _supported(options: StateDictOptions | None, submodules: object) -> StateDictOptions:
    options = StateDictOptions() if options is None else options
    for name, asked in {
        "submodules": submodules is not None,
        "keep_submodule_prefixes=False": not options.keep_submodule_prefixes,
        "broadcast_from_rank0 without full_state_dict": options.broadcast_from_rank0 and not options.full_state_dict,
    }.items():
        if asked:
            raise ValueError(f"{name} is not supported; get the whole state dict and select from it")
    return options
