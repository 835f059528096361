"""``tz.compile``: shards a module, and trains the graphs that dynamo captures."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import nn

from thunder_zero.comm import agree
from thunder_zero.comm.group import Ranks, has_groups, ranks_of
from thunder_zero.comm.slices import slices_of
from thunder_zero.compat.uncapturable import RefusedPart
from thunder_zero.frontends.arguments import Arguments
from thunder_zero.frontends.dynamo.module import DynamoModule
from thunder_zero.frontends.placement import Check, module_checks
from thunder_zero.frontends.refusals import PARTS
from thunder_zero.frontends.transform import ZeroTransform, transforming
from thunder_zero.frontends.zero_module import adopt
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import Policy

import thunder
from thunder.core.module import ThunderModule

Fuser = Literal["inductor"]


class DynamoTransform(ZeroTransform):
    """A ZeroTransform for a module whose forward dynamo captures, with the arguments of :func:`compile`."""

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
        adopt(model, DynamoModule, self._state, self._arguments.progress)
        model.capture(dynamic=self._dynamic, fuses=self._fuses)

    def _take_plan(self, plan: Plan) -> None:
        """Do nothing: programs take the plan of the model's state."""

    def _make_checks(self, model: ThunderModule) -> list[Check]:
        return module_checks(model, self._state)  # dynamo guards hooks and buffers that are None


def require_known(fuse: object) -> None:
    """Raise ValueError if ``fuse`` names another fuser than inductor."""
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
    """Shard a module, and train PyTorch's joint graph of it.

    >>> model = tz.compile(AutoModelForCausalLM.from_config(config), stage=3)

    Dynamo (``torch.compile``) captures forward, and AOTAutograd traces its backward. Use it for modules that
    ``thunder.jit`` cannot trace, or traces slowly. If dynamo breaks forward into several graphs, each graph has its own
    proved schedule. A parameter that two graphs read is gathered and reduced once for each graph.

    Args:
        module: a plain module.
        policy: a :class:`~thunder_zero.Policy`, or a stage 0-3.
        fuse: "inductor" to compile the operators between two lines of the schedule into kernels. Equal regions are
            compiled once, and inductor keeps its kernels on disk for the next process. This needs a C++ compiler on the
            CPU, and Triton on a GPU. By default torch runs each operator on its own.
        dynamic: see ``torch.compile``. None: a size or number that changes in a later call becomes a symbol, and one
            program serves all its values. ``torch._dynamo.mark_dynamic`` makes a size a symbol from the first call on.
            True: all sizes are symbols where possible. False: each shape has a program.
        arguments: see :class:`~thunder_zero.ZeroTransform`.

    Raises:
        ValueError, RuntimeError, TypeError: see ZeroTransform. Calls of the model raise RuntimeError if a parameter is
            read outside of every graph.
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
    """Raise the current error inside the collective in which other ranks shard the module, so that all ranks raise."""
    ranks = ranks_of(*(arguments.get(name) for name in ("process_group", "mesh", "dp_mesh_dims")))
    with transforming(module), agree.all_or_none(ranks.world):
        raise
