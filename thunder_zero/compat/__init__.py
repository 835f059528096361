"""Workarounds for versions of Thunder, torch and transformers, which no other room patches.

In: modules, graphs and traces that Thunder or torch gets wrong. Out: repaired ones, or an error that names the line of
the user's file. Three lines of forward, and their workarounds::

    t2 = ltorch.true_divide(t0, t1)     t1 has no dimensions      trace_repairs.py expands it to the shape of t0
    h[:, :2].mul_(2)                    a write through a view    wrong_gradients.py refuses it
    y = ltorch.gelu(x)                  nobody fuses it           operators/ makes it one line each way

These three are in ``thunder/``, which serves Thunder's own front end; ``tz.compile`` never enters it. ``aot/`` and
``torch/`` have what torch gives by private names alone, which ``private.py`` lists.

A file opens with the line "needed while: ...". In a file of several workarounds each section opens with such a line.
``tests/one/test_needs.py`` has a row for each line. A row fails once its need is gone on a version that the need is
known for (``imports.KNOWN``). Then the file or section can be deleted.
"""
