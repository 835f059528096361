"""``tz.tools.fit``: the cheapest policy whose step fits into memory.

In: traces and a number of bytes. Out: a policy. ``candidate.py`` evaluates policies. ``search.py`` and ``budget.py``
choose a policy.
"""
