"""Other entry points: ``tz.zero``, and the plugin and recipe for ``thunder.compile``.

In one line each::

    tz.zero(thunder.jit(module), stage=3)                       a function: shards a module that is jitted already
    thunder.compile(module, plugins=[tz.Zero(stage=3)], ...)    a plugin, for those who compile by thunder.compile
    thunder.jit(module, transforms=[tz.ZeroTransform(tz.ZERO3)])  ZERO1, ZERO2, ZERO3, DDP: policies, for each of them
"""

from __future__ import annotations

from typing import Unpack

from thunder_zero.compat import thunder as room
from thunder_zero.compat.jitted import plain_of
from thunder_zero.frontends.arguments import Arguments, check_arguments
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
            f"{type(plain_of(model)).__name__} was called before it was sharded, so its traces exist already; apply "
            f"zero right after thunder.jit"
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


class Recipe(ThunderRecipe):
    """Thunder's default executors, on any machine, behind ours for attention and convolutions.

    Raises:
        ValueError: another interpreter than ``"thunder.jit"``.
    """

    def __init__(self, interpreter: str | Interpreter = Interpreter.THUNDER_JIT) -> None:
        super().__init__(plugins=None, interpreter=interpreter)
        if self.interpreter is not Interpreter.THUNDER_JIT:
            raise ValueError(
                f"thunder_zero.Recipe is for thunder.jit, and was given interpreter={interpreter!r}; "
                f"thunder_zero.compile(module, ...) lets dynamo capture the module"
            )

    def setup_executors(self) -> list[Executor]:
        """Thunder's default executors, behind ours for attention and convolutions."""
        return room.default_executors()

    def add_plugins(self, plugins: list[Plugin]) -> None:
        """Replace the plugins: a recipe used for a second module must not keep those of the first."""
        self.plugins = list(plugins)
