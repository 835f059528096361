"""``tz.EMA``: moving averages of parameters, by rows, and the model with them for a moment.

In: a sharded model, now and after each step. Out: averages, laid out as parameters are, so that a checkpoint has them
by rows::

    update     average = decay * average + (1 - decay) * parameter     each rank its own part, nothing is sent
    applied    parameters and averages are exchanged, and back         ranks agree first that all can
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from thunder_zero.comm.agree import Fact, all_or_none, require_same
from thunder_zero.comm.collective_tags import doing
from thunder_zero.plan.policy import is_count
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.sharded_model import sharded_model


@dataclass
class Counts:
    """How often an EMA was updated; a checkpoint saves and restores it by its state dict."""

    calls: int = 0  # how often ``update`` was called
    averaged: int = 0  # how many of these calls averaged

    def state_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore counts from :meth:`state_dict`."""
        self.calls, self.averaged = state["calls"], state["averaged"]


class EMA:
    """Exponential moving averages of a sharded model's parameters.

    The values are those of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)`` on one process.

    The first update copies the parameters. A later update sets each average to ``decay * average + (1 - decay) *
    parameter``. Averages are laid out as parameters are, as DTensors from stage 1 on. Each rank averages its part, and
    nothing is sent.

    >>> ema = tz.EMA(model, decay=0.999)
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     loss(model(x), y).backward()
    ...     optimizer.step()
    ...     ema.update()
    >>> with ema.applied(), torch.no_grad():
    ...     evaluate(model)
    >>> tz.save("runs/step-100", model, optimizer, extra={"ema": ema})

    The parameters that require gradients when the EMA is made are averaged, ignored ones too. Inside ``applied`` other
    parameters, and buffers, keep the model's values: compute statistics of BatchNorm again there, or leave them as they
    are. An average has its parameter's dtype. If that has 16 bits, the average is float32, as small updates would be
    lost.

    Args:
        model: a model with ZeroTransform.
        decay: the weight of the old average, 0 or more and less than 1.
        every: average only in each ``every``-th call of ``update``, 1 or more.

    Attributes:
        averages: the averages by name of the parameter.
        counts: how often it was updated.
        state: the model's state.

    Raises:
        TypeError: ``model`` has no ZeroTransform.
        ValueError: ``decay`` or ``every`` is out of its range; no parameter requires gradients.
        RuntimeError: the parameters are averages at present, inside ``applied``.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, every: int = 1) -> None:
        if not is_count(every) or every == 0:
            raise ValueError(f"every is {every!r}; give a number of updates, 1 or more")
        self.decay, self.every = decay, every
        sharded = sharded_model(model)
        self.counts, self.state = Counts(), sharded.state
        self.state.require_own_values("make an EMA")
        self._params = {name: param for name, param in sharded.named_parameters() if param.is_floating_point()}
        self.averages = {name: _copy(param) for name, param in self._params.items() if param.requires_grad}
        if not self.averages:
            raise ValueError(
                f"no parameter of {self.state.name} requires gradients; make an EMA of a model that trains"
            )

    def __repr__(self) -> str:
        """Describe the settings, and how often it averaged."""
        return (
            f"EMA(decay={self.decay}, every={self.every}) of {self.state.name}, {self.counts.averaged} times averaged"
        )

    @property
    def decay(self) -> float:
        """The weight of the old average. It may be set between updates, equally on all ranks."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ValueError(f"decay is {decay!r}; give a number, 0 or more and less than 1, such as 0.999")
        self._decay = float(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Average the present values of the parameters. Call it after each step of the optimizer, on every rank.

        Raises:
            RuntimeError: inside ``applied``; a parameter was frozen when the EMA was made, and is trained now.
        """
        self.state.require_own_values("update an EMA")
        for name, param in self._params.items():
            if param.requires_grad and name not in self.averages:
                raise RuntimeError(
                    f"parameter {name!r} of {self.state.name} required no gradients when the EMA was made, and does "
                    f"now, so it has no average; make a new EMA"
                )
        self.counts.calls += 1
        if self.counts.calls % self.every:
            return
        self.counts.averaged += 1
        for name, dtensor in self.averages.items():
            average, value = local(dtensor), local(self._params[name])
            if self.counts.averaged == 1:
                average.copy_(value)
            else:
                average.lerp_(value.to(average.dtype), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the model's parameters by the averages inside the block: to evaluate, generate or export.

        A collective: all ranks must enter the block, and leave it. Parameters and averages are exchanged one at a time.
        This takes the memory of one of a rank's parameters, and a copy of each parameter of 16 bits. ZeRO-1 refreshes
        the other ranks' rows once in the block and once after it.

        Inside the block state dicts and ``full_parameters`` have averages. Steps of an optimizer, updates of an EMA,
        ``tz.save``, ``tz.load`` and other loads are refused.

        Raises:
            RuntimeError: there is no average yet; the call is inside another such block, ``full_parameters`` or an
                accumulation; ranks have updated different numbers of times. It raises on every rank.
        """
        with doing(f"EMA.applied of {self.state.name}"):
            with all_or_none(self.state.group, "EMA.applied"):
                self._require_applicable()
            require_same([self.fact("the EMA")], self.state.group)
        values: dict[str, Tensor] = {}
        self._exchange(values)
        self.state.averaged = frozenset(id(self._params[name]) for name in self.averages)
        try:
            yield
        finally:
            self.state.averaged = frozenset()
            self._exchange(values)

    def fact(self, name: str) -> Fact:
        """Return what ranks must agree on; ``name`` begins the message if they differ."""
        value = f"decay {self.decay}, every {self.every}, {self.counts.calls} updates"
        return Fact(f"{name} of {self.state.name}", value, "make the same EMA and update it on every rank")

    def _require_applicable(self) -> None:
        self.state.require_own_values("enter EMA.applied")
        self.state.require_sharded()
        if self.counts.averaged == 0:
            raise RuntimeError(
                f"the EMA of {self.state.name} has no average yet, after {self.counts.calls} updates with "
                f"every={self.every}; call update() after the optimizer's steps first"
            )
        self.state.require_reduced("enter EMA.applied")

    @torch.no_grad()
    def _exchange(self, values: dict[str, Tensor]) -> None:
        """Exchange parameters and averages.

        Args:
            values: in the first call empty, and filled with the values of parameters whose average has another dtype;
                in the second call these values are restored.
        """
        for name, average in self.averages.items():
            param = self._params[name]
            before = param.detach().clone()
            param.copy_(values.pop(name, average))  # raises the shard's version, by which ZeRO-1 sees the change
            if average.dtype is param.dtype:
                average.copy_(before)
            else:
                values[name] = before


def _copy(param: Tensor) -> Tensor:
    """Copy a parameter, in float32 if it has 16 bits or fewer."""
    half = param.dtype.itemsize < torch.float32.itemsize
    return param.detach().to(torch.float32 if half else param.dtype, copy=True)
