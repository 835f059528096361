"""Tries on stand-ins whether an optimizer's step on rows is a step of the whole; can only refuse.

Stand-ins take steps with gradients of many kinds and scales: all together and each alone, then each whole and in
pieces, as ranks have them. A difference proves that the optimizer couples what ranks have apart. No difference proves
nothing: an optimizer may do other things after more steps, or with other gradients.
"""

from __future__ import annotations

import random
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thunder_zero.runtime.gradients_to_try import gradient_of, start_of
from thunder_zero.runtime.optimizers import hyper_parameters, without_hooks
from thunder_zero.runtime.stand_ins import (
    NO_CHANGES,
    attributes_of,
    described,
    in_words,
    is_data,
    late_counts,
    options_of,
    same_optimizer,
)
from thunder_zero.runtime.trial import NoCollectives, Piece, Seed, Team, first_difference, unseeded

SIDE, ELEMENTS = 144, 1 << 15  # the most that a stand-in has: rows or columns (some classes differ from 128), elements
SIDE_TOGETHER = 32  # where stand-ins step together, which hardly depends on their sizes
KINDS = 16  # of parameters that are tried: by shape and options
SOON = 4  # steps: what an optimizer would do only after more of them, it does after so many in a second trial


class Coupling(Enum):
    """What an optimizer's step couples, as far as the probe sees."""

    NOTHING = "steps each row alone"
    ELEMENTS = "couples elements of one parameter"
    PARAMETERS = "couples parameters"
    RANDOM = "draws random numbers"
    UNKNOWN = "cannot be probed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the probe found.

    Attributes:
        coupling: what is coupled.
        evidence: what differed, by how much; or why the optimizer cannot be probed. Empty if nothing is coupled.
        moved_options: of groups; those that steps change, such as counts.
        moved_attributes: those that steps change.
    """

    coupling: Coupling
    evidence: str = ""
    moved_options: frozenset[str] = field(default=frozenset(), compare=False)
    moved_attributes: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, eq=False, slots=True)
class Subject:
    """A parameter that the optimizer steps.

    Attributes:
        group: the number of its group.
        shape: of the whole parameter.
        sharded: whether ranks have rows of it.
        name: in its group, if the group has names.
        marks: attributes that the user, or a library, has set on it.
    """

    group: int
    shape: tuple[int, ...]
    sharded: bool
    name: str | None = None
    marks: Mapping[str, Any] = field(default_factory=dict)


_verdicts: weakref.WeakKeyDictionary[type[Optimizer], dict[str, Verdict]] = weakref.WeakKeyDictionary()


def probe(optimizer: Optimizer, subjects: Sequence[Subject], device: torch.device) -> Verdict:
    """Try an optimizer's class with its options, once a process; the same on every rank that has the same options.

    The optimizer, its parameters and the random state stay as they are.

    Args:
        optimizer: is not stepped itself.
        subjects: its parameters, in its order.
        device: where its parameters are.
    """
    if found := _uncopied(optimizer, subjects):
        return Verdict(Coupling.UNKNOWN, found)
    kinds = _kinds(optimizer, subjects)
    options = [options_of(optimizer, number) for number in sorted({kind.group for kind in kinds})]
    attributes = in_words(attributes_of(optimizer))
    twice = len(subjects) > len(kinds)
    key = f"{described((optimizer.defaults, options, attributes, kinds, twice))} {device}"
    known = _verdicts.setdefault(type(optimizer), {})
    if key not in known:
        known[key] = _Probe(optimizer, kinds, device, twice).verdict()
    return known[key]


def moves_without_gradients(optimizer: Optimizer, subjects: Sequence[Subject], device: torch.device) -> bool:
    """Whether an optimizer moves parameters that have no gradient; False if that cannot be tried.

    Args:
        optimizer, subjects, device: as for :func:`probe`.
    """
    if _uncopied(optimizer, subjects):
        return False
    kinds = [replace(kind, shape=capped(kind.shape, SIDE_TOGETHER)) for kind in _kinds(optimizer, subjects)]
    tried = _Probe(optimizer, kinds, device, twice=False)
    no_collectives: Any = NoCollectives  # torch's constructor has no types
    with undisturbed(device), no_collectives():
        try:
            team = tried.team_of_all(kinds)
            team.step([gradient_of(0, at, param.detach(), param.detach()) for at, param in enumerate(team.params)])
            return any(bool(move.any()) for move in team.step(None))
        except Exception:
            return False


def _uncopied(optimizer: Optimizer, subjects: Sequence[Subject]) -> str:
    """Why stand-ins cannot have the options of groups and attributes of parameters; empty if they can."""
    marks = (("attribute", "parameter", *item) for subject in subjects for item in subject.marks.items())
    groups = (hyper_parameters(group) for group in optimizer.param_groups)
    options = (("option", "group", *item) for group in groups for item in group.items())
    for what, of, name, value in (*marks, *options):
        if not is_data(value) and (what == "attribute" or not isinstance(value, Tensor)):
            return f"the {what} {name!r} of a {of} is a {type(value).__name__}, and is not copied"
    return ""


def _kinds(optimizer: Optimizer, subjects: Sequence[Subject]) -> list[Subject]:
    """Parameters of which no two look alike: of those with the same options, marks and number of dimensions the
    largest, then of each the next one, and so on, up to KINDS."""
    families: defaultdict[object, dict[object, Subject]] = defaultdict(dict)
    of_groups = [options_of(optimizer, number).items() for number in range(len(optimizer.param_groups))]
    for subject in sorted(subjects, key=lambda subject: -prod(subject.shape)):
        options = of_groups[subject.group]
        switches = [(name, bool(value) if isinstance(value, float) else value) for name, value in options]
        family = families[described((switches, subject.marks)), len(subject.shape)]
        if prod(subject.shape):
            family.setdefault((subject.shape, subject.sharded, _role(subject.name)), subject)
    in_turn = zip_longest(*(family.values() for family in families.values()))
    return [subject for turn in in_turn for subject in turn if subject is not None][:KINDS]


def _role(name: str | None) -> str:
    """A name without numbers: layers have the same."""
    return "".join(char for char in name or "" if not char.isdigit())


@dataclass(frozen=True)
class _Probe:
    """The trials of one optimizer."""

    optimizer: Optimizer
    kinds: Sequence[Subject]
    device: torch.device
    twice: bool  # the first kind has a second parameter: without it, nothing could couple two of one kind
    moved: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))  # options, attributes

    def verdict(self) -> Verdict:
        no_collectives: Any = NoCollectives  # torch's constructor has no types
        with undisturbed(self.device), no_collectives():
            try:
                found = self._with(NO_CHANGES)
                sooner = late_counts(self.optimizer, SOON)
            except Exception as error:
                return Verdict(Coupling.UNKNOWN, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
            if found is None and sooner:
                try:
                    found = self._with(sooner)
                except Exception:
                    found = None  # such options do not fit together: the first trial has to do
                if found is not None:
                    options = ", ".join(f"{name}={value}" for name, value in sooner.items())
                    found = replace(found, evidence=f"with {options} {found.evidence}")
        moved, of_optimizer = map(frozenset, self.moved)
        return replace(found or Verdict(Coupling.NOTHING), moved_options=moved, moved_attributes=of_optimizer)

    def _with(self, changes: Mapping[str, Any]) -> Verdict | None:
        """The verdict with these changes of options; None if nothing is coupled."""
        together = [*(_second(kind) for kind in self.kinds[: self.twice]), *self.kinds]
        small = [replace(kind, shape=capped(kind.shape, SIDE_TOGETHER)) for kind in together]
        alone = [[Piece(number)] for number in range(len(small))]
        if found := self._compare(small, alone, changes, Coupling.PARAMETERS):
            return found
        for kind in self.kinds:
            large = replace(kind, shape=capped(kind.shape, SIDE))
            rows = large.shape[0] if kind.sharded else 1
            cuts = sorted({1, -(-rows // 2)}) if rows > 1 else ()  # one row and the rest; halves
            pieces = [[Piece(0, *part)] for cut in cuts for part in ((0, cut), (cut, rows))]
            if pieces and (found := self._compare([large], pieces, changes, Coupling.ELEMENTS)):
                return found
        return None

    def _compare(
        self,
        kinds: Sequence[Subject],
        teams: Sequence[Sequence[Piece]],
        changes: Mapping[str, Any],
        coupling: Coupling,
    ) -> Verdict | None:
        """This coupling, if stand-ins of these kinds step otherwise where each team has an optimizer of its own."""
        whole = [Piece(number) for number in range(len(kinds))]
        if not (found := self._difference(kinds, teams, changes)):
            return None
        if not (again := self._difference(kinds, [whole], changes)):
            return Verdict(coupling, found)
        if coupling is Coupling.PARAMETERS:  # seeded alike, the first stand-in gets what it gets alone
            orders = ([kind, *kinds[:at], *kinds[at + 1 :]] for at, kind in enumerate(kinds))
            differences = (
                self._difference(order, [[Piece(0)]], changes, partial(_seed, self.device)) for order in orders
            )
            if found := next(filter(None, differences), ""):
                return Verdict(Coupling.UNKNOWN, f"it draws random numbers, and beside other stand-ins {found}")
        return Verdict(Coupling.RANDOM, again)

    def _difference(
        self,
        kinds: Sequence[Subject],
        teams: Sequence[Sequence[Piece]],
        changes: Mapping[str, Any],
        seed: Seed = unseeded,
    ) -> str:
        """What stand-ins of these kinds do otherwise where each team has an optimizer of its own; empty if nothing."""
        made = [self.team_of_all(kinds, changes, seed), *(self._team(kinds, team, changes, seed) for team in teams)]
        found = first_difference(*made, seed=seed)
        for team in made:
            self.moved[0].update(team.moved_options())
            self.moved[1].update(team.moved_attributes())
        return found

    def team_of_all(
        self, kinds: Sequence[Subject], changes: Mapping[str, Any] = NO_CHANGES, seed: Seed = unseeded
    ) -> Team:
        """Whole stand-ins of these kinds, which one optimizer steps."""
        return self._team(kinds, [Piece(number) for number in range(len(kinds))], changes, seed)

    def _team(self, kinds: Sequence[Subject], pieces: Sequence[Piece], changes: Mapping[str, Any], seed: Seed) -> Team:
        starts = [start_of(number, kind.shape, self.device) for number, kind in enumerate(kinds)]

        def make(members: Sequence[tuple[int, Tensor]]) -> Optimizer:
            seed(-1)
            for number, tensor in members:
                vars(tensor).update(kinds[number].marks)
            of_groups = [(kinds[number].group, kinds[number].name, tensor) for number, tensor in members]
            return same_optimizer(self.optimizer, of_groups, changes)

        return Team(make, starts, pieces)


def _second(kind: Subject) -> Subject:
    return kind if kind.name is None else replace(kind, name=f"{kind.name} 2")


def capped(shape: Sequence[int], side: int) -> tuple[int, ...]:
    """A shape with no side above ``side``, and at most ELEMENTS elements."""
    sides = [min(length, side) for length in shape]
    while prod(sides) > ELEMENTS:
        at = sides.index(max(sides))
        sides[at] = -(-sides[at] // 2)
    return tuple(sides)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Inside the block random numbers are the same each time; afterwards they go on as before. No warnings, and no
    hooks of all optimizers."""
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        devices = [device] if device.type == "cuda" else []
        with without_hooks(), torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _seed(device, 0)
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _seed(device: torch.device, step: int) -> None:
    """Seed all generators by the number of a step, from -1."""
    random.seed(step + 1)
    torch.default_generator.manual_seed(step + 1)
    if device.type == "cuda":
        torch.cuda.manual_seed(step + 1)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(step + 1)
