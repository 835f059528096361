"""Prints timelines as text, without Thunder.

``line_meanings.py`` explains the lines of a timeline alone, or of a trace with its timeline. ``trace_printer.py``
prints them (``tz.print_trace``). All tools print with ``text.py``. ``progress.py`` shows the progress of long work.
"""
