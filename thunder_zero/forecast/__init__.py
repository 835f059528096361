"""Forecasts the memory of a step from the traces that will run: runs their lines on tensors without values.

``memory.py`` is the door.
"""
