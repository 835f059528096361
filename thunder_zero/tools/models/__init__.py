"""Models by name, for ``tz.tools.plan_training`` and ``thunder-zero report``.

In: a name, and tokens of a sequence. Out: a plain module; ``MODELS``, in ``named.py``, is the door.
"""
