"""Measures this machine for forecasts of time: curves over sizes of compute, and of collectives between these ranks."""
