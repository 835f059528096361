"""``tz.compile``: shards a module, and trains what dynamo captures of it."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import nn

from thunder_zero.comm import agree
from thunder_zero.comm.group import Ranks, has_groups, ranks_of
from thunder_zero.comm.slices import slices_of
from thunder_zero.compat.uncapturable import RefusedPart
from thunder_zero.frontends.arguments import Arguments
from thunder_zero.frontends.dynamo.module import DynamoModule
from thunder_zero.frontends.placement import Check, intact
from thunder_zero.frontends.refusals import PARTS
from thunder_zero.frontends.transform import ZeroTransform, transforming
from thunder_zero.frontends.zero_module import adopt
from thunder_zero.plan.policy import Policy

import thunder
from thunder.core.module import ThunderModule

Fuser = Literal["inductor"]


class DynamoTransform(ZeroTransform):
    """Shards a module whose forward dynamo captures; takes the arguments of :func:`compile`."""

    def __init__(
        self, policy: Policy | int | None, *, fuse: Fuser | None, dynamic: bool | None, **arguments: Unpack[Arguments]
    ) -> None:
        super().__init__(policy, **arguments)
        self._dynamic, self._fuses = dynamic, fuse is not None

    def parts(self) -> tuple[RefusedPart, ...]:
        return PARTS

    def _slices(self, module: nn.Module, ranks: Ranks) -> dict[str, int]:
        return slices_of(module, ranks)

    def _adopt(self, model: ThunderModule) -> None:
        adopt(model, DynamoModule, self._state, self._given.progress)
        model.capture(dynamic=self._dynamic, fuses=self._fuses)

    def _checks(self, model: ThunderModule) -> list[Check]:
        """Without those of what dynamo guards."""
        return intact(model, self._state)


def require_known(fuse: object) -> None:
    """Refuse another fuser than inductor."""
    if fuse not in (None, "inductor"):
        raise ValueError(
            f"fuse is {fuse!r}; choose 'inductor', which compiles the operators between two lines of the schedule, or "
            f"None, by which torch computes each; executors of Thunder are for thunder.jit"
        )


def compile(
    module: nn.Module,
    policy: Policy | int | None = None,
    *,
    fuse: Fuser | None = None,
    dynamic: bool | None = None,
    **arguments: Unpack[Arguments],
) -> DynamoModule:
    """Shard a module, and train PyTorch's own joint graph of it: the forward that dynamo (``torch.compile``) captures,
    with the backward that AOTAutograd traces.

    >>> model = tz.compile(AutoModelForCausalLM.from_config(config), stage=3)

    For modules that ``thunder.jit`` cannot trace, or whose Python takes it long; what the model is and does is the
    same. Where dynamo ends a graph, each part has a schedule of its own, which is proven as a whole one is: a parameter
    that two graphs read is gathered, and its gradient reduced, once for each.

    Args:
        module: a plain module.
        policy: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        fuse: "inductor" compiles the operators between two lines of the schedule, each such region into kernels that
            inductor keeps on disk: equal blocks are compiled once, and not again in the next process. It needs a C++
            compiler on the CPU, and Triton on a GPU. Default: torch computes each operator.
        dynamic: as for ``torch.compile``. None: a size, or a number that forward takes, that differs in a later call
            becomes a symbol, and one program serves all; ``torch._dynamo.mark_dynamic`` says so from the first call
            on. True: all sizes are symbols where that can be. False: each shape has a program.
        arguments: as for :class:`~thunder_zero.ZeroTransform`.

    Raises:
        ValueError, RuntimeError, TypeError: as ZeroTransform does. When the model is called, RuntimeError: a parameter
            is read outside of every graph.
    """
    if not isinstance(module, nn.Module) or isinstance(module, ThunderModule):
        raise TypeError(f"compile takes a plain torch module, got {type(module).__name__}; pass the module itself")
    try:
        require_known(fuse)
        transform = DynamoTransform(policy, fuse=fuse, dynamic=dynamic, **arguments)
    except (TypeError, ValueError):
        if has_groups():
            _refuse_with_all(module, **arguments)
        raise
    model: DynamoModule = thunder.jit(module, transforms=[transform])
    return model


def _refuse_with_all(module: nn.Module, **arguments: Unpack[Arguments]) -> None:
    """Raise the error that is handled where the other ranks shard the module, so that all of them hear of it."""
    ranks = ranks_of(*(arguments.get(name) for name in ("process_group", "mesh", "dp_mesh_dims")))
    with transforming(module), agree.all_or_none(ranks.world):
        raise
