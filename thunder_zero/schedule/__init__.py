"""Decides when collectives start and end, and when gathered parameters are freed.

In: a lifted timeline (``timeline.py``). Out: its schedule. Entries: ``passes.run``, and ``verify.check`` for traces
that will run. Each pass is a pure function in a module of its own. ``verify.py`` proves each result::

    gather  f0 <- t_w       lifted: at its use         gather  f0 <- t_w       prefetch: ahead of its use
    wait    w  <- f0                                   compute x  <- ...
    compute y  <- x, w                                 wait    w  <- f0
                                                       compute y  <- x, w
                                                 -->   free    w               free: after its last use in forward
    -- backward --                                     -- backward --
                                                       gather  f1 <- t_w       regather
                                                       wait    v  <- f1
    compute gx <- gy, w                                compute gx <- gy, v
                                                       free    v
"""

from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.policy import Times
from thunder_zero.plan.traffic import Traffic
from thunder_zero.schedule.ops import Compute, Defer, Exchange, Free, Gather, Op, Reduce, Return, Wait, ends
from thunder_zero.schedule.timeline import ScheduleError, Timeline
from thunder_zero.schedule.verify import check

__all__ = [
    "Compute",
    "Defer",
    "Exchange",
    "Free",
    "Gather",
    "Mesh",
    "Op",
    "Param",
    "Plan",
    "Reduce",
    "Return",
    "ScheduleError",
    "Timeline",
    "Times",
    "Traffic",
    "Wait",
    "check",
    "ends",
    "make_plan",
]
