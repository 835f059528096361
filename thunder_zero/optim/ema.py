"""``tz.EMA``: moving averages of sharded parameters, and a block in which the model uses them.

::

    update     average = decay * average + (1 - decay) * parameter     each rank updates its rows, without communication
    applied    swap parameters and averages, and swap them back        first, all ranks agree that each rank can swap
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from thunder_zero.comm.agree import Claim, all_or_none
from thunder_zero.comm.collective_tags import doing
from thunder_zero.plan.policy import is_count
from thunder_zero.sharded.beside import RowsBeside
from thunder_zero.sharded.dtensors import local

MODEL = "model"  # the averages' part of their keys in a checkpoint


@dataclass
class Counts:
    """Counts of an EMA's updates, which a checkpoint saves and restores."""

    calls: int = 0  # the number of calls of ``update``
    averaged: int = 0  # the number of these calls that changed the averages

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls, self.averaged = state["calls"], state["averaged"]


class EMA(RowsBeside):
    """Exponential moving averages of a sharded model's parameters.

    The values equal those of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)`` on one
    process. The first update copies the parameters. A later update sets each average to ``decay * average + (1 - decay)
    * parameter``. Averages have the placements of the parameters, so they are DTensors from stage 1 on. Each rank
    averages its rows without communication.

    >>> ema = tz.EMA(model, decay=0.999)
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     loss(model(x), y).backward()
    ...     optimizer.step()
    ...     ema.update()
    >>> with ema.applied(), torch.no_grad():
    ...     evaluate(model)
    >>> tz.save("runs/step-100", model, optimizer, extra={"ema": ema})

    An EMA averages the parameters that require gradients when it is built, including parameters that the policy
    ignores. All other parameters and the buffers keep the model's values inside ``applied``. You may recompute
    BatchNorm statistics inside the block. An average has the parameter's dtype. Averages of 16-bit parameters have
    float32, since 16 bits would lose small updates.

    ``decay`` is the weight of the old average. The averages change in each call of ``update`` whose number ``every``
    divides. ``averages`` has them by parameter name.
    """

    root, what = "ema", "an EMA"
    counts: Counts

    def __init__(self, model: nn.Module, decay: float = 0.999, *, every: int = 1) -> None:
        if not is_count(every) or every == 0:
            raise ValueError(f"every is {every!r}; give a number of updates, 1 or more")
        self.decay, self.every = decay, every
        super().__init__(model)
        self.counts, self.averages = Counts(), self.copies()

    def __repr__(self) -> str:
        return (
            f"EMA(decay={self.decay}, every={self.every}) of {self.state.name}, {self.counts.averaged} times averaged"
        )

    @property
    def decay(self) -> float:
        """The weight of the old average. You may change the decay between updates, equally on all ranks."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ValueError(f"decay is {decay!r}; give a number, 0 or more and less than 1, such as 0.999")
        self._decay = float(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current parameters. Call it on every rank after each step of the optimizer."""
        self.state.require_own_values("update an EMA")
        self.require_all()
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
        """Temporarily replace the model's parameters by the averages, for example to evaluate, generate or export.

        A collective: all ranks must enter the block, and leave it. Parameters and averages are swapped one at a time.
        The swap needs temporary memory for one local parameter, and for a copy of each 16-bit parameter. ZeRO-1
        refreshes the other ranks' rows once in the block and once after it.

        Inside the block, state dicts and ``full_parameters`` return averages. Steps of an optimizer, updates of an EMA,
        ``tz.save``, ``tz.load`` and other loads raise.

        All ranks raise if the EMA has no average yet, if ranks have different counts of updates, or inside ``applied``,
        ``full_parameters`` or an accumulation.
        """
        with doing("EMA.applied", self.state.name), all_or_none(self.state.group, "EMA.applied") as claims:
            self.state.require_own_values("enter EMA.applied")
            self.state.require_sharded()
            if self.counts.averaged == 0:
                raise RuntimeError(
                    f"the EMA of {self.state.name} has no average yet, after {self.counts.calls} updates with "
                    f"every={self.every}; call update() after the optimizer's steps first"
                )
            self.state.require_reduced("enter EMA.applied")
            claims.append(self.claim("the EMA"))
        originals: dict[str, Tensor] = {}
        self._swap(originals)
        self.state.averaged = frozenset(self._params[name] for name in self.averages)
        try:
            yield
        finally:
            self.state.averaged = frozenset()
            self._swap(originals)

    def saved(self) -> dict[str, dict[str, Tensor]]:
        return {MODEL: self.averages}

    def claim(self, name: str) -> Claim:
        value = f"decay {self.decay}, every {self.every}, {self.counts.calls} updates"
        return Claim(f"{name} of {self.state.name}", value, "make the same EMA and update it on every rank")

    @torch.no_grad()
    def _swap(self, originals: dict[str, Tensor]) -> None:
        """Swap parameters and averages. ``originals`` keeps the parameters whose average has another dtype."""
        for name, average in self.averages.items():
            param = self._params[name]
            old_value = param.detach().clone()
            param.copy_(originals.pop(name, average))  # bumps the shard's version, so that ZeRO-1 sees the change
            if average.dtype is param.dtype:
                average.copy_(old_value)
            else:
                originals[name] = old_value
