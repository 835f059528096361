"""Explains timelines to people, as text; knows no Thunder.

``line_meanings.py`` is the door: a timeline alone, or a trace with its timeline, which ``trace_printer.py`` prints
(``tz.print_trace``). ``text.py`` has what all tools print with; ``progress.py`` says what long work does now.
"""
