"""Measures this machine for forecasts of time: compute, and collectives between ranks."""
