"""Forecasts the time of a step, from its timeline or its traces, on a device.

In: a timeline and a device. Out: ``Estimate``. ``costs.py`` computes costs of lines. ``lanes.py`` simulates the lines.
"""
