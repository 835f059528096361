"""A recorded step as data: lines, whose values are parts of storages, and a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from thunder_zero.spmd.collectives import Collective, Pair

SILENT = frozenset(
    ("resize_", "set_", "record_stream", "detach", "_local_scalar_dense", "item", "is_pinned", "equal", "_assert_async")
)
RANDOM = frozenset(
    (
        *("bernoulli_", "bernoulli", "rand", "randn", "rand_like", "randn_like", "native_dropout", "uniform_"),
        *("normal_", "randint", "randperm", "exponential_", "multinomial"),
    )
)


@dataclass(frozen=True)
class Ref:
    """A tensor that a line reads or writes: a part of a storage, after so many writes."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    writes: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def place(self) -> tuple[object, ...]:
        """The part of the storage, at any time."""
        return self.storage, self.offset, self.shape, self.stride


@dataclass(frozen=True)
class RecordedLine:
    """An operator that ran.

    Attributes:
        operator: an overload, such as ``torch.ops.aten.mm.default``.
        args, kwargs: its arguments, with ``Ref`` in place of tensors.
        inputs: the tensors among its arguments.
        changes: the positions among the inputs of those that it changes in place.
        written: the changed inputs after the line.
        results: its new outputs.
        fresh: the inputs that no line before has written or read.
        where: the user's line, such as ``"train.py:12: loss.backward()"``.
        backward: whether a backward ran.
        collective: its group and reduction, if it is a collective.
        module: the ``id`` of the module that computes, or whose backward runs; 0 outside of modules.
        tracked: the storages of inputs that require a gradient.
        differentiates: whether autograd recorded the line.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Ref, ...]
    changes: tuple[int, ...]
    written: tuple[Ref, ...]
    results: tuple[Ref, ...]
    where: str
    backward: bool
    fresh: tuple[Ref, ...] = ()
    collective: Collective | None = None
    module: int = 0
    tracked: frozenset[int] = frozenset()
    differentiates: bool = False

    @property
    def name(self) -> str:
        return str(self.operator.overloadpacket.__name__)

    @property
    def read(self) -> tuple[Ref, ...]:
        """The inputs but for those that the line only fills, by ``copy_`` or as ``out=``."""
        if self.name.endswith("_") and self.name != "copy_":
            return self.inputs
        return tuple(item for index, item in enumerate(self.inputs) if index not in self.changes)

    @property
    def pairs(self) -> list[Pair]:
        """The inputs and outputs of a collective, which may consist of several."""
        if self.collective is None:
            return []
        return self.collective.pairs(self.operator, self.args, self.kwargs, self.results)

    @property
    def is_view(self) -> bool:
        """True if all outputs are parts of inputs that the line does not change, as FSDP2's copy into a bucket does."""
        storages, is_copy = {item.storage for item in self.inputs}, self.operator.namespace == "fsdp"
        return (
            bool(self.results)
            and not (self.written or is_copy)
            and all(ref.storage in storages for ref in self.results)
        )


@dataclass(frozen=True)
class Parameter:
    """A parameter, or a gradient, of the model: its part on this rank, and how it is placed on the mesh's axes.

    ``placements`` maps axes to the dimension of a slice, ``"replicate"`` or ``"partial"``. ``line`` is the number of
    lines that ran before an optimizer read the gradient. ``pieces`` are those of packed slices, by axis. ``first`` is
    the storage of a parameter at the first forward.
    """

    path: str
    ref: Ref
    placements: Mapping[str, int | str]
    line: int = 0
    pieces: Mapping[str, int] = field(default_factory=dict)
    first: int = -1


@dataclass(frozen=True)
class Shadow:
    """One line, as another rank ran it: what decides whether the ranks differ."""

    name: str
    scalars: tuple[Any, ...]
    offsets: tuple[int, ...]
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    fresh: tuple[tuple[tuple[int, ...], str], ...] = ()  # shapes and digests
    drawn: tuple[str, ...] = ()  # digests of random numbers
    numbers: tuple[float, ...] = ()  # the outputs, or what Python reads; 0 in place of those with dimensions


@dataclass(frozen=True)
class StepRecord:
    """A step on one rank.

    Attributes:
        axes: the axes of the mesh and their numbers of ranks.
        lines: the operators that ran.
        shadows: what decides, for each line, whether another rank differs.
        values: copies of what the lines read.
        parameters, gradients, buffers: of the model.
        slices: gathered parameters of FSDP2, with their placements on the other axes.
        equalised: storages that a collective made equal before the first forward.
        loss: the scalar from which backward started.
        stepped: the parameters that an optimizer stepped.
        foreign: how many tensors an optimizer stepped that are no parameters of the model.
        sizes: changes of storages, as (lines that ran before, storage, bytes from now on). 0 bytes are freed.
        units: the block of each module, keyed by the module's ``id``.
    """

    axes: Mapping[str, int]
    lines: tuple[RecordedLine, ...] = ()
    shadows: tuple[Shadow, ...] = ()
    values: Mapping[Ref, Tensor] = field(default_factory=dict, repr=False)
    parameters: tuple[Parameter, ...] = ()
    gradients: tuple[Parameter, ...] = ()
    buffers: tuple[Parameter, ...] = ()
    slices: tuple[Parameter, ...] = ()
    equalised: frozenset[int] = frozenset()
    loss: Ref | None = None
    stepped: frozenset[str] = frozenset()
    foreign: int = 0
    sizes: tuple[tuple[int, int, int], ...] = ()
    units: Mapping[int, str] = field(default_factory=dict)

    def for_other_ranks(self) -> StepRecord:
        """Return what types on other ranks need, which processes can send."""
        return StepRecord(self.axes, shadows=self.shadows, parameters=self.parameters, stepped=self.stepped)

    @property
    def gradients_by_line(self) -> dict[int, list[Parameter]]:
        """The gradients, by the number of lines that ran before an optimizer, or the end, reads them."""
        result: dict[int, list[Parameter]] = {}
        for item in self.gradients:
            result.setdefault(item.line, []).append(item)
        return result


def shadow_of(line: RecordedLine, outputs: Iterable[Ref]) -> Shadow:
    """Return what of a line decides whether ranks differ, but for its values."""
    return Shadow(
        str(line.operator),
        tuple(item for item in tree_leaves((line.args, line.kwargs)) if isinstance(item, int | float)),
        tuple(item.offset for item in line.inputs),
        tuple((item.offset, item.shape) for item in outputs),
    )
