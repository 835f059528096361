"""Tools that explain, forecast and plan: ``thunder_zero.tools``. Nothing that trains imports them.

In: a module and inputs, a model that ran, or a checkpoint. Out: answers as frozen data, which print themselves::

    module, inputs -- dry_run.py --> Traces --> ask/ printing/   what each line does, and why there
                                      |   |
                                      |   +---> forecast/        bytes alive, line by line
                                      +-------> cost/ devices/   seconds, lane by lane
                                                  |
                  page/ one picture of all these -+- fitting/ many policies -- planner/ stages and meshes

    checkpoint on disk --> convert/
"""

from typing import TYPE_CHECKING

from thunder_zero.lazy import lazy

if TYPE_CHECKING:
    from thunder_zero.frontends.compiled import Traces as Traces
    from thunder_zero.tools.absent_ranks import fake_mesh as fake_mesh
    from thunder_zero.tools.ask.diff import diff as diff
    from thunder_zero.tools.ask.difference import Difference as Difference
    from thunder_zero.tools.ask.explanation import Explanation as Explanation
    from thunder_zero.tools.ask.save_timeline import save_timeline as save_timeline
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
    from thunder_zero.tools.page.report import report as report
    from thunder_zero.tools.planner.plan_training import plan_training as plan_training
    from thunder_zero.tools.planner.training_plan import TrainingPlan as TrainingPlan

look_up, listed, __all__ = lazy(__name__)

if not TYPE_CHECKING:  # a type checker must miss a name that there is not
    __getattr__, __dir__ = look_up, listed
