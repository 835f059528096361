"""Forecasts the time of a step from its timeline and a device; knows neither Thunder nor torch."""
