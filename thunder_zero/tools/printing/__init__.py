"""Prints timelines as text, without Thunder.

``line_meanings.py`` explains a timeline, or the lines of a trace with its timeline. ``trace_printer.py`` prints the
lines for ``tz.print_trace``. All tools print with ``text.py``. ``progress.py`` shows the progress of long work.
"""
