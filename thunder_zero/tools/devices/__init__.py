"""Devices by name, from files, and from measurements of this machine."""
