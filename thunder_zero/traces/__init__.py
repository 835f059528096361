"""Reads and writes Thunder's traces; never talks to ``torch.distributed``.

The doors, in the order in which ``transform.py`` uses them: ``insert.py`` before autodiff, ``executors.py`` on the
joint trace (lift, passes, emit), ``lift.lift_phases`` on the traces that run. ``symbols.py`` has the lines that call
the runtime.
"""
