"""``tz.whole``: an ordinary optimizer on whole parameters, over the shards of a model.

In this step of two buckets, time runs down, and entries of a row overlap::

    agree_on_step: ranks compare groups and gradients                        agreement.py
    bucket 0 to its owners                                                   exchange.ToOwners
    bucket 1 to its owners          this rank steps its members of 0         stepper.BucketStepper
    bucket 0 back to all ranks      this rank steps its members of 1         exchange.FromOwners
    bucket 1 back to all ranks
    raise_on_all: did a rank fail?                                           agreement.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thunder_zero.comm.collective_tags import CollectiveTag, current_activity, doing
from thunder_zero.optim.agreement import agree_on_step, raise_on_all
from thunder_zero.optim.exchange import FromOwners, Member, ToOwners
from thunder_zero.optim.members import (
    describe_uneven_option,
    groups_of_params,
    make_ordinary,
    members_of,
    model_of,
)
from thunder_zero.optim.options import OF_BASE, changed_names, describe_for_probe, describe_values, hyper_parameters
from thunder_zero.optim.probe import ProbeResult
from thunder_zero.optim.stepper import BucketStepper, Groups, MakeOptimizer, UserOptions, copy_values, params_entry
from thunder_zero.plan.owners import work_of_shape
from thunder_zero.sharded.optimizers import StepsWhole, parameters_of
from thunder_zero.sharded.state import State

SHOWN = 8  # the maximum number of ranks in a repr, and of parameters per rank


def whole(
    optimizer: MakeOptimizer, params: Iterable[Any], /, *, trust_optimizer: bool = False, **options: Any
) -> Whole:
    """Build an optimizer that steps whole parameters, for Muon, Shampoo, Adafactor and others that are not elementwise.

    Each parameter has one owner among the ranks that share it. A ``step`` sends the rows of the parameter and of its
    gradient to the owner. The owner steps the ordinary optimizer on the whole parameter, and sends the updated rows
    back. The result equals that of one process. Schedules and checkpoints work as with any optimizer.

    >>> optimizer = tz.whole(torch.optim.Muon, [param for param in model.parameters() if param.ndim == 2], lr=1e-3)

    A step is a collective: all ranks must call it. Let B be (W - 1) / W times the bytes of all parameters, on W ranks.
    In stages 2 and 3 a rank sends on average 3 B / W bytes a step: gradient and parameter to the owner, the parameter
    back. In stage 1 it sends 2 B / W bytes, since the owner has the parameter; for replicated parameters, B bytes.

    Only the owner has a parameter's state. Together, ranks hold at most two buckets of whole parameters and gradients,
    and a third bucket of whole parameters.

    ``optimizer`` is a class, or a function that takes parameter groups and options and returns an optimizer.
    ``trust_optimizer`` promises that it steps each parameter independently, and draws equal random numbers in all
    replicas; without it, an optimizer that does not, or cannot be probed, raises.

    The result is an optimizer over the shards: schedulers, ``add_param_group``, ``zero_grad``, gradient scalers and
    ``tz.clip_grad_norm_`` work as usual. Its ``repr`` names the owners.
    """
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        raise TypeError(
            f"tz.whole was given a {type(optimizer).__name__} to make optimizers with; give the class itself and then "
            f"the parameters, as in tz.whole(torch.optim.Muon, params, lr=1e-3)"
        )
    return Whole(optimizer, params, options, trust_optimizer)


def update_options(groups: Sequence[dict[str, Any]], new_options: Sequence[Mapping[str, Any]]) -> None:
    for group, options in zip(groups, new_options, strict=True):
        for key, value in options.items():
            if isinstance(current := group.get(key), Tensor) and isinstance(value, Tensor):
                current.copy_(value)  # in place, since a user or a scheduler may hold the tensor
            else:
                group[key] = value


def require_own_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ValueError if a state dict has the state of a parameter that another rank owns; a hook before loads."""
    assert isinstance(optimizer, Whole)
    rank, shards = optimizer.model.plan.mesh.shard.place, parameters_of(optimizer)
    for number, values in state_dict["state"].items():
        if not isinstance(number, int):
            raise ValueError(
                f"the state dict has a state {number!r} that is of no parameter, which tz.whole cannot load: each rank "
                f"steps some of the parameters, and keeps its own; use an optimizer whose states are of parameters"
            )
        if values and number < len(shards) and (owner := optimizer.owner_of(shards[number])) != rank:
            raise ValueError(
                f"the state dict has a state of parameter {number}, which rank {owner} owns, and this is rank {rank}: "
                f"another rank saved it, or the owners were others; save with tz.save and load with tz.load, which "
                f"find the owners"
            )


class GuardedOptimizer(StepsWhole):
    """An optimizer that raises if it is copied, or if an attribute of the ordinary optimizer is used.

    Each rank has several ordinary optimizers, and an assignment would change only some of these optimizers.
    """

    kind = "..."  # until the ordinary optimizer is built
    _foreign: frozenset[str] = frozenset()  # attributes that only the ordinary optimizer has

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"tz.whole({self.kind}) has no {name!r}: it has what torch.optim.Optimizer has, as each rank steps "
            f"{self.kind} on a part of the parameters; put {self.kind} on model.parameters() itself if torch steps it "
            f"there"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._foreign:
            raise AttributeError(
                f"tz.whole({self.kind}) cannot set {name!r}, which {self.kind} has: each rank steps {self.kind} on a "
                f"part of the parameters, and would not see it; give tz.whole a function that makes {self.kind} and "
                f"sets it"
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"tz.whole({self.kind}) cannot be copied or pickled, as it belongs to a model; save it with tz.save, or "
            f"its state_dict()"
        )


class Whole(GuardedOptimizer):
    """An optimizer over shards that steps whole parameters: see :func:`whole`. ``kind`` names the ordinary one."""

    def __init__(self, make: MakeOptimizer, params: Iterable[Any], options: Mapping[str, Any], trusted: bool) -> None:
        self._make, self._options, self._trusted = make, dict(options), trusted
        self._buckets: list[BucketStepper] = []
        self._steps = 0
        self._is_compared = False
        self._stepped: frozenset[BucketStepper] = frozenset()  # buckets whose ordinary optimizers exist on all owners
        self.members: list[Member] = []  # in the order in which they are sent
        self._owners: dict[Tensor, int] = {}  # by shard
        groups = groups_of_params(params)
        self.model: State = model_of([shard for group in groups for shard in group["params"]])
        self._user_options: list[frozenset[str]] = [frozenset(hyper_parameters(group)) for group in groups]
        ordinary, result = self._make_ordinary(groups, self._user_options)
        self._moving, self._moves_all, self.kind = result.moving, result.moves_all, type(ordinary).__name__
        pairs = zip(groups, ordinary.param_groups, strict=True)
        super().__init__(
            [{**hyper_parameters(options), **params_entry(group)} for group, options in pairs], ordinary.defaults
        )
        self._assign_owners(self.param_groups)
        self._foreign = frozenset(dir(ordinary)).difference(OF_BASE, dir(self))
        self.register_load_state_dict_pre_hook(require_own_states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and assign owners to its parameters. Other parameters keep their owners."""
        if not self._buckets:  # torch's constructor calls this
            super().add_param_group(param_group)
            return
        if attributes := self._buckets[0].changed_attributes():
            raise RuntimeError(
                f"steps of {self.kind} change its {', '.join(map(repr, attributes))}, which begins anew for parameters "
                f"that are added after a step; give tz.whole all groups before the first step, or make another "
                f"optimizer of the new ones"
            )
        groups = groups_of_params([param_group])
        model_of(groups[0]["params"], self.model)
        user_options = [frozenset(hyper_parameters(groups[0]))]
        ordinary, _ = self._make_ordinary(groups, user_options)
        super().add_param_group({**hyper_parameters(ordinary.param_groups[0]), **params_entry(groups[0])})
        self._user_options += user_options
        self._assign_owners(self.param_groups[-1:])

    def _make_ordinary(
        self, groups: Groups, user_options: UserOptions, moving: frozenset[str] = frozenset()
    ) -> tuple[Optimizer, ProbeResult]:
        return make_ordinary(self._make, groups, user_options, self._options, self.model, moving, trusted=self._trusted)

    def _assign_owners(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Assign owners to the parameters of ``groups``, the optimizer's last groups."""
        plan, offset = self.model.plan, len(self.param_groups) - len(groups)
        shard = plan.mesh.shard
        loads = [0] * shard.size
        for member in self.members:
            loads[member.owner] += work_of_shape(member.param.shape)
        named = "param_names" in groups[0]
        for members in members_of(groups, offset, self.model, loads):
            self.members += members
            self._owners |= {member.shard: member.owner for member in members}
            self._buckets.append(BucketStepper(self._make, self._options, members, shard.place, named=named))
        self._is_compared = False
        self._param_ids = tuple(map(id, parameters_of(self)))
        self._probed = describe_for_probe(self.param_groups, self._moving) if offset == 0 else []

    def owner_of(self, shard: Tensor) -> int | None:
        return self._owners.get(shard)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient. This is a collective: if one rank raises, all ranks do."""
        if closure is not None:
            raise RuntimeError(
                f"tz.whole({self.kind}).step was given a closure, and evaluates no loss; call backward, then step()"
            )
        if self._param_ids != tuple(map(id, parameters_of(self))):
            raise RuntimeError(
                f"the parameters in the groups of tz.whole({self.kind}) were changed by hand; use add_param_group, or "
                f"make a new optimizer of other parameters"
            )
        self._steps += 1
        with doing(f"step number {self._steps} of tz.whole({self.kind})", self.model.name):
            paths, full_paths = agree_on_step(
                self.kind, self.members, self.param_groups, self.model, known=self._is_compared
            )
            self._is_compared = True
            self._probe_again()
            self.model.transport.enter(CollectiveTag(current_activity(), repr((sorted(paths), sorted(full_paths)))))
            raise_on_all(self._step(paths, full_paths), self.kind, self.model)
            self._stepped = frozenset(self._buckets)
            if not self.state:  # torch's state-dict functions would step, on this rank alone, to create states
                self.state[self.members[0].shard] = {}

    def _probe_again(self) -> None:
        """Probe again if options or groups have changed. Ranks have compared options, so all ranks do the same."""
        if self._probed != describe_for_probe(self.param_groups, self._moving):
            _, result = self._make_ordinary(self.param_groups, self._user_options, self._moving)
            self._moving, self._moves_all = self._moving | result.moving, result.moves_all
            self._probed = describe_for_probe(self.param_groups, self._moving)

    def _step(self, paths: frozenset[str], full_paths: frozenset[str]) -> Exception | None:
        """Step the parameters at ``paths``, bucket by bucket. Return the first error, or None.

        After an error the remaining buckets are still sent, unchanged, because other ranks wait for them. Every rank
        has the parameters at ``full_paths`` in full.
        """
        failure: Exception | None = None
        groups = new_options = [hyper_parameters(group) for group in self.param_groups]
        buckets, texts = self._buckets, list[dict[str, str]]()

        def send(bucket: BucketStepper) -> ToOwners:
            # In the first step owners get all values, since an optimizer's constructor may keep them.
            sends_all = self._moves_all or bucket not in self._stepped
            return ToOwners(self.model, bucket.members if sends_all else bucket.members_at(paths), paths, full_paths)

        to_owners, from_owners = send(buckets[0]), None
        for index, bucket in enumerate(buckets):
            values = to_owners.wait()
            if index + 1 < len(buckets):
                to_owners = send(buckets[index + 1])
            updated = {path: param for path, (param, _) in values.items()}
            if failure is None:
                try:
                    updated, new_options = bucket.step(values, copy_values(groups), self._user_options, self.state)
                    previous_texts, texts = texts, list(map(describe_values, new_options))
                    if differing := changed_names(previous_texts or texts, texts):
                        raise RuntimeError(describe_uneven_option(self.kind, min(differing)))
                except Exception as error:
                    failure = error
            del values
            sent = FromOwners(self.model, bucket.members if self._moves_all else bucket.members_at(paths), updated)
            if from_owners is not None:
                from_owners.wait()
            from_owners = sent
        assert from_owners is not None, "an optimizer has parameters"
        from_owners.wait()
        update_options(self.param_groups, new_options)
        return failure

    def __repr__(self) -> str:
        lines = [super().__repr__(), f"{self.kind} of whole parameters of {self.model.name}"]
        works = {member.param.path: work_of_shape(member.param.shape) for member in self.members}
        for rank in range(ranks := self.model.plan.mesh.shard.size)[:SHOWN]:
            owned = [member.param.path for member in self.members if member.owner == rank]
            share = sum(map(works.__getitem__, owned)) / max(sum(works.values()), 1)
            paths = ", ".join(owned[:SHOWN]) + f" and {len(owned) - SHOWN} more" * (len(owned) > SHOWN)
            lines.append(f"    rank {rank} owns {share:.0%} of the work: {paths or 'nothing'}")
        if ranks > SHOWN:
            lines.append(f"    and {ranks - SHOWN} more ranks")
        return "\n".join(lines)
