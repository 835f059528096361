"""Devices: by name, from files, and as measured on this machine."""
