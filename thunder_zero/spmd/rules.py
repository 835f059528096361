"""What an operator does to the types of values: a few rules, and experiments for all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from thunder_zero.compat.torch.recording import in_float64
from thunder_zero.spmd.laws import Experiment, N, Outcome, P, R, Rerun, V, X, as_slices, filled, halves, has, letters
from thunder_zero.spmd.lines import RANDOM, RecordedLine, Ref, Shadow
from thunder_zero.spmd.regions import Region, are_typed, as_one, sum_of_gathered
from thunder_zero.spmd.storages import TypedStorages
from thunder_zero.spmd.tape import argument_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


COPIES = _words("clone _to_copy lift_fresh_copy contiguous")
MOVES = COPIES | _words(
    "copy_ cat stack split_with_sizes_copy chunk_cat _chunk_cat constant_pad_nd _foreach_copy_ copy repeat roll flip "
    "all_gather_copy_in"
)
CONSTANTS = _words("zero_ fill_ _foreach_zero_ empty zeros ones full")
RANGES = _words("arange linspace")
LOOKUPS = _words("embedding gather index index_select take_along_dim")
SELECTIONS = _words("index masked_select nonzero")  # by a mask: their shape depends on the data
SCATTERS = _words(
    "embedding_dense_backward scatter scatter_add index_put_ index_put scatter_ scatter_add_ gather_backward"
)
PARTS_OF_BACKWARD = _words("slice_backward select_backward")
SUMS = _words("add add_ sub sub_ rsub")
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
FACTORS = _words(f"mul mul_ div div_ _foreach_mul_ _foreach_div_ _foreach_mul _foreach_div {UNSCALE}")

REPEATS = 6  # of a region's experiment, with other values: a law may hold by chance for a single row

Memo = dict[bytes, list[Outcome] | str]  # outcomes of experiments, or why they failed; equal lines are typed once
Targets = Sequence[Ref]


def is_constant(name: str) -> bool:
    """Return whether an operator writes the same values on all ranks, whatever it reads."""
    return name in CONSTANTS or name.endswith("_like") or name.startswith("new_")


def averages(line: RecordedLine) -> bool:
    """Return whether a line is a mean, such as that of a loss."""
    return line.name == "mean" or (_reduction(line) == 1 and not line.backward)


def _reduction(line: RecordedLine) -> Any:
    """Return how a loss sums over its elements: 0 for not, 1 for a mean and 2 for a sum; None for other operators."""
    return argument_of(line.operator, line.args, line.kwargs, "reduction")


class Rules:
    """Types what operators write on one axis.

    Args:
        values: the values that lines read.
        codes_of: returns the codes of an input.
        types: what is known of each storage.
        size: the axis' number of ranks.
        batches_differ: whether its ranks have batches of their own.
        memo: outcomes of earlier experiments.
    """

    def __init__(
        self,
        values: Mapping[Ref, Tensor],
        codes_of: Callable[[Ref], Tensor],
        types: TypedStorages,
        size: int,
        *,
        batches_differ: bool,
        memo: Memo,
    ) -> None:
        self._values, self._codes_of, self._types = values, codes_of, types
        self._size, self._batches_differ, self._memo = size, batches_differ, memo

    def outcomes(
        self,
        line: RecordedLine,
        targets: Targets,
        mine: Shadow,
        theirs: Shadow,
        numbers: tuple[Any, ...] | None,
        *,
        is_routed: bool,
    ) -> list[Outcome]:
        """Return the outcome of each tensor that a line writes, which the neighbour ran as ``theirs``.

        ``numbers`` are those of the neighbour's line, if they differ. With ``is_routed``, indices or masks among its
        inputs follow from the values of this rank's part.
        """
        name, codes = line.name, [self._codes_of(item).clone() for item in line.inputs]
        alike = numbers is None and not any(item.any() for item in codes)
        is_like_parameter = bool(line.inputs) and all(self._types[ref].is_learned for ref in line.inputs) and alike
        draws_differ = theirs.drawn != mine.drawn or (self._batches_differ and not is_like_parameter)
        if line.backward and numbers is not None and shapes_of(mine) != shapes_of(theirs):
            return _unknown(f"the sizes of {name} differ between the ranks", targets)
        if numbers is not None and (name in RANGES or self._shifts_range(line, numbers)):
            return [Outcome(halves(ref.shape)) for ref in targets]
        if name in RANDOM and (draws_differ or not line.inputs or name.endswith("_")):
            return [Outcome(_drawn(name, codes, ref) if draws_differ else filled(ref.shape, R)) for ref in targets]
        if is_constant(name) or alike:
            return [Outcome(filled(ref.shape, R)) for ref in targets]
        if name in MOVES:
            return [Outcome(item) for item in self._moved(line, targets)]
        is_root = name == "sqrt" or (name == "pow" and line.args[1] == 0.5)
        if is_root and has(codes[0], P) and set(letters(codes[0])) <= set("P+R"):
            if self._types[line.inputs[0]].is_mean:
                return [Outcome(filled(ref.shape, R), f"{name} is not linear in a share of a mean") for ref in targets]
            return [Outcome(torch.where(codes[0] == P, N, codes[0]).byte())]  # the norm of a share of a sum of squares
        if "batch_norm" in name and self._batches_differ and not any(item is False for item in line.args):
            return _batch_norm(line, codes[1 if line.backward else 0], targets)
        if is_routed:
            return [Outcome(filled(ref.shape, V)) for ref in targets]
        return self._masked(line, codes, targets, numbers) or self._experiment(line, codes, targets, numbers)

    def _shifts_range(self, line: RecordedLine, numbers: tuple[Any, ...]) -> bool:
        """Return whether a line computes consecutive numbers, as positions in a slice, that two ranks share none of."""
        values = [self._values[ref] for ref in line.inputs]
        if any(value.is_floating_point() or value.numel() < 2 for value in values):
            return False
        mine, theirs = (runner(line, numbers)(values, rank)[0].reshape(-1) for rank in (0, 1))
        are_ranges = all(bool((item.diff() == 1).all()) for item in (mine, theirs))
        return are_ranges and abs(int(mine[0]) - int(theirs[0])) >= len(mine)

    def joint_outcomes(self, region: Region, targets: Targets) -> list[Outcome] | None:
        """Return the outcomes of a region's last line, if all its lines together keep a law."""
        given, run = as_one(region)
        if any(trial.line.collective is not None for trial in region):
            return sum_of_gathered(region, self._values, targets, self._size)
        values, codes = [self._values[ref] for ref in given], next(as_slices([*given.values()]))
        name, shapes, results = region[-1].line.name, [ref.shape for ref in targets], []
        for seed in range(REPEATS):
            try:
                trial = Experiment(name, self._size, run, values, codes, seed=seed)
                outcomes = trial.outcomes(shapes)
            except Exception:
                return None
            results.append([letters(item.codes) for item in outcomes])
            if not are_typed(outcomes, targets) or results[0] != results[-1]:
                return None
        return outcomes

    def _moved(self, line: RecordedLine, targets: Targets) -> list[Tensor]:
        """Run an operator that only moves elements on their codes."""
        if line.name in COPIES:
            return [self._codes_of(line.inputs[0]).clone()]
        if line.name == "copy_":
            return [self._codes_of(line.inputs[1]).expand(line.inputs[0].shape).clone()]
        if line.name == "all_gather_copy_in":
            self._types.give(targets[0], torch.cat([self._codes_of(ref).reshape(-1) for ref in line.args[0]]))
            return [self._codes_of(ref).clone() for ref in targets]  # the second target contains the first
        args, kwargs = tree_map_only(Ref, lambda ref: self._codes_of(ref).float(), (line.args, line.kwargs))
        result = line.operator(*(args[:2] if line.name == "constant_pad_nd" else args), **kwargs)
        result = kwargs.get("out", args[0] if line.name.startswith("_foreach_copy_") else result)
        return [item.byte() for item in tree_leaves(result) if isinstance(item, Tensor)]

    def _masked(
        self, line: RecordedLine, codes: Sequence[Tensor], targets: Targets, numbers: tuple[Any, ...] | None
    ) -> list[Outcome] | None:
        """Type a look-up in this rank's part of a table, which a mask makes a share of a sum; None for other lines."""
        name = line.name
        pairs = list(zip(codes, line.inputs, strict=True))
        selects = (item for item, ref in pairs if name == "nonzero" or ref.dtype is torch.bool)
        if name in SELECTIONS and any(item.any() for item in selects):
            return _unknown(f"the shape of {name} depends on the data", targets)
        if numbers is None and not any(has(item, V) for item, ref in pairs if not ref.dtype.is_floating_point):
            return None
        if name in LOOKUPS and len(codes) > 1 and any("S" in letters(item) for item in codes):
            if self._batches_differ:  # on an axis of batches this is no slice of a vocabulary
                return _unknown(f"{name} reads items of this rank's own batch that depend on the data", targets)
            text = f"{name} in a rank's own part of a table is masked where the index belongs to other ranks"
            return [Outcome(filled(ref.shape, P), text, "assumed") for ref in targets]
        if name in SCATTERS and not targets[0].dtype.is_floating_point:
            return [Outcome(filled(ref.shape, V)) for ref in targets]
        if name in PARTS_OF_BACKWARD or (name.startswith(("index_put", "masked_fill")) and has(codes[0], P)):
            return [Outcome(filled(ref.shape, P)) for ref in targets]
        if name in SCATTERS:
            text = f"{name} into a rank's own part of a table leaves out the rows of other ranks"
            dim = 0 if name.startswith("embedding") else -1
            return [Outcome(halves(ref.shape, dim), text, "assumed") for ref in targets]
        return None

    def _experiment(
        self, line: RecordedLine, codes: list[Tensor], targets: Targets, numbers: tuple[Any, ...] | None
    ) -> list[Outcome]:
        """Run the line on two imagined ranks."""
        outcomes = self._shown(line, codes, targets, numbers)
        if not isinstance(outcomes, str) and any(item.is_error for item in outcomes):
            divided = [self._is_share(line, ref) for ref in line.inputs]
            shares = [
                filled(item.shape, P) if is_divided and not item.any() else item
                for item, is_divided in zip(codes, divided, strict=True)
            ]
            again = self._shown(line, shares, targets, numbers) if any(divided) else "no share"
            outcomes = outcomes if isinstance(again, str) or any(item.is_error for item in again) else again
        if isinstance(outcomes, str):
            return _unknown(f"{line.name} could not run again: {outcomes}", targets)
        return outcomes

    def _is_share(self, line: RecordedLine, ref: Ref) -> bool:
        """Return whether an equal value is a share, too: a bias divided by the ranks, or a penalty's gradient.

        Gradients of means are summed and divided by the ranks, also where all ranks have the same.
        """
        value = self._types[ref]
        factor = self._types.largest_factor(line.inputs)
        is_changed = any(line.inputs[index] is ref for index in line.changes)
        is_mean = self._batches_differ and not value.is_total and factor == self._size and not is_changed
        return value.is_divided or is_mean

    def _shown(
        self, line: RecordedLine, codes: list[Tensor], targets: Targets, numbers: tuple[Any, ...] | None
    ) -> list[Outcome] | str:
        """Return the outcomes of an experiment, or why it failed. Remember those of an equal line."""
        values = [self._values[ref] for ref in line.inputs]
        key = key_of(line, codes, values, numbers, self._size)
        if key not in self._memo:
            try:
                run, shapes = runner(line, numbers), [ref.shape for ref in targets]
                facts = {"ranked": numbers is not None, "counts": _reduction(line) is not None}
                for chosen in as_slices(codes):
                    trial = Experiment(line.name, self._size, run, values, chosen, **facts)
                    outcomes = trial.outcomes(shapes)
                    if not any(has(item.codes, V) for item in outcomes):
                        break
            except Exception as error:
                self._memo[key] = f"{type(error).__name__}: {str(error)[:80]}"
            else:
                pairs = zip(outcomes, targets, strict=True)
                self._memo[key] = [_still_random(item, ref, codes, numbers) for item, ref in pairs]
        return self._memo[key]


def _drawn(name: str, codes: Sequence[Tensor], ref: Ref) -> Tensor:
    """Return the codes of random numbers that differ between the ranks.

    A dropout keeps those of its input, and whole numbers are a batch, such as tokens.
    """
    if name == "randint":
        return halves(ref.shape, 0)
    alike = (item for item in codes if name == "native_dropout" and item.shape == ref.shape and item.any())
    return next(alike, filled(ref.shape, X))


def _still_random(outcome: Outcome, ref: Ref, codes: Sequence[Tensor], numbers: tuple[Any, ...] | None) -> Outcome:
    """Give what follows from random numbers alone their code, which fits any slice. A sum of them is a share.

    Indices without a law, such as those of a sort, fit none.
    """
    if has(outcome.codes, V) and not ref.dtype.is_floating_point:
        return outcome
    types = set(letters(torch.cat([item.reshape(-1) for item in codes])).split("+"))
    if numbers is None and types <= {"R", "X"} and not {"R", "P"} & set(letters(outcome.codes).split("+")):
        return Outcome(filled(outcome.codes.shape, X))
    return outcome


def _batch_norm(line: RecordedLine, codes: Tensor, targets: Targets) -> list[Outcome]:
    """Type a norm over the batch as if its statistics were those of the whole batch, and warn."""
    small = P if line.backward else R
    outcomes = [Outcome(codes if ref.shape == codes.shape else filled(ref.shape, small)) for ref in targets]
    text = f"{line.name}: each rank has the statistics of its own batch"
    return outcomes if line.backward else [replace(outcomes[0], text=text, kind="warning"), *outcomes[1:]]


def _unknown(text: str, targets: Targets) -> list[Outcome]:
    return [Outcome(filled(ref.shape, V), text, "unknown") for ref in targets]


def shapes_of(line: Shadow) -> list[tuple[int, ...]]:
    """Return the shapes of a line's outputs."""
    return [shape for _, shape in line.outputs]


def runner(line: RecordedLine, numbers: tuple[Any, ...] | None, *, in_place: bool = False) -> Rerun:
    """Return a function that runs a line with other inputs, in float64, on rank 0 or on the neighbouring rank.

    With ``in_place``, the line changes its inputs, and its outputs may be views of them.
    """
    operator = in_float64(line.operator)
    leaves, spec = tree_flatten((line.args, line.kwargs))
    leaves = [torch.float64 if isinstance(item, torch.dtype) and item.is_floating_point else item for item in leaves]

    def run(values: list[Tensor], rank: int) -> list[Tensor]:
        tensors = values if in_place else [value.clone() for value in values]
        rest, theirs = iter(tensors), iter((numbers if rank else None) or ())
        arguments = [
            next(rest) if isinstance(item, Ref) else next(theirs, item) if isinstance(item, int | float) else item
            for item in leaves
        ]
        args, kwargs = tree_unflatten(arguments, spec)
        torch.default_generator.manual_seed(5)  # torch.manual_seed formats a stack for each GPU
        result = [item for item in tree_leaves(operator(*args, **kwargs)) if isinstance(item, Tensor)]
        written = [tensors[index] for index in line.changes]
        pointers = {item.data_ptr() for item in written}
        return [*written, *(item for item in result if item.data_ptr() not in pointers)]

    return run


def key_of(
    line: RecordedLine, codes: Sequence[Tensor], values: Sequence[Tensor], numbers: tuple[Any, ...] | None, size: int
) -> bytes:
    """Return what decides the outcome of an experiment: the operator, its numbers, codes, shapes, masks and indices."""
    leaves, spec = tree_flatten((line.args, line.kwargs))
    leaves = [item for item in leaves if not isinstance(item, Ref)]
    digest = blake2b(repr((str(line.operator), leaves, numbers, size, spec)).encode())
    for code, value in zip(codes, values, strict=True):
        digest.update(repr((value.shape, value.stride(), value.dtype)).encode())
        digest.update(code.contiguous().numpy().tobytes())
        if value.is_floating_point():  # zeros and infinities are masks
            value = (value == 0).byte() + 2 * value.isinf().byte()
        elif value.is_complex():
            continue
        digest.update(value.contiguous().numpy().tobytes())
    return digest.digest()
