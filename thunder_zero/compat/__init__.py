"""Workarounds for versions of Thunder, torch and transformers, which no other room patches.

In: modules, graphs and traces that Thunder or torch gets wrong. Out: repaired modules, graphs and traces, or an error
that names the user's file and line. Three lines of forward, and their workarounds::

    t2 = ltorch.true_divide(t0, t1)     t1 has no dimensions      trace_repairs.py expands it to the shape of t0
    h[:, :2].mul_(2)                    a write through a view    wrong_gradients.py raises
    y = ltorch.gelu(x)                  no fuser runs             operators/ keeps it one line in each phase

These workarounds are in ``thunder/``, for Thunder's own front end. ``tz.compile`` never applies them. ``aot/`` and
``torch/`` wrap private functions of torch, which ``private.py`` lists.

A file opens with the line "needed while: ...". In a file with several workarounds, each section opens with its own
line. ``tests/one/test_needs.py`` has a row for each line. A row fails once its workaround is no longer needed on a
version in ``imports.KNOWN``. Then the file or section can be deleted.
"""
