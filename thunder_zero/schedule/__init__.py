"""Decides when collectives start and end, and when gathered parameters are freed; knows no Thunder.

The door is ``passes.run``, from a lifted timeline (``timeline.py``) to the schedule. Each pass is a pure function in a
module of its own, and ``verify.py`` proves the result after each of them, ``verify_recompute.py`` after ``recompute``.
"""

from thunder_zero.plan.params import Param as Param
from thunder_zero.plan.params import Plan as Plan
from thunder_zero.plan.params import make_plan as make_plan
from thunder_zero.plan.policy import Times as Times
from thunder_zero.schedule.timeline import Kind as Kind
from thunder_zero.schedule.timeline import Op as Op
from thunder_zero.schedule.timeline import ScheduleError as ScheduleError
from thunder_zero.schedule.timeline import Timeline as Timeline
from thunder_zero.schedule.verify import check as check

__all__ = ["Kind", "Op", "Param", "Plan", "ScheduleError", "Timeline", "Times", "check", "make_plan"]
