"""``tz.DiLoCo``: the outer step, on rows.

::

    agreed    parameters after the last exchange          this rank's rows, beside those of the model
    launch    change = agreed - parameter                 of a fragment; averaged over sites in a thread
    apply     outer optimizer: agreed, with the mean as its gradient
              parameter = alpha * parameter + (1 - alpha) * agreed      alpha is 0 without a delay

A site that has missed exchanges takes the others' agreed parameters and states of the outer optimizer, and its own
change since its last exchange stays in its parameters.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thunder_zero.comm.agree import Claim, all_or_none
from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.small_collectives import all_gather_object, all_gather_tensor, broadcast_object_from_rank_0
from thunder_zero.compat.torch.groups import at_exit
from thunder_zero.encodings.encoding import Encoding
from thunder_zero.outer.exchange import Change, Exchanged
from thunder_zero.outer.meeting import Announcement, Unsettled
from thunder_zero.outer.rounds import Flight, SiteLink
from thunder_zero.outer.store import NotReached, Sites
from thunder_zero.plan.outer import WIRE, Outer, Vector, copies_of
from thunder_zero.plan.policy import STAGES
from thunder_zero.plan.rows import in_equal_parts
from thunder_zero.sharded.beside import RowsBeside
from thunder_zero.sharded.digests import digests_of
from thunder_zero.sharded.dtensors import dtensor_like, local

OF_SCHEDULES = ("params", "lr", "initial_lr")  # what may differ between sites for a while
REMEDY = "give all ranks of a site the same arguments"
MakeOuter = Callable[[Sequence[Tensor]], Optimizer]
SGD: MakeOuter = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)  # as in the papers


@dataclass
class OuterCounts:
    """Numbers of an outer step, which a checkpoint saves and restores."""

    optimizer: Optimizer  # the outer optimizer, whose options are saved, too
    steps: int = 0  # the number of calls of ``step``
    version: int = 0  # the number of exchanges with changes that the agreed parameters have
    state: str = ""  # the last exchange in this life, equal at all sites that took part
    meets: bool = True  # False after the first exchange, or the first after a load
    is_loaded: bool = False  # True if a checkpoint gave the agreed parameters

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
        self.is_loaded = True
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
            and Nesterov momentum 0.9. The optimizer is ``outer.optimizer``.
        wire: the encoding of changes: ``torch.float32``, ``torch.bfloat16`` or :class:`Int8`. The outer step adds its
            error once in an exchange.
        fragments: number of groups of units that are exchanged in turn, which spreads the bytes (Streaming DiLoCo).
        delay: steps that an exchange may take beside compute. Its result is applied after them.
        alpha: with a ``delay``, the weight of the local parameters when the result is applied.
        cpu_offload: keep the agreed parameters and the states of the outer optimizer in host memory.
    """

    root, what = "outer", "a DiLoCo"
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
        self._is_sharded = STAGES[plan.policy.stage].sharded
        with all_or_none(group, "its outer step") as claims:
            rows = self.copies()
            if cpu_offload:
                rows = {name: _with_rows(local(row).cpu(), row) for name, row in rows.items()}
            self.agreed: dict[str, Tensor] = {name: nn.Parameter(row) for name, row in rows.items()}
            self.optimizer = _with_states(outer_optimizer, list(self.agreed.values()))
            self._require_planned()
            self._fragments = self.outer.vectors_of(plan)
            claims.append(Claim("the site", "; ".join([repr(sites), *self._options()]), REMEDY))
        self._sites = replace(sites, life=broadcast_object_from_rank_0(sites.life, group))
        self.counts, self.state.before_first_step = OuterCounts(self.optimizer), self._begin
        self.state.outer = self.outer = replace(self.outer, states=len(self.saved()) - 1)
        self._link = SiteLink(self._sites, group.rank(), group.size(), self.outer.wire, self._fragments)
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
        """Take the parameters before the first step of an optimizer, which may have been loaded since."""
        if not self.counts.is_loaded:
            for name, agreed in self.agreed.items():
                local(agreed).copy_(local(self._trained[name]))

    @torch.no_grad()
    def step(self) -> None:
        """Count a step of the inner optimizer; exchange after every ``sync_every`` of them. Call it on every rank.

        Only ranks of this site wait for each other. Other sites have ``timeout`` seconds to answer.
        """
        self.state.require_own_values("take an outer step")
        self.require_all()
        self.counts.steps += 1
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
        return _hash(self._digests(self.agreed.values()))

    @torch.no_grad()
    def leave(self) -> None:
        """Tell the other sites that this one ends. A script that ends does so, too."""
        if self._flight is not None:
            self._land(self._flight)
        self._link.leave()

    def saved(self) -> dict[str, dict[str, Tensor]]:
        kinds: dict[str, dict[str, Tensor]] = {"agreed": self.agreed}
        for name, param in self.agreed.items():
            for kind, value in self.optimizer.state[param].items():
                kinds.setdefault(kind, {})[name] = value
        return kinds

    def claim(self, name: str) -> Claim:
        value = f"{self.counts.steps} steps, {self.counts.version} exchanges"
        return Claim(f"{name} of {self.state.name}", value, "call step on every rank")

    def _options(self) -> list[str]:
        groups = [{name: group[name] for name in sorted(group)} for group in self.optimizer.param_groups]
        options = [(name, value) for group in groups for name, value in group.items() if name not in OF_SCHEDULES]
        return [
            f"an outer step {self.outer}",
            f"{type(self.optimizer).__name__} as outer optimizer",
            *(f"{name} {value!r} of the outer optimizer" for name, value in options),
        ]

    def _claims(self) -> str:
        """Return what must be equal at all sites, a sentence each line."""
        plan, frozen = self.state.plan, {name: param for name, param in self._params.items() if name not in self.agreed}
        digests = self._digests(frozen.values())
        lines = [
            f"stage {plan.policy.stage} on {' x '.join(f'{axis.size} ({axis.name})' for axis in plan.mesh.axes)} ranks",
            *self._options(),
            *(f"parameter {name!r} of shape {tuple(param.shape)}" for name, param in self.agreed.items()),
            *(f"frozen parameter {name!r} of digest {digest}" for name, digest in zip(frozen, digests, strict=True)),
        ]
        return "\n".join(lines)

    def _require_planned(self) -> None:
        for name in self.agreed:
            if name not in self.state.plan.by_name:
                raise ValueError(
                    f"the policy ignores parameter {name!r}, so its values may differ between ranks, and sites cannot "
                    f"average it; freeze it, or let the policy shard it"
                )

    def _launch(self) -> None:
        fragment, counts = self.counts.version % self.outer.fragments, self.counts
        me = Announcement(
            name=self._sites.name,
            life=self._sites.life,
            version=counts.version,
            state=counts.state or self.digest(),
            met=counts.met,
            fragment=fragment,
        )
        changes = [self._change(vector) for vector in self._fragments[fragment]]
        claims = "" if counts.met else self._claims()
        self._flight = self._link.fly(me, claims, changes, self._rows())
        self._lands_at = counts.steps + self.outer.delay
        if counts.meets or not self.outer.delay:
            self._land(self._flight)

    def _change(self, vector: Vector) -> Change:
        pairs = [(local(self.agreed[path]), self._trained[path]) for path in vector.paths]
        flat = torch.cat([(agreed - _like(param, agreed)).view(-1) for agreed, param in pairs])
        copies, share = self._copies()
        return Change(in_equal_parts(flat, copies)[share].cpu(), f"{vector.place} {share}")

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
        self._apply(exchanged)
        members = exchanged.members
        self.counts.version = members.next_version
        self.counts.state = f"{members.turn} {members.next_version} {members.reference.life}"

    def _tell(self, sentence: str) -> None:
        if self.state.group.rank() == 0:
            print(f"thunder_zero: {sentence}", file=sys.stderr, flush=True)

    def _tell_changes(self, exchanged: Exchanged) -> None:
        """Print a line if other sites take part than in the last exchange, or if this one takes rows."""
        members, own = exchanged.members, self._sites.name
        others = tuple(name for name in members.names if name != own)
        lost = sorted({*self._others} - {*others})
        if others != self._others or not self.counts.met:
            left = f"; {', '.join(map(repr, lost))} did not answer" if lost else ""
            met = ", ".join(map(repr, others)) or "nobody"
            self._tell(f"site {own!r} meets {met} after step {self.counts.steps}{left}")
        if exchanged.rows:
            peer = members.reference
            self._tell(f"site {own!r} takes the parameters of site {peer.name!r} after {peer.version} exchanges")
        self._others = others

    def _apply(self, exchanged: Exchanged) -> None:
        """Take the reference's rows, step the outer optimizer, and give the model's parameters new values."""
        members, counts = exchanged.members, self.counts
        if exchanged.rows:
            self._take(exchanged.rows)
        if not exchanged.means:
            return
        vectors = self._fragments[members.fragment]
        names = [path for vector in vectors for path in vector.paths]
        contributes = self._sites.name in members.contributors
        stays = counts.met and not contributes  # its own change was not averaged
        old = {name: local(self.agreed[name]).clone() for name in names if stays}
        self._step_outer(vectors, exchanged.means)
        alpha = self.outer.alpha if contributes and self.outer.delay else 0.0
        for name in names:
            agreed = local(self.agreed[name])
            param = _like(self._trained[name], agreed)
            self._write(name, param - old[name] + agreed if stays else torch.lerp(agreed, param, alpha))

    def _take(self, rows: Sequence[Tensor]) -> None:
        """Replace the agreed parameters and the states. What the model's parameters have changed since stays."""
        for (name, param), row in zip(self.agreed.items(), rows, strict=False):
            agreed = local(param)
            change = _like(self._trained[name], agreed) - agreed
            agreed.copy_(row)
            self._write(name, agreed + change if self.counts.met else agreed)
        for state, row in zip(self._rows()[len(self.agreed) :], rows[len(self.agreed) :], strict=True):
            state.copy_(row)

    def _step_outer(self, vectors: Sequence[Vector], means: Sequence[Tensor]) -> None:
        """Step the outer optimizer with means as gradients. Ranks with equal rows first complete them."""
        for vector, mean in zip(vectors, means, strict=True):
            if self._copies()[0] > 1:
                mean = torch.cat(all_gather_tensor(mean.to(self.state.device), self._group_of_copies()))
            params = [self.agreed[path] for path in vector.paths]
            sizes = [local(param).numel() for param in params]
            for param, piece in zip(params, mean[: sum(sizes)].split(sizes), strict=True):
                param.grad = _with_rows(piece.view(local(param).shape).to(local(param)), param)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _write(self, name: str, rows: Tensor) -> None:
        """Give a parameter of the model new values; this bumps its version, so that ZeRO-1 sees it."""
        param = self._trained[name]
        param.copy_(_with_rows(rows.detach().to(local(param)), param))

    def _rows(self) -> list[Tensor]:
        """Return this rank's rows of all tensors: those that a site takes that has missed exchanges."""
        return [local(tensor) for tensors in self.saved().values() for tensor in tensors.values()]

    def _digests(self, tensors: Iterable[Tensor]) -> list[str]:
        """Return a digest of each tensor, of its rows on all ranks of this site; a collective."""
        digests = [int(digest) for digest in digests_of(map(local, tensors))]
        return [_hash(ranks) for ranks in zip(*all_gather_object(digests, self.state.group), strict=True)]

    def _copies(self) -> tuple[int, int]:
        """Return the number of ranks of this site with equal rows, which share the exchange, and this rank's index."""
        copies = copies_of(self.state.plan)
        return copies, self._group_of_copies().rank() if copies > 1 else 0

    def _group_of_copies(self) -> dist.ProcessGroup:
        ranks = self.state.ranks
        return ranks.data if ranks.replicate_group is None or not self._is_sharded else ranks.replicate_group


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


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
