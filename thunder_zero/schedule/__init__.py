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

from thunder_zero.plan.make_plan import make_plan as make_plan
from thunder_zero.plan.mesh import Mesh as Mesh
from thunder_zero.plan.params import Param as Param
from thunder_zero.plan.params import Plan as Plan
from thunder_zero.plan.policy import Times as Times
from thunder_zero.plan.traffic import Traffic as Traffic
from thunder_zero.schedule.ops import Compute as Compute
from thunder_zero.schedule.ops import Defer as Defer
from thunder_zero.schedule.ops import Exchange as Exchange
from thunder_zero.schedule.ops import Free as Free
from thunder_zero.schedule.ops import Gather as Gather
from thunder_zero.schedule.ops import Op as Op
from thunder_zero.schedule.ops import Reduce as Reduce
from thunder_zero.schedule.ops import Return as Return
from thunder_zero.schedule.ops import Wait as Wait
from thunder_zero.schedule.ops import ends as ends
from thunder_zero.schedule.timeline import ScheduleError as ScheduleError
from thunder_zero.schedule.timeline import Timeline as Timeline
from thunder_zero.schedule.verify import check as check
