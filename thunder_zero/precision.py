"""Which dtype what has: at rest, in compute, on its way. Frozen data.

::

    shard float32 --cast--> param_dtype --gather--> compute --> gradient in param_dtype
    .grad float32 <--cast-- mean in reduce_dtype <--reduce-- cast to reduce_dtype <--'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """In which dtypes a module computes and its gradients travel; shards and optimizer state keep theirs.

    The fields are those of torch's ``MixedPrecisionPolicy`` (FSDP2), with ``buffer_dtype`` of FSDP1.

    Attributes:
        param_dtype: floating-point parameters are cast to it, shard by shard, before they are gathered, and compute
            runs in it (default None: as they are).
        reduce_dtype: gradients are cast to it before they are reduced, and their means to the shard's dtype
            (default None: the dtype that the gradient has).
        output_dtype: floating-point tensors that forward returns, also in tuples, lists, dicts and dataclasses, are
            cast to it (default None: as they are).
        buffer_dtype: floating-point buffers are cast to it once, when the module is transformed (default None).
        cast_forward_inputs: floating-point tensors given to forward, found in the same way, are cast to
            ``param_dtype`` (default True).
        overrides: by pattern of a parameter's or a submodule's path (``"blocks.*.norm"``, as ``fnmatch`` has it),
            what holds for it instead; the last pattern that fits decides. A submodule that a pattern names computes by
            itself: its inputs are cast to its entry's ``param_dtype``, or to the dtype that it has, and its outputs to
            ``output_dtype``, or back to the ``param_dtype`` around it.

    Raises:
        ValueError: a field that is no such dtype, or an override that has overrides itself.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    overrides: Mapping[str, MixedPrecision] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise ValueError(f"{name} is {value!r}; give one of {', '.join(map(str, DTYPES))}, or None")
        if not isinstance(self.cast_forward_inputs, bool):
            raise ValueError(f"cast_forward_inputs is {self.cast_forward_inputs!r}; give True or False")
        if not isinstance(self.overrides, Mapping):
            raise ValueError(f"overrides is {self.overrides!r}; give a dict of patterns and MixedPrecision")
        object.__setattr__(self, "overrides", dict(self.overrides))  # its own, which nobody changes
        for pattern, other in self.overrides.items():
            if not isinstance(other, MixedPrecision) or other.overrides:
                raise ValueError(
                    f"the override of {pattern!r} is {other!r}; give a thunder_zero.MixedPrecision without overrides"
                )

    def of(self, path: str) -> MixedPrecision:
        """What holds for a parameter, buffer or submodule: its own entry, or that of a module around it."""
        return self._override(tuple(_around(path))) or self

    def border(self, path: str, own: torch.dtype | None) -> tuple[torch.dtype | None, torch.dtype | None]:
        """What a module's inputs and its outputs are cast to; None: they stay.

        Args:
            path: of the whole module (""), or of a submodule; nothing is cast where no override names it.
            own: dtype of the submodule's parameters.
        """
        if not path:
            return self.param_dtype if self.cast_forward_inputs else None, self.output_dtype
        inside = self._override((path,))
        if inside is None:
            return None, None
        inputs = (inside.param_dtype or own) if inside.cast_forward_inputs else None
        return inputs, inside.output_dtype or self.param_dtype

    def _override(self, names: tuple[str, ...]) -> MixedPrecision | None:
        """The last entry whose pattern fits one of these names."""
        entries = self.overrides.items()
        fitting = [other for pattern, other in entries if any(fnmatchcase(name, pattern) for name in names)]
        return fitting[-1] if fitting else None


def _around(path: str) -> Iterator[str]:
    """The path and those of the modules around it: ``a.b.c``, ``a.b``, ``a``."""
    while path:
        yield path
        path = path.rpartition(".")[0]
