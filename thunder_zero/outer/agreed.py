"""What sites agree on, on rows: parameters, and the outer optimizer that steps them.

::

    agreed    parameters after the last exchange          this rank's rows, beside those of the model
    changes   agreed - parameter                          of a fragment, a vector each; sites average them
    step      outer optimizer: agreed, with the mean as its gradient
              parameter = alpha * parameter + (1 - alpha) * agreed      alpha is 0 without a delay
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thunder_zero.comm.small_collectives import all_gather_object, all_gather_tensor
from thunder_zero.plan.outer import Vector, copies_of
from thunder_zero.plan.policy import STAGES
from thunder_zero.plan.rows import in_equal_parts
from thunder_zero.sharded.digests import digests_of
from thunder_zero.sharded.dtensors import dtensor_like, local
from thunder_zero.sharded.state import State

MakeOuter = Callable[[Sequence[Tensor]], Optimizer]
SGD: MakeOuter = partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True)  # the papers have 0.9


class Agreed:
    """This rank's rows of the agreed parameters and of the outer optimizer's states, beside those of the model."""

    def __init__(
        self, state: State, trained: Mapping[str, Tensor], rows: Mapping[str, Tensor], make: MakeOuter
    ) -> None:
        for name in rows:
            if name not in state.plan.by_name:
                raise ValueError(
                    f"the policy ignores parameter {name!r}, so its values may differ between ranks, and sites cannot "
                    f"average it; freeze it, or let the policy shard it"
                )
        for param in state.plan.params:
            if param.requires_grad != (param.path in rows):
                then, now = ("trained", "is frozen") if param.requires_grad else ("was frozen", "trains")
                raise ValueError(
                    f"parameter {param.path!r} {then} when the model was compiled, and {now}; set requires_grad before "
                    f"tz.compile"
                )
        self.rows: dict[str, Tensor] = {name: nn.Parameter(row) for name, row in rows.items()}
        self.optimizer = _with_states(make, list(self.rows.values()))
        self._state, self._trained = state, trained
        self._copies = copies_of(state.plan).size

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """Return the agreed parameters and the states of the outer optimizer, by kind and name."""
        kinds: dict[str, dict[str, Tensor]] = {"agreed": self.rows}
        for name, param in self.rows.items():
            for kind, value in self.optimizer.state[param].items():
                kinds.setdefault(kind, {})[name] = value
        return kinds

    @property
    def rates(self) -> str:
        """The learning rates of the outer optimizer's groups, separated by spaces."""
        return " ".join(repr(float(group["lr"])) for group in self._scheduled())

    def take_rates(self, rates: str) -> None:
        """Take a peer's learning rates, so that all step alike. A scheduler may set others later."""
        for group, rate in zip(self._scheduled(), map(float, rates.split()), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _scheduled(self) -> list[dict[str, Any]]:
        return [group for group in self.optimizer.param_groups if "lr" in group]

    def sent(self) -> list[Tensor]:
        """Return this rank's rows of all tensors, which a site takes that has missed exchanges."""
        return [local(tensor) for tensors in self.saved().values() for tensor in tensors.values()]

    def reset(self) -> None:
        """Take the model's parameters."""
        for name, agreed in self.rows.items():
            local(agreed).copy_(local(self._trained[name]))

    def changes(self, vectors: Sequence[Vector]) -> list[Tensor]:
        """Return what vectors have changed since the last exchange, on the host: this rank's share, (n,) float32."""
        share = self._group_of_copies().rank() if self._copies > 1 else 0
        flat = (torch.cat([self._change(path).view(-1) for path in vector.paths]) for vector in vectors)
        return [in_equal_parts(change, self._copies)[share].cpu() for change in flat]

    def take(self, rows: Sequence[Tensor], *, keeps_changes: bool) -> None:
        """Replace all tensors by a peer's. With ``keeps_changes``, the model's parameters move by as much."""
        for name, row in zip(self.rows, rows, strict=False):
            agreed, change = local(self.rows[name]), self._change(name)
            agreed.copy_(row)
            self._write(name, agreed - change if keeps_changes else agreed)
        for state, row in zip(self.sent()[len(self.rows) :], rows[len(self.rows) :], strict=True):
            state.copy_(row)

    def step(self, vectors: Sequence[Vector], means: Sequence[Tensor], alpha: float | None) -> None:
        """Step the outer optimizer with means as gradients, and give the model's parameters new values.

        ``alpha`` is the weight of their own. If it is None, they move as much as the agreed ones, since the means do
        not have their changes.
        """
        names = [path for vector in vectors for path in vector.paths]
        changes = {name: self._change(name) for name in names if alpha is None}
        for vector, mean in zip(vectors, means, strict=True):
            if self._copies > 1:  # each of the ranks with equal rows has a share
                mean = torch.cat(all_gather_tensor(mean.to(self._state.device), self._group_of_copies()))
            params = [self.rows[path] for path in vector.paths]
            sizes = [local(param).numel() for param in params]
            for param, piece in zip(params, mean[: sum(sizes)].split(sizes), strict=True):
                param.grad = _with_rows(piece.view(local(param).shape).to(local(param)), param)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for name in names:
            agreed = local(self.rows[name])
            own = _like(self._trained[name], agreed)
            self._write(name, agreed - changes[name] if alpha is None else torch.lerp(agreed, own, alpha))

    def _change(self, name: str) -> Tensor:
        agreed = local(self.rows[name]).detach()
        return agreed - _like(self._trained[name], agreed)

    def _write(self, name: str, rows: Tensor) -> None:
        """Give a parameter of the model new values; this bumps its version, so that ZeRO-1 sees it."""
        param = self._trained[name]
        param.copy_(_with_rows(rows.detach().to(local(param)), param))

    def _group_of_copies(self) -> dist.ProcessGroup:
        """Return the ranks of this site with equal rows, which share the exchange."""
        ranks = self._state.ranks
        is_sharded = STAGES[self._state.plan.policy.stage].sharded
        return ranks.replicate_group if is_sharded and ranks.replicate_group is not None else ranks.data


def digests_at_site(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> list[str]:
    """Return a digest of each tensor, of its rows on all ranks of a site; a collective."""
    digests = [int(digest) for digest in digests_of(map(local, tensors))]
    return [hashed(ranks) for ranks in zip(*all_gather_object(digests, group), strict=True)]


def hashed(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def to_host(row: Tensor) -> Tensor:
    """Return a copy in host memory."""
    return _with_rows(local(row).cpu(), row)


def _with_rows(rows: Tensor, tensor: Tensor) -> Tensor:
    """Return these rows, as a DTensor if ``tensor`` is one."""
    return dtensor_like(rows, tensor, tensor.shape) if isinstance(tensor, DTensor) else rows


def _like(param: Tensor, agreed: Tensor) -> Tensor:
    """Return the rows of a parameter in the dtype and on the device of its agreed values."""
    return local(param).detach().to(agreed)


def _with_states(make: MakeOuter, params: Sequence[Tensor]) -> Optimizer:
    """Return an outer optimizer with all of its states, which other sites may send before its first step.

    Raise ValueError if it is not elementwise, or has states other than tensors.
    """
    whole = torch.linspace(-1, 1, 32).view(8, 4)
    halves = torch.cat(_stepped(make, [whole[:3], whole[3:]]))
    if not torch.equal(halves, _stepped(make, [whole])[0]):
        raise ValueError(
            "outer_optimizer steps parts of a matrix otherwise than the whole, and ranks have parts; give an "
            "elementwise optimizer, such as torch.optim.SGD"
        )
    optimizer = make(params)
    before = [local(param).detach().clone() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for param, values in zip(params, before, strict=True):
            local(param).copy_(values)
            for name, state in optimizer.state[param].items():
                if not isinstance(state, Tensor):
                    raise ValueError(
                        f"the state {name!r} of outer_optimizer is a {type(state).__name__}, and sites exchange "
                        f"tensors; give another optimizer, such as torch.optim.SGD"
                    )
                if name == "step":
                    state.zero_()
    return optimizer


def _stepped(make: MakeOuter, values: Sequence[Tensor]) -> list[Tensor]:
    """Return parameters after two steps of a new optimizer."""
    params = [nn.Parameter(value.clone()) for value in values]
    try:
        optimizer = make(params)
        for _ in range(2):
            for param in params:
                param.grad = param.detach().cos()
            optimizer.step()
    except Exception as error:
        raise ValueError(
            f"outer_optimizer failed on a small matrix: {type(error).__name__}: {error}; give a function from "
            f"parameters to an optimizer that steps without a closure, such as functools.partial(torch.optim.SGD, "
            f"lr=0.7)"
        ) from error
    return [param.detach() for param in params]
