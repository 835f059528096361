"""Workarounds for versions of Thunder, torch and transformers, which no other room patches.

In: modules, graphs and traces for which a library has no public API, or which it gets wrong. Out: what the other rooms
need, or an error that names the user's line::

    dynamo.py, aot/, inductor.py      capture, differentiate and compile graphs
    imports.py, jitted.py, lines.py   Thunder's import, jitted modules, and traces
    torch/, private.py                wrap and list private functions of torch
    uncapturable.py                   refuses modules that dynamo cannot capture

A file opens with the line "needed while: ...". In a file with several workarounds, each section opens with its own
line. ``tests/one/test_needs.py`` has a row for each line. A row fails once its workaround is no longer needed on a
version in ``imports.KNOWN``. Then the file or section can be deleted.
"""
