"""What exists because of a version of Thunder or of torch; nobody else patches them.

In: modules, graphs and traces that Thunder or torch gets wrong. Out: the same, mended; or a refusal that names the line
of the user's file. Three lines of forward, and what is done about them::

    t2 = ltorch.true_divide(t0, t1)     t1 has no dimensions      trace_repairs.py gives it those of t0
    h[:, :2].mul_(2)                    a write through a view    wrong_gradients.py refuses it
    y = ltorch.gelu(x)                  nobody fuses it           operators/ makes it one line each way

These three are in ``thunder/``: what exists for Thunder's own front end, which ``tz.compile`` never enters.

Each file opens with one line: "needed while: ..."; or, if it has several workarounds, each section of it does.
``tests/one/test_needs.py`` has a row for each, which fails on the versions that the need is known for
(``imports.KNOWN``) once it is gone: then the file or section goes, too.
"""
