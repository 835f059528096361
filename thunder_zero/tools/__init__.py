"""Tools that explain, forecast and plan: ``thunder_zero.tools``. Training imports none of them.

In: a module and inputs, a model that ran, or a checkpoint. Out: frozen data with a printed form::

    module, inputs -- dry_run.py --> Traces --+---------------------> table/   a row for each line of a step
                                      |   |                             ^  |
                                      |   +---> forecast/ bytes --------+  +-> views/ text, JSON, Perfetto, HTML
                                      +-------> time/ devices/ seconds -+
                                                  |
                                                  +- plan/ many policies, stages and meshes

    checkpoint on disk <-- convert.py --> safetensors files
"""

from typing import TYPE_CHECKING

from thunder_zero.lazy import lazy

if TYPE_CHECKING:  # the public names, which are imported when they are first used
    from thunder_zero.spmd.by_numbers import GradientComparison as GradientComparison
    from thunder_zero.spmd.by_numbers import compare_gradients as compare_gradients
    from thunder_zero.spmd.check import check_step as check_step
    from thunder_zero.spmd.comparison import ComparedValue as ComparedValue
    from thunder_zero.spmd.verdict import Fault as Fault
    from thunder_zero.spmd.verdict import Verdict as Verdict
    from thunder_zero.tools.compiled_programs import programs as programs
    from thunder_zero.tools.convert import consolidate as consolidate
    from thunder_zero.tools.convert import shard_safetensors as shard_safetensors
    from thunder_zero.tools.devices.calibrate import calibrate as calibrate
    from thunder_zero.tools.devices.device import DEVICES as DEVICES
    from thunder_zero.tools.devices.device import Device as Device
    from thunder_zero.tools.devices.device import Link as Link
    from thunder_zero.tools.devices.device import load_device as load_device
    from thunder_zero.tools.devices.device import save_device as save_device
    from thunder_zero.tools.dry_run import fake_mesh as fake_mesh
    from thunder_zero.tools.forecast.figures import Holds as Holds
    from thunder_zero.tools.forecast.figures import Memory as Memory
    from thunder_zero.tools.forecast.figures import Storage as Storage
    from thunder_zero.tools.forecast.for_loss import for_loss as for_loss
    from thunder_zero.tools.forecast.memory import memory as memory
    from thunder_zero.tools.forecast.resized import resized as resized
    from thunder_zero.tools.format_errors import wire_error as wire_error
    from thunder_zero.tools.measure import measure_times as measure_times
    from thunder_zero.tools.models import MODELS as MODELS
    from thunder_zero.tools.models import NamedModel as NamedModel
    from thunder_zero.tools.plan.fit import DoesNotFit as DoesNotFit
    from thunder_zero.tools.plan.fit import fit as fit
    from thunder_zero.tools.plan.plan_training import plan_training as plan_training
    from thunder_zero.tools.plan.training_plan import TrainingPlan as TrainingPlan
    from thunder_zero.tools.table.rows import Row as Row
    from thunder_zero.tools.table.table import Table as Table
    from thunder_zero.tools.table.table import step_table as step_table
    from thunder_zero.tools.time.estimate import Estimate as Estimate
    from thunder_zero.tools.time.estimate import estimate as estimate
    from thunder_zero.tools.views.diff import Difference as Difference
    from thunder_zero.tools.views.diff import diff as diff
    from thunder_zero.tools.views.explain import Explanation as Explanation
    from thunder_zero.tools.views.kept import kept_for_backward as kept_for_backward
    from thunder_zero.tools.views.page.report import report as report
    from thunder_zero.tools.views.save_timeline import save_timeline as save_timeline
    from thunder_zero.traces.compiled import Traces as Traces

look_up, list_names, __all__ = lazy(__name__)

if not TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__, __dir__ = look_up, list_names
