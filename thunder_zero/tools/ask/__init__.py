"""Answers questions about traces: about one parameter, about two programs; a file for Perfetto.

In: traces. Out: ``Explanation``, ``Difference``, printed lines.
"""
