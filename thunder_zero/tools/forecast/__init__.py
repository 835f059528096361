"""Forecasts the memory of a step: runs the lines of its traces on meta tensors."""
