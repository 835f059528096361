"""``tz.EMA``: moving averages of parameters, by rows, and the model with them for a moment.

In: a sharded model, now and after each step. Out: averages, laid out as parameters are, so that a checkpoint has them
by rows::

    update     average = decay * average + (1 - decay) * parameter     each rank its own part, nothing is sent
    applied    parameters and averages change places, and back         ranks agree first that all can
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
    """How often an EMA was updated, with the methods of a state that a checkpoint restores."""

    calls: int = 0  # of ``update``
    averaged: int = 0  # how many of them averaged

    def state_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take counts from :meth:`state_dict`."""
        self.calls, self.averaged = state["calls"], state["averaged"]


class EMA:
    """Exponential moving averages of a sharded model's parameters, as ``AveragedModel`` has them with
    ``get_ema_multi_avg_fn(decay)`` on one process.

    The first update copies the parameters; each later one makes an average ``decay * average + (1 - decay) *
    parameter``. Averages are laid out as parameters are, as DTensors from stage 1 on; each rank averages its part, and
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

    Averaged are the parameters that require gradients when the EMA is made, ignored ones too. The others, and buffers,
    are the model's own in ``applied`` as well: run statistics of BatchNorm again there, or leave them as they are.
    An average has its parameter's dtype, or float32 where that is a half: small updates would be lost in it.

    Args:
        model: a model with ZeroTransform.
        decay: the weight of the old average, 0 or more and less than 1.
        every: average in every so many calls of ``update``, 1 or more.

    Attributes:
        averages: by the names of the parameters.
        counts: how often it was updated.
        state: the model's.

    Raises:
        TypeError: not a model with ZeroTransform.
        ValueError: ``decay`` or ``every`` is out of its range; no parameter requires gradients.
        RuntimeError: the parameters are averages now, inside ``applied``.
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
        """The settings, and how often it averaged."""
        return (
            f"EMA(decay={self.decay}, every={self.every}) of {self.state.name}, {self.counts.averaged} times averaged"
        )

    @property
    def decay(self) -> float:
        """The weight of the old average; may be set between updates, on all ranks alike."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ValueError(f"decay is {decay!r}; give a number, 0 or more and less than 1, such as 0.999")
        self._decay = float(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Average the parameters as they are now; call it after each step of the optimizer, on every rank.

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
        for name, whole in self.averages.items():
            average, value = local(whole), local(self._params[name])
            if self.counts.averaged == 1:
                average.copy_(value)
            else:
                average.lerp_(value.to(average.dtype), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the model's parameters are the averages: to evaluate, generate or export.

        A collective at its start: all ranks enter the block, and leave it. Parameters and averages change places, one
        at a time, so this takes the memory of one of a rank's parameters; one of half precision keeps a copy. ZeRO-1
        refreshes the other ranks' rows once in the block and once after it. Steps of an optimizer, updates of an EMA,
        ``tz.save``, ``tz.load`` and other loads are refused inside; state dicts and ``full_parameters`` have averages.

        Raises:
            RuntimeError: there is no average yet; inside another such block, ``full_parameters`` or an accumulation;
                ranks have updated different numbers of times. On every rank.
        """
        with doing(f"EMA.applied of {self.state.name}"):
            with all_or_none(self.state.group, "EMA.applied"):
                self._require_applicable()
            require_same([self.fact("the EMA")], self.state.group)
        kept: dict[str, Tensor] = {}
        self._swap(kept)
        self.state.averaged = frozenset(id(self._params[name]) for name in self.averages)
        try:
            yield
        finally:
            self.state.averaged = frozenset()
            self._swap(kept)

    def fact(self, name: str) -> Fact:
        """What ranks have to agree on, under this name."""
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
    def _swap(self, kept: dict[str, Tensor]) -> None:
        """Exchange parameters and averages; ``kept`` holds values of parameters of another dtype than their average."""
        for name, average in self.averages.items():
            param = self._params[name]
            before = param.detach().clone()
            param.copy_(kept.pop(name, average))  # raises the shard's version, by which ZeRO-1 sees it
            if average.dtype is param.dtype:
                average.copy_(before)
            else:
                kept[name] = before


def _copy(param: Tensor) -> Tensor:
    half = param.dtype.itemsize < torch.float32.itemsize
    return param.detach().to(torch.float32 if half else param.dtype, copy=True)
