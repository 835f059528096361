"""Forecasts the time of a step from its timeline and the description of a machine; knows no Thunder."""
