"""Answers questions about traces: about one parameter, two programs, or a step in Perfetto.

In: traces. Out: ``Explanation``, ``Difference``, printed lines.
"""
