"""Other entry points: ``tz.zero``, and the plugin and recipe for ``thunder.compile``.

In one line each::

    tz.zero(thunder.jit(module), stage=3)                       a function: shards a module that is jitted already
    thunder.compile(module, plugins=[tz.Zero(stage=3)], ...)    a plugin, for those who compile by thunder.compile
    thunder.jit(module, transforms=[tz.ZeroTransform(tz.ZERO3)])  ZERO1, ZERO2, ZERO3, DDP: policies, for each of them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from thunder_zero.compat import thunder as room
from thunder_zero.frontends.arguments import Arguments, check_arguments
from thunder_zero.frontends.dynamo.compile import compile
from thunder_zero.frontends.dynamo.module import DynamoModule
from thunder_zero.frontends.refusals import require_untransformed
from thunder_zero.frontends.transform import ZeroTransform
from thunder_zero.plan.policy import Policy

from thunder import Plugin, compile_stats
from thunder.core.module import ThunderModule
from thunder.core.recipe import Interpreter
from thunder.core.recipe import Recipe as ThunderRecipe
from thunder.core.transforms import add_transform
from thunder.extend import Executor


def zero(model: ThunderModule, policy: Policy | int | None = None, **arguments: Unpack[Arguments]) -> ThunderModule:
    """Shard a jitted module, in place of ``thunder.distributed.fsdp`` or ``ddp``: a function; ``Zero`` is a plugin.

    >>> model = tz.zero(thunder.jit(module), stage=3)

    Takes the same arguments as :class:`ZeroTransform`, and returns a new jitted module; use it in place of ``model``.

    Raises:
        TypeError: ``model`` is not a jitted module.
        RuntimeError: it was already called, or is already transformed; and what ZeroTransform raises.
    """
    if not isinstance(model, ThunderModule):
        raise TypeError(f"zero takes a jitted module, got {type(model).__name__}; call it on thunder.jit(module)")
    transform = ZeroTransform(policy, **arguments)
    require_untransformed(model, transform)
    if compile_stats(model).calls:
        raise RuntimeError(
            f"{type(model._model).__name__} was called before it was sharded, so its traces exist already; apply zero "
            f"right after thunder.jit"
        )
    return add_transform(model, transform=transform)


class Zero(Plugin):
    """ZeroTransform as a plugin of ``thunder.compile``: a class; ``zero`` is a function, ``ZERO1`` a policy.

    >>> model = thunder.compile(module, plugins=[tz.Zero(stage=2)], recipe=tz.Recipe())

    ``plugins="zero1"``, ``"zero2"`` or ``"zero3"`` selects it by name. Takes the same arguments as
    :class:`ZeroTransform`.
    """

    def __init__(self, policy: Policy | int | None = None, **arguments: Unpack[Arguments]) -> None:
        check_arguments(policy, **arguments)  # refuse bad arguments now, not when a module is compiled
        self._policy, self._arguments = policy, arguments

    def setup_transforms(self) -> list[ZeroTransform]:
        """A new transform for each module that is compiled."""
        return [ZeroTransform(self._policy, **self._arguments)]

    def capture(self, module: nn.Module, executors: Sequence[Executor]) -> DynamoModule:
        """The module as :func:`thunder_zero.compile` makes it."""
        return compile(module, self._policy, executors=executors, **self._arguments)


class Recipe(ThunderRecipe):
    """Thunder's default executors, on any machine, behind ours for attention and convolutions.

    Args:
        interpreter: ``"thunder.jit"``, or ``"thunder.fx"`` for dynamo (:func:`~thunder_zero.compile`).

    Raises:
        ValueError: another interpreter.
    """

    def __init__(self, interpreter: str | Interpreter = Interpreter.THUNDER_JIT) -> None:
        super().__init__(plugins=None, interpreter=interpreter)

    def setup_executors(self) -> list[Executor]:
        """Thunder's default executors, behind ours for attention and convolutions."""
        return room.default_executors()

    def add_plugins(self, plugins: list[Plugin]) -> None:
        """Replace the plugins: a recipe used for a second module must not keep those of the first."""
        self.plugins = list(plugins)

    def apply(self, model: nn.Module) -> nn.Module:
        """Compile a module.

        Raises:
            TypeError: with dynamo, plugins other than one Zero, which would not reach the graphs.
        """
        if self.interpreter is Interpreter.THUNDER_JIT:
            compiled: nn.Module = super().apply(model)
            return compiled
        zeros = [plugin for plugin in self.plugins if isinstance(plugin, Zero)]
        if len(zeros) != 1 or len(self.plugins) != 1:
            given = ", ".join(type(plugin).__name__ for plugin in self.plugins) or "none"
            raise TypeError(
                f"thunder_zero.Recipe(interpreter='thunder.fx') takes one plugin, thunder_zero.Zero, and was given "
                f"{given}; leave the others out, or use thunder_zero.Recipe()"
            )
        usual = room.default_executors()  # for Thunder's operators, which the graphs do not have
        return zeros[0].capture(model, [executor for executor in self.setup_executors() if executor not in usual])
