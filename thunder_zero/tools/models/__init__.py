"""Models by name, for ``tz.tools.plan_training`` and ``thunder-zero report``.

In: a name and the length of a sequence. Out: a plain module. The entry point is ``MODELS``, in ``named.py``.
"""
