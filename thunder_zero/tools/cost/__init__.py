"""Forecasts the time of a step, from its timeline or its traces, on a device.

In: a timeline and a device. Out: ``Estimate``; ``costs.py`` weighs each line, ``lanes.py`` runs them.
"""
