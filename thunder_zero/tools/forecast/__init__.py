"""Forecasts the memory of a step: runs the lines of its traces on tensors without values.

``memory.py`` is the door.
"""
