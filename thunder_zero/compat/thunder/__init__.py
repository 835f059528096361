"""Workarounds for Thunder's own front end, active only while it traces a model of ours.

``thunder.jit`` with ZeroTransform and ``tz.trace(frontend="thunder")`` apply these workarounds. ``tz.compile`` and a
plain ``thunder.jit`` do not. ``tracing.py`` puts lookasides and shortcuts into Thunder's tables (``patches.py``), and
removes them afterwards. Repairs and checks of lines are functions of traces::

    opaque_calls, reads, ...    during interpretation: guard values that Thunder would take for constants, or raise
    wrong_gradients             raises for some lines, before and after autodiff
    trace_repairs               repairs lines
    operators                   keeps an operator of torch one line in each phase
    fusion_repair               repairs the schedule after Thunder's fusers

The names below are imported lazily.
"""

from typing import TYPE_CHECKING

from thunder_zero.lazy import lazy

if TYPE_CHECKING:
    from thunder_zero.compat.thunder.fusion_repair import repair_fusion as repair_fusion
    from thunder_zero.compat.thunder.guards import Guards as Guards
    from thunder_zero.compat.thunder.guards import Lookup as Lookup
    from thunder_zero.compat.thunder.guards import form_of_call as form_of_call
    from thunder_zero.compat.thunder.operators.choose import default_executors as default_executors
    from thunder_zero.compat.thunder.operators.choose import executors_in_front as executors_in_front
    from thunder_zero.compat.thunder.repairs import forget_autocast as forget_autocast
    from thunder_zero.compat.thunder.trace_repairs import broadcast_scalars as broadcast_scalars
    from thunder_zero.compat.thunder.trace_repairs import draw_once as draw_once
    from thunder_zero.compat.thunder.trace_repairs import fused_only as fused_only
    from thunder_zero.compat.thunder.trace_repairs import sort_aliases as sort_aliases
    from thunder_zero.compat.thunder.tracing import Tracing as Tracing
    from thunder_zero.compat.thunder.untraceable import UNTRACEABLE as UNTRACEABLE
    from thunder_zero.compat.thunder.untraceable import not_returned as not_returned
    from thunder_zero.compat.thunder.untraceable import not_traced as not_traced
    from thunder_zero.compat.thunder.wrong_gradients import require_gradients as require_gradients
    from thunder_zero.compat.thunder.wrong_gradients import require_unwritten as require_unwritten

NAMES = {  # by module; type checkers read the imports above
    "thunder_zero.compat.thunder.fusion_repair": ("repair_fusion",),
    "thunder_zero.compat.thunder.guards": ("Guards", "Lookup", "form_of_call"),
    "thunder_zero.compat.thunder.operators.choose": ("default_executors", "executors_in_front"),
    "thunder_zero.compat.thunder.repairs": ("forget_autocast",),
    "thunder_zero.compat.thunder.trace_repairs": ("broadcast_scalars", "draw_once", "fused_only", "sort_aliases"),
    "thunder_zero.compat.thunder.tracing": ("Tracing",),
    "thunder_zero.compat.thunder.untraceable": ("UNTRACEABLE", "not_returned", "not_traced"),
    "thunder_zero.compat.thunder.wrong_gradients": ("require_gradients", "require_unwritten"),
}
look_up, list_names, __all__ = lazy(__name__, NAMES)

if not TYPE_CHECKING:  # so that a type checker reports a name that does not exist
    __getattr__, __dir__ = look_up, list_names
