"""Other entry points: ``tz.zero``, and the plugin and recipe for ``thunder.compile``."""

from __future__ import annotations

from typing import Unpack

from thunder_zero.capture.arguments import Arguments, check_arguments
from thunder_zero.capture.refusals import require_untransformed
from thunder_zero.capture.transform import ZeroTransform
from thunder_zero.compat.jitted import plain_of
from thunder_zero.plan.policy import Policy

from thunder import Plugin, compile_stats
from thunder.core.module import ThunderModule
from thunder.core.recipe import Interpreter
from thunder.core.recipe import Recipe as ThunderRecipe
from thunder.core.transforms import add_transform


def zero(model: ThunderModule, policy: Policy | int | None = None, **arguments: Unpack[Arguments]) -> ThunderModule:
    """Shard a jitted module, in place of ``thunder.distributed.fsdp`` or ``ddp``.

    >>> model = tz.zero(thunder.jit(module), stage=3)

    Use the returned module instead of ``model``, which must not have been called. See :class:`ZeroTransform` for the
    arguments and the errors.
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
    """ZeroTransform as a plugin of ``thunder.compile``.

    >>> model = thunder.compile(module, plugins=[tz.Zero(stage=2)], recipe=tz.Recipe())

    ``plugins="zero1"``, ``"zero2"`` or ``"zero3"`` selects the plugin by name. See
    :class:`ZeroTransform` for the arguments.
    """

    def __init__(self, policy: Policy | int | None = None, **arguments: Unpack[Arguments]) -> None:
        check_arguments(policy, **arguments)  # refuse bad arguments now, not when a module is compiled
        self._policy, self._arguments = policy, arguments

    def setup_transforms(self) -> list[ZeroTransform]:
        """Return a new transform, since a transform shards one module only."""
        return [ZeroTransform(self._policy, **self._arguments)]


class Recipe(ThunderRecipe):
    """A recipe for any machine, without the fuser of Thunder's own recipe, which needs nvFuser."""

    def __init__(self, interpreter: str | Interpreter = Interpreter.THUNDER_JIT) -> None:
        super().__init__(plugins=None, interpreter=interpreter)
        if self.interpreter is not Interpreter.THUNDER_JIT:
            raise ValueError(
                f"thunder_zero.Recipe is for thunder.jit, and was given interpreter={interpreter!r}; "
                f"leave it out: dynamo captures a sharded module with any recipe"
            )

    def add_plugins(self, plugins: list[Plugin]) -> None:
        """Replace the plugins, so that a recipe for a second module does not keep the plugins of the first module."""
        self.plugins = list(plugins)
