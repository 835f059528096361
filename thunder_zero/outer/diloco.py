"""``tz.DiLoCo``: the outer step, on rows.

::

    launch    an offer: the changes of a fragment, and rows for sites that missed exchanges     -> a thread
    land      what the thread has exchanged, if all ranks of this site have it                  -> the agreed rows

A site that has missed exchanges takes the others' agreed parameters and states of the outer optimizer, and its own
change since its last exchange stays in its parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_zero.comm.agree import Claim, all_or_none
from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.small_collectives import all_gather_object, broadcast_object_from_rank_0
from thunder_zero.compat.torch.groups import at_exit
from thunder_zero.encodings.encoding import Encoding
from thunder_zero.outer.agreed import SGD, Agreed, MakeOuter, digests_at_site, hashed, to_host
from thunder_zero.outer.exchange import Exchanged, Offer, Peers
from thunder_zero.outer.meeting import Announcement, Unsettled
from thunder_zero.outer.rounds import Flight, SiteLink
from thunder_zero.outer.store import NotReached, Sites
from thunder_zero.plan.outer import WIRE, Outer
from thunder_zero.sharded.beside import RowsBeside

OF_SCHEDULES = ("params", "lr", "initial_lr")  # sites take the rates of one, since a schedule may be late at another
REMEDY = "give all ranks of a site the same arguments"


@dataclass
class OuterCounts:
    """Numbers of an outer step, which a checkpoint saves and restores."""

    optimizer: Optimizer  # the outer optimizer, whose options are saved, too
    steps: int = 0  # the number of calls of ``step``
    version: int = 0  # the number of exchanges with changes that the agreed parameters have
    state: str = ""  # the last exchange in this life, equal at all sites that took part
    meets: bool = True  # False after the first exchange, or the first after a load

    @property
    def met(self) -> bool:
        """True if what the parameters have changed since the last exchange is a contribution."""
        return bool(self.state)

    def state_dict(self) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        return {"steps": self.steps, "version": self.version, "options": options}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.version, self.state, self.meets = state["steps"], state["version"], "", True
        for group, options in zip(self.optimizer.param_groups, state["options"], strict=True):
            group.update(options)


class DiLoCo(RowsBeside):
    """The outer step of a sharded model that several sites train (DiLoCo, arXiv 2311.08105).

    Each site is a ``torchrun`` job of its own. It trains ``sync_every`` steps alone. Then ranks of equal place exchange
    what their rows have changed, and ``outer_optimizer`` takes the mean over sites as the gradient of the parameters
    that all had agreed on.

    >>> sites = tz.sites("10.0.0.1:29400", name="attic")
    >>> outer = tz.DiLoCo(model, sites, sync_every=32, wire=tz.Int8(block=64))
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     loss(model(x), y).backward()
    ...     optimizer.step()
    ...     outer.step()
    >>> tz.save("runs/step-100", model, optimizer, extra={"outer": outer})

    The first ``step`` meets the other sites: all take the parameters of the first by name, or of the site with most
    exchanges, if their own differ. A site that dies, hangs or loses its link is left out of the next exchange, and the
    others train on. When it is back, it takes rows from a peer, at its first ``step``.

    Args:
        sync_every: steps of the inner optimizer between two exchanges of a parameter, H in the papers. More steps send
            fewer bytes, and cost quality: docs/two-sites.md has a table.
        outer_optimizer: a function from parameters to an elementwise optimizer, by default SGD with learning rate 0.7
            and Nesterov momentum 0.5. The papers' 0.9 is for trainings with hundreds of exchanges. The optimizer is
            ``outer.optimizer``.
        wire: the encoding of changes: ``torch.float32``, ``torch.bfloat16`` or :class:`Int8`. The outer step adds its
            error once in an exchange.
        fragments: number of groups of units that are exchanged in turn, which spreads the bytes (Streaming DiLoCo).
        delay: steps that an exchange may take beside compute. Its result is applied after them.
        alpha: with a ``delay``, the weight of the local parameters when the result is applied.
        cpu_offload: keep the agreed parameters and the states of the outer optimizer in host memory.
    """

    root, what, before_another = "outer", "a DiLoCo", "call its leave(), and "
    counts: OuterCounts

    def __init__(
        self,
        model: nn.Module,
        sites: Sites,
        *,
        sync_every: int = 32,
        outer_optimizer: MakeOuter = SGD,
        wire: Encoding | torch.dtype = WIRE,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.5,
        cpu_offload: bool = False,
    ) -> None:
        if not isinstance(sites, Sites):
            raise TypeError(f"sites is {sites!r}; give the result of thunder_zero.sites('host:port', name=...)")
        cast = Encoding(wire) if isinstance(wire, torch.dtype) else wire
        self.outer = Outer(sync_every, fragments, delay, alpha, cast, sites.expected, cpu_offload=cpu_offload)
        super().__init__(model)
        plan, group = self.state.plan, self.state.group
        with all_or_none(group, "its outer step") as claims:
            rows = {name: to_host(row) if cpu_offload else row for name, row in self.copies().items()}
            self.agreed = Agreed(self.state, self._trained, rows, outer_optimizer)
            self.optimizer = self.agreed.optimizer
            self._fragments = self.outer.vectors_of(plan)
            claims.append(Claim("the site", "; ".join([repr(sites), *self._options()]), REMEDY))
        self._sites = replace(sites, life=broadcast_object_from_rank_0(sites.life, group))
        self.counts, self.state.before_first_step = OuterCounts(self.optimizer), self._begin
        states = sum(any(value.ndim for value in values.values()) for values in self.saved().values()) - 1
        self.state.outer = self.outer = replace(self.outer, states=states)
        peers = partial(Peers, self._sites, group.rank(), cast, self._fragments)
        self._link = SiteLink(self._sites, group.rank(), group.size(), peers)
        self._flight: Flight | None = None
        self._lands_at, self._others = 0, tuple[str, ...]()
        at_exit(self._link.leave)

    def __repr__(self) -> str:
        return (
            f"DiLoCo({self.outer}) of {self.state.name}, site {self._sites.name!r}: {self.counts.steps} steps, "
            f"{self.counts.version} exchanges"
        )

    @torch.no_grad()
    def _begin(self) -> None:
        """Take the parameters before the first step of an optimizer: weights may have been loaded since."""
        if not self.counts.steps:  # a checkpoint has given no agreed parameters
            self.agreed.reset()

    @torch.no_grad()
    def step(self) -> None:
        """Count a step of the inner optimizer; exchange after every ``sync_every`` of them. Call it on every rank.

        Only ranks of this site wait for each other. Other sites have ``timeout`` seconds to answer.
        """
        self.state.require_own_values("take an outer step")
        self.require_all()
        if self._link.has_left:
            raise RuntimeError(f"site {self._sites.name!r} has left; make a new DiLoCo to meet the others again")
        self.counts.steps += 1
        self._link.touch()
        with doing("DiLoCo.step", self.state.name):
            if self._flight is not None and self.counts.meets:  # a checkpoint was loaded since its launch
                with suppress(NotReached):
                    self._flight.land()
                self._flight = None
            if self._flight is not None and self.counts.steps >= self._lands_at:
                self._land(self._flight)
            if self.counts.meets or self.outer.is_due(self.counts.steps):
                self._launch()

    def digest(self) -> str:
        """Return a digest of the agreed parameters: after an exchange, that of all sites. Call it on all ranks."""
        return hashed(digests_at_site(self.agreed.rows.values(), self.state.group))

    @torch.no_grad()
    def leave(self) -> None:
        """Tell the other sites that this one ends. A script that ends does so, too."""
        if self._flight is not None:
            self._land(self._flight)
        self._link.leave()

    def saved(self) -> dict[str, dict[str, Tensor]]:
        return self.agreed.saved()

    def claim(self, name: str) -> Claim:
        value = f"{self.counts.steps} steps, {self.counts.version} exchanges"
        return Claim(f"{name} of {self.state.name}", value, "call step on every rank")

    def _options(self) -> list[str]:
        groups = [{name: group[name] for name in sorted(group)} for group in self.optimizer.param_groups]
        options = [(name, value) for group in groups for name, value in group.items() if name not in OF_SCHEDULES]
        return [
            f"an outer step {self.outer}",
            f"alpha {self.outer.alpha}",
            f"{type(self.optimizer).__name__} as outer optimizer",
            *(f"{name} {value!r} of the outer optimizer" for name, value in options),
        ]

    def _claims(self) -> str:
        """Return what must be equal at all sites, a sentence each line."""
        plan, agreed = self.state.plan, self.agreed.rows
        frozen = {name: param for name, param in self._params.items() if name not in agreed}
        digests = digests_at_site(frozen.values(), self.state.group)
        lines = [
            f"stage {plan.policy.stage} on {' x '.join(f'{axis.size} ({axis.name})' for axis in plan.mesh.axes)} ranks",
            *self._options(),
            f"a time-out of {self._sites.timeout:g} s",
            *(f"parameter {name!r} of shape {tuple(param.shape)}" for name, param in agreed.items()),
            *(f"frozen parameter {name!r} of digest {digest}" for name, digest in zip(frozen, digests, strict=True)),
        ]
        return "\n".join(lines)

    def _launch(self) -> None:
        sites, counts = self._sites, self.counts
        fragment, state = counts.version % self.outer.fragments, counts.state or self.digest()
        me = Announcement(sites.name, sites.life, counts.version, state, counts.met, fragment, self.agreed.rates)
        changes = self.agreed.changes(self._fragments[fragment])
        self._flight = self._link.fly(Offer(me, "" if counts.met else self._claims(), changes, self.agreed.sent()))
        self._lands_at = counts.steps + self.outer.delay
        if counts.meets or not self.outer.delay:
            self._land(self._flight)

    def _land(self, flight: Flight) -> None:
        """Wait for an exchange. Apply its result if all ranks of this site have it."""
        exchanged, failure, is_unsettled, self._flight = None, "", False, None
        with all_or_none(self.state.group, "the outer step"):
            try:
                exchanged = flight.land()
            except NotReached as error:
                failure, is_unsettled = str(error), isinstance(error, Unsettled)
        outcomes = all_gather_object((failure, is_unsettled), self.state.group)
        failures = [reason for reason, _ in outcomes if reason]
        self.counts.meets = False
        if any(unsettled for _, unsettled in outcomes):
            self.counts.state = ""  # its change may have been averaged, and must not count twice
        if exchanged is None or failures:
            self._tell(f"site {self._sites.name!r} trains on alone after step {self.counts.steps}: {failures[0]}")
            return
        self._tell_changes(exchanged)
        members, met = exchanged.members, self.counts.met
        if exchanged.rows:
            self.agreed.take(exchanged.rows, keeps_changes=met)
        if exchanged.means:
            self.agreed.take_rates(members.reference.rates)
            was_averaged = self._sites.name in members.contributors
            alpha = self.outer.alpha if was_averaged and self.outer.delay else 0.0
            vectors = self._fragments[members.fragment]
            self.agreed.step(vectors, exchanged.means, None if met and not was_averaged else alpha)
        self.counts.version = members.next_version
        self.counts.state = f"{members.turn} {members.next_version} {members.reference.life}"

    def _tell(self, sentence: str) -> None:
        if self.state.group.rank() == 0:
            print(f"thunder_zero: {sentence}", file=sys.stderr, flush=True)

    def _tell_changes(self, exchanged: Exchanged) -> None:
        """Print a line if other sites take part than in the last exchange, or if this one takes rows."""
        members, peer, own = exchanged.members, exchanged.members.reference, self._sites.name
        others = tuple(name for name in members.names if name != own)
        lost = sorted({*self._others} - {*others})
        if others != self._others or not self.counts.met:
            left = f"; {', '.join(map(repr, lost))} did not answer" if lost else ""
            met = ", ".join(map(repr, others)) or "nobody"
            self._tell(f"site {own!r} meets {met} after step {self.counts.steps}{left}")
            if peer.rates != self.agreed.rates:
                self._tell(f"site {own!r} steps with the outer learning rate {peer.rates} of site {peer.name!r}")
        if exchanged.rows:
            self._tell(f"site {own!r} takes the parameters of site {peer.name!r} after {peer.version} exchanges")
        self._others = others
