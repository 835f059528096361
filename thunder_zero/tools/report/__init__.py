"""Explains timelines to people, as text; knows neither Thunder nor torch.

The doors: ``text.format_timeline`` for a timeline alone, ``rows.py`` and ``printer.py`` for a trace with its timeline
(``tz.print_trace``). ``progress.py`` is a progress bar for the command line.
"""
