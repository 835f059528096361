"""Checks a step of several ranks in one process: gradients by numbers."""
