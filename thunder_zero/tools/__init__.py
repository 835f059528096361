"""Tools that explain, forecast and plan: ``thunder_zero.tools``. Training imports none of them.

In: a module and inputs, a model that ran, or a checkpoint. Out: frozen data with a printed form::

    module, inputs -- dry_run.py --> Traces --+---------------------> table/   a row for each line of a step
                                      |   |                             ^  |
                                      |   +---> forecast/ bytes --------+  +-> views/ text, JSON, Perfetto, HTML
                                      +-------> cost/ devices/ seconds -+
                                                  |
                                                  +- fitting/ many policies -- planner/ stages and meshes

    checkpoint on disk <-- convert/ --> safetensors files
"""

from typing import TYPE_CHECKING

from thunder_zero.lazy import lazy

if TYPE_CHECKING:
    from thunder_zero.tools.absent_ranks import fake_mesh as fake_mesh
    from thunder_zero.tools.compiled_programs import CompiledProgram as CompiledProgram
    from thunder_zero.tools.compiled_programs import programs as programs
    from thunder_zero.tools.convert.consolidate import consolidate as consolidate
    from thunder_zero.tools.convert.shard_safetensors import shard_safetensors as shard_safetensors
    from thunder_zero.tools.cost.estimate import Estimate as Estimate
    from thunder_zero.tools.cost.estimate import estimate as estimate
    from thunder_zero.tools.devices.calibrate import calibrate as calibrate
    from thunder_zero.tools.devices.calibrated import Calibrated as Calibrated
    from thunder_zero.tools.devices.device import DEVICES as DEVICES
    from thunder_zero.tools.devices.device import Device as Device
    from thunder_zero.tools.devices.device import Link as Link
    from thunder_zero.tools.devices.named import load_device as load_device
    from thunder_zero.tools.devices.named import save_device as save_device
    from thunder_zero.tools.fitting.candidate import Prices as Prices
    from thunder_zero.tools.fitting.fit import DoesNotFit as DoesNotFit
    from thunder_zero.tools.fitting.fit import fit as fit
    from thunder_zero.tools.forecast.figures import Holds as Holds
    from thunder_zero.tools.forecast.figures import Memory as Memory
    from thunder_zero.tools.forecast.figures import MemoryLine as MemoryLine
    from thunder_zero.tools.forecast.figures import Storage as Storage
    from thunder_zero.tools.forecast.for_loss import for_loss as for_loss
    from thunder_zero.tools.forecast.memory import memory as memory
    from thunder_zero.tools.forecast.resized import resized as resized
    from thunder_zero.tools.format_errors import WireError as WireError
    from thunder_zero.tools.format_errors import wire_error as wire_error
    from thunder_zero.tools.measure import measure_times as measure_times
    from thunder_zero.tools.models.named import MODELS as MODELS
    from thunder_zero.tools.models.named import NamedModel as NamedModel
    from thunder_zero.tools.planner.plan_training import plan_training as plan_training
    from thunder_zero.tools.planner.training_plan import TrainingPlan as TrainingPlan
    from thunder_zero.tools.table.rows import Row as Row
    from thunder_zero.tools.table.table import Table as Table
    from thunder_zero.tools.table.table import step_table as step_table
    from thunder_zero.tools.views.diff import Difference as Difference
    from thunder_zero.tools.views.diff import diff as diff
    from thunder_zero.tools.views.explain import Explanation as Explanation
    from thunder_zero.tools.views.page.report import report as report
    from thunder_zero.tools.views.save_timeline import save_timeline as save_timeline
    from thunder_zero.traces.compiled import Traces as Traces

NAMES = {  # names keyed by module; type checkers read the imports above
    "thunder_zero.traces.compiled": ("Traces",),
    "thunder_zero.tools.absent_ranks": ("fake_mesh",),
    "thunder_zero.tools.views.diff": ("Difference", "diff"),
    "thunder_zero.tools.views.explain": ("Explanation",),
    "thunder_zero.tools.views.save_timeline": ("save_timeline",),
    "thunder_zero.tools.compiled_programs": ("CompiledProgram", "programs"),
    "thunder_zero.tools.convert.consolidate": ("consolidate",),
    "thunder_zero.tools.convert.shard_safetensors": ("shard_safetensors",),
    "thunder_zero.tools.cost.estimate": ("Estimate", "estimate"),
    "thunder_zero.tools.devices.calibrate": ("calibrate",),
    "thunder_zero.tools.devices.calibrated": ("Calibrated",),
    "thunder_zero.tools.devices.device": ("DEVICES", "Device", "Link"),
    "thunder_zero.tools.devices.named": ("load_device", "save_device"),
    "thunder_zero.tools.fitting.candidate": ("Prices",),
    "thunder_zero.tools.fitting.fit": ("DoesNotFit", "fit"),
    "thunder_zero.tools.forecast.figures": ("Holds", "Memory", "MemoryLine", "Storage"),
    "thunder_zero.tools.forecast.for_loss": ("for_loss",),
    "thunder_zero.tools.forecast.memory": ("memory",),
    "thunder_zero.tools.forecast.resized": ("resized",),
    "thunder_zero.tools.format_errors": ("WireError", "wire_error"),
    "thunder_zero.tools.measure": ("measure_times",),
    "thunder_zero.tools.models.named": ("MODELS", "NamedModel"),
    "thunder_zero.tools.views.page.report": ("report",),
    "thunder_zero.tools.planner.plan_training": ("plan_training",),
    "thunder_zero.tools.planner.training_plan": ("TrainingPlan",),
    "thunder_zero.tools.table.rows": ("Row",),
    "thunder_zero.tools.table.table": ("Table", "step_table"),
}
look_up, list_names, __all__ = lazy(__name__, NAMES)

if not TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__, __dir__ = look_up, list_names
