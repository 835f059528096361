"""Forecasts the time of a step, from its timeline or its traces, on a device."""
