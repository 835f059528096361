"""DDP and ZeRO-1/2/3 for Lightning Thunder, as traces that can be read. Import before Thunder."""

from thunder_zero import _compat, _shortcuts  # noqa: F401  # let Thunder import, and spare it work
from thunder_zero.ask.diff import diff
from thunder_zero.ask.difference import Difference
from thunder_zero.ask.explain import explain
from thunder_zero.ask.explanation import Explanation
from thunder_zero.ask.save_timeline import save_timeline
from thunder_zero.calibration.calibrate import calibrate
from thunder_zero.checkpoint.load import Loaded, load
from thunder_zero.checkpoint.save import save
from thunder_zero.compiled import Traces
from thunder_zero.convert.consolidate import consolidate
from thunder_zero.convert.shard_safetensors import shard_safetensors
from thunder_zero.cost.calibrated import Calibrated
from thunder_zero.cost.device import DEVICES, Device, Link
from thunder_zero.cost.device_file import load_device, save_device
from thunder_zero.cost.step_time import Estimate
from thunder_zero.dry_run import trace
from thunder_zero.dynamo.compile import compile
from thunder_zero.estimate import estimate
from thunder_zero.fit import DoesNotFit, fit
from thunder_zero.forecast.figures import Memory, MemoryLine, Storage
from thunder_zero.forecast.kinds import Holds
from thunder_zero.forecast.memory import memory
from thunder_zero.full_parameters import full_parameters
from thunder_zero.hugging_face.save_pretrained import save_pretrained
from thunder_zero.measure import measure_times
from thunder_zero.plan import Param, Plan, make_plan
from thunder_zero.planner.advise import plan_training
from thunder_zero.planner.figures import TrainingPlan
from thunder_zero.plugin import Recipe, Zero, zero
from thunder_zero.policy import DDP, ZERO1, ZERO2, ZERO3, Policy
from thunder_zero.precision import MixedPrecision
from thunder_zero.print_trace import print_trace
from thunder_zero.runtime.clip import clip_grad_norm_
from thunder_zero.runtime.ema import EMA
from thunder_zero.runtime.global_mean import global_mean
from thunder_zero.schedule.candidate import Prices
from thunder_zero.schedule.fault import ScheduleError
from thunder_zero.schedule.timeline import Kind, Op, Timeline
from thunder_zero.schedule.verify import check
from thunder_zero.state_dict.api import full_state_dict
from thunder_zero.times import Times
from thunder_zero.transform import ZeroTransform
from thunder_zero.whole_step.optimizer import whole
from thunder_zero.zero_module import ZeroModule, traces_of

__all__ = [
    "DDP",
    "DEVICES",
    "EMA",
    "ZERO1",
    "ZERO2",
    "ZERO3",
    "Calibrated",
    "Device",
    "Difference",
    "DoesNotFit",
    "Estimate",
    "Explanation",
    "Holds",
    "Kind",
    "Link",
    "Loaded",
    "Memory",
    "MemoryLine",
    "MixedPrecision",
    "Op",
    "Param",
    "Plan",
    "Policy",
    "Prices",
    "Recipe",
    "ScheduleError",
    "Storage",
    "Timeline",
    "Times",
    "Traces",
    "TrainingPlan",
    "Zero",
    "ZeroModule",
    "ZeroTransform",
    "calibrate",
    "check",
    "clip_grad_norm_",
    "compile",
    "consolidate",
    "diff",
    "estimate",
    "explain",
    "fit",
    "full_parameters",
    "full_state_dict",
    "global_mean",
    "load",
    "load_device",
    "make_plan",
    "measure_times",
    "memory",
    "plan_training",
    "print_trace",
    "save",
    "save_device",
    "save_pretrained",
    "save_timeline",
    "shard_safetensors",
    "trace",
    "traces_of",
    "whole",
    "zero",
]
