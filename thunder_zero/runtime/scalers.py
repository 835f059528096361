"""Makes gradient scalers skip a step on all ranks if one rank finds NaN or Inf.

A scaler skips a step, and lowers its scale, if the gradients have NaN or Inf; each rank would look at its own rows
alone. ``torch.amp.GradScaler`` and all that is built on it (FSDP's ``ShardedGradScaler``, Lightning Fabric's precision
plugins) look at gradients with one operator of torch, which also unscales them and sets a flag. A kernel of ours in
front of the operator's own shares the flag, where gradients of our models are among those given; torch's DTensor does
so in its dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_zero.comm.places import doing
from thunder_zero.comm.small_collectives import all_reduce_max
from thunder_zero.compat.in_front import put_in_front
from thunder_zero.rows import real_rows
from thunder_zero.runtime import registry
from thunder_zero.runtime.state import State

_ignored: WeakKeyDictionary[State, tuple[Tensor, ...]] = WeakKeyDictionary()
_shared = WeakTensorKeyDictionary()  # flag -> the states that share it


def watch(state: State, ignored: Sequence[Tensor]) -> None:
    """From now on share what a scaler finds in the gradients of this model.

    Args:
        state: the model's.
        ignored: the parameters that the policy ignores; what is found in their gradients counts, too.
    """
    _ignored[state] = tuple(ignored)
    put_in_front(torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default, _unscale)


def _unscale(unscale: Callable[..., None], grads: list[Tensor], found: Tensor, inverse_scale: Tensor) -> None:
    """torch's operator on the rows without padding, and then one small collective of the flag.

    Args:
        unscale: torch's kernel.
        grads: of one device and dtype, unscaled in place.
        found: one element, set to 1 if any of them has NaN or Inf; a scaler gives the same one for each dtype.
        inverse_scale: one element.
    """
    rows, states = _rows_and_states(grads)
    unscale(rows, found, inverse_scale)
    # Other parameters of the same optimizer, of another dtype, may add to a flag that was shared.
    _shared[found] = states = states or _shared.get(found, [])
    for state in states:
        flag = found.to(state.device)
        with doing(f"the comparison of overflows of {state.name}"):
            all_reduce_max(flag, state.group)
        found.copy_(flag)


def _rows_and_states(grads: Sequence[Tensor]) -> tuple[list[Tensor], list[State]]:
    """The gradients, of shards without padding, and the models of several ranks that they belong to, in that order."""
    owners: dict[int, tuple[State, str | None]] = {**registry.owners_by_gradient()}
    for state, ignored in _ignored.items():
        owners |= {id(param.grad): (state, None) for param in ignored}
    rows: list[Tensor] = []
    states: list[State] = []
    for grad in grads:
        owner = owners.get(id(grad))
        if owner is None:
            rows.append(grad)
            continue
        of, path = owner
        rows.append(grad if path is None else real_rows(grad, of.plan.by_name[path], of.plan))
        if of.plan.ranks > 1 and of not in states:
            states.append(of)
    return rows, states
