"""Explains timelines to people, as text; knows no Thunder.

The doors: ``timeline_text.py`` for a timeline alone, ``line_meanings.py`` and ``trace_printer.py`` for a trace with its
timeline (``tz.print_trace``). ``progress.py`` says what long work does now.
"""
