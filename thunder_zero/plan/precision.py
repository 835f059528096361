"""Dtypes of parameters and gradients: at rest, in compute, on the wire. Frozen data.

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
    """Dtypes of a module's compute and of its gradients on the wire. Shards and optimizer state keep their dtypes.

    The fields are named as in torch's ``MixedPrecisionPolicy`` (FSDP2), and ``buffer_dtype`` as in FSDP1.

    Attributes:
        param_dtype: the dtype of floating-point parameters in compute. Each rank casts its shard before the gather
            (default None: no cast).
        reduce_dtype: the dtype in which gradients are reduced. Their means are cast to the shard's dtype
            (default None: the gradient's dtype).
        output_dtype: the dtype of floating-point tensors that forward returns, also inside tuples, lists, dicts,
            OrderedDicts, named tuples and dataclasses (default None: no cast).
        buffer_dtype: the dtype of floating-point buffers, cast once when the module is sharded (default None: no cast).
        cast_forward_inputs: True to cast forward's floating-point inputs, also inside collections, to ``param_dtype``
            (default True).
        overrides: a dict from patterns of paths (``"blocks.*.norm"``, as in ``fnmatch``) to the precision of matching
            parameters and submodules; the last pattern that matches decides. A matching submodule casts its inputs to
            the override's ``param_dtype``, or to the dtype of its parameters. It casts its outputs to the override's
            ``output_dtype``, or back to the surrounding ``param_dtype``.
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
        object.__setattr__(self, "overrides", dict(self.overrides))  # a caller may change its dict
        for pattern, override in self.overrides.items():
            if not isinstance(override, MixedPrecision) or override.overrides:
                raise ValueError(
                    f"the override of {pattern!r} is {override!r}; give a thunder_zero.MixedPrecision without overrides"
                )

    def of(self, path: str) -> MixedPrecision:
        """Return the precision of a parameter, buffer or submodule, from its own or an enclosing module's override."""
        return self._override(tuple(around(path))) or self

    def border(self, path: str, dtype: torch.dtype | None) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Return the dtypes to which a module's inputs and outputs are cast; None means no cast."""
        if not path:
            return self.param_dtype if self.cast_forward_inputs else None, self.output_dtype
        override = self._override((path,))
        if override is None:
            return None, None
        inputs = (override.param_dtype or dtype) if override.cast_forward_inputs else None
        return inputs, override.output_dtype or self.param_dtype

    def _override(self, names: tuple[str, ...]) -> MixedPrecision | None:
        entries = self.overrides.items()
        matching = [override for pattern, override in entries if any(fnmatchcase(name, pattern) for name in names)]
        return matching[-1] if matching else None


def around(path: str) -> Iterator[str]:
    """Yield a path and the paths of its enclosing modules: ``a.b.c``, ``a.b``, ``a``."""
    while path:
        yield path
        path = path.rpartition(".")[0]
