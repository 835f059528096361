"""What all optimizers share: their parameters, exact loads; and what steps whole ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as of_torch

PARAMETERS = ("params", "param_names")  # entries of a group that are no options


class StepsWhole(Optimizer):
    """An optimizer over shards that steps no rows: each parameter is stepped whole, by the rank that owns it, and its
    states are whole, on that rank alone.

    Attributes:
        kind: the name of the class of the optimizer that steps whole parameters.
    """

    kind: str

    @abstractmethod
    def owner_of(self, shard: Tensor) -> int | None:
        """The rank of the copy of the model that steps a parameter; None if nobody does: it is frozen."""


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key not in PARAMETERS}


@contextmanager
def without_hooks() -> Iterator[None]:
    """Inside the block optimizers step without the hooks of all optimizers: those of this package, and the users'."""
    names = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"
    kept = {name: vars(of_torch)[name] for name in names}
    vars(of_torch).update((name, {}) for name in names)  # torch may be walking through those kept
    try:
        yield
    finally:
        vars(of_torch).update(kept)


def exact(loaded: Any, saved: Any) -> Any:
    """What torch has loaded, in the dtypes that were saved: it casts tensors to the parameter's."""
    if isinstance(loaded, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict):
        return {key: exact(value, saved[key]) for key, value in loaded.items()}
    if isinstance(loaded, list | tuple):
        return type(loaded)(exact(value, of) for value, of in zip(loaded, saved, strict=True))
    return loaded


def class_name(optimizer: Optimizer) -> str:
    """The class of an optimizer, or of that which steps whole parameters for it: their states are alike."""
    return optimizer.kind if isinstance(optimizer, StepsWhole) else type(optimizer).__name__


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that the optimizer steps, in its order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def names_of(group: Mapping[str, Any]) -> Sequence[str | None]:
    """The names of a group's parameters; None for each, if the group has no names."""
    names: Sequence[str | None] = group.get("param_names", [None] * len(group["params"]))
    return names


def load_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """``optimizer.load_state_dict``, but refuses the state of another kind of optimizer, which torch may accept and
    then fail in a step.

    Raises:
        ValueError: the state is of another kind of optimizer, or the optimizer refuses it.
    """
    kind, before = class_name(optimizer), [dict(group) for group in optimizer.param_groups]
    defaults = set(optimizer.defaults)
    try:
        optimizer.load_state_dict(saved)
    except Exception as error:
        raise ValueError(
            f"{kind} refuses the saved optimizer state ({type(error).__name__}: {error}); load it into an optimizer of "
            f"the kind that saved it"
        ) from error
    for own, group in zip(before, optimizer.param_groups, strict=True):
        if missing := sorted((defaults & own.keys()) - group.keys()):
            raise ValueError(
                f"the saved optimizer state has no {missing[0]!r}, so it is not of {kind}; load it into an optimizer "
                f"of the kind that saved it"
            )
        for name, value in own.items():
            group.setdefault(name, value)  # a scheduler's or a user's own entries, which were not saved


def load_exactly(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """``load_state`` that keeps the dtypes with which states were saved.

    torch casts states to the parameter's dtype: a float32 momentum of a bfloat16 parameter would lose bits.

    Raises:
        ValueError: as ``load_state``.
    """
    load_state(optimizer, saved)
    params = parameters_of(optimizer)
    for number, values in saved["state"].items():
        optimizer.state[params[number]] = exact(optimizer.state[params[number]], values)
