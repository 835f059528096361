"""DDP and ZeRO-1/2/3 for Lightning Thunder, as traces that can be read. Import before Thunder.

A tour, with ``import thunder_zero as tz``:

tz.compile(module, stage=3)                     shard a module and train it: forward, backward, any optimizer
thunder.jit(module, transforms=[ZeroTransform(stage=3)])   the same, beside transforms of your own
tz.Policy(stage, prefetch=..., recompute=...)   all options; DDP, ZERO1, ZERO2, ZERO3 are ready-made policies
tz.clip_grad_norm_, tz.whole, tz.EMA            gradients, optimizers and averages over all ranks
tz.save, tz.load, tz.full_state_dict            checkpoints for any number of ranks; the plain module's state dict
tz.full_parameters, tz.save_pretrained          the full weights inside a block; a Hugging Face folder
tz.trace(module, x, world_size=8)               trace one rank in one process; tz.traces_of(model): the traces that ran
tz.print_trace(model), tz.explain(model, path)  what each line does; what happens to one parameter, and why
tz.tools.plan_training, fit, memory, estimate   forecast which stage fits, its bytes and its time
help(tz.Policy), docs/reference.md              each field with its default; each name with an example
"""

from functools import partial
from typing import TYPE_CHECKING

from thunder_zero.compat.imports import let_thunder_import
from thunder_zero.lazy import lazy

if TYPE_CHECKING:  # the public names, which are imported when they are first used
    from thunder_zero import schedule as schedule
    from thunder_zero import tools as tools
    from thunder_zero.capture.plugin import Recipe as Recipe
    from thunder_zero.capture.plugin import Zero as Zero
    from thunder_zero.capture.plugin import zero as zero
    from thunder_zero.capture.transform import ZeroTransform as ZeroTransform
    from thunder_zero.capture.transform import compile as compile
    from thunder_zero.capture.zero_module import ZeroModule as ZeroModule
    from thunder_zero.capture.zero_module import traces_of as traces_of
    from thunder_zero.checkpoint.hugging_face import save_pretrained as save_pretrained
    from thunder_zero.checkpoint.load import Loaded as Loaded
    from thunder_zero.checkpoint.load import load as load
    from thunder_zero.checkpoint.save import save as save
    from thunder_zero.encodings.int8 import Int8 as Int8
    from thunder_zero.encodings.nf4 import NF4 as NF4
    from thunder_zero.optim.ema import EMA as EMA
    from thunder_zero.optim.global_numbers import clip_grad_norm_ as clip_grad_norm_
    from thunder_zero.optim.global_numbers import global_mean as global_mean
    from thunder_zero.optim.optimizer import whole as whole
    from thunder_zero.outer.diloco import DiLoCo as DiLoCo
    from thunder_zero.outer.store import sites as sites
    from thunder_zero.plan.outer import Outer as Outer
    from thunder_zero.plan.policy import DDP as DDP
    from thunder_zero.plan.policy import ZERO1 as ZERO1
    from thunder_zero.plan.policy import ZERO2 as ZERO2
    from thunder_zero.plan.policy import ZERO3 as ZERO3
    from thunder_zero.plan.policy import Policy as Policy
    from thunder_zero.plan.precision import MixedPrecision as MixedPrecision
    from thunder_zero.sharded.full_parameters import full_parameters as full_parameters
    from thunder_zero.sharded.full_state_dict import full_state_dict as full_state_dict
    from thunder_zero.shares import ShareSampler as ShareSampler
    from thunder_zero.shares import shares_of as shares_of
    from thunder_zero.tools.dry_run import trace as trace
    from thunder_zero.tools.views.explain import explain as explain
    from thunder_zero.tools.views.print_trace import print_trace as print_trace

__version__ = "0.1.0"

look_up, list_names, __all__ = lazy(__name__)

if not TYPE_CHECKING:  # so that a type checker reports a name that does not exist
    __getattr__, __dir__ = look_up, list_names


def _register_plugins() -> None:
    """Let ``thunder.compile(module, plugins="zero3")`` find the plugins by name."""
    from thunder.plugins import register_plugin

    for stage in (1, 2, 3):
        register_plugin(f"zero{stage}", partial(_plugin, stage))


def _plugin(stage: int) -> "Zero":
    from thunder_zero.capture.plugin import Zero

    return Zero(stage=stage)


let_thunder_import(_register_plugins)
