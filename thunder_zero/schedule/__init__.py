"""Decides when collectives start and end, and when gathered parameters are freed; knows no Thunder.

The door is ``passes.run``, from a lifted timeline (``timeline.py``) to the schedule. Each pass is a pure function in a
module of its own, and ``verify.py`` proves the result after each of them, ``verify_recompute.py`` after ``recompute``.
"""
