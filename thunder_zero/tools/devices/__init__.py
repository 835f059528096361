"""Devices by name, from files, and from measurements of this machine.

In: a name, a file or this machine. Out: ``Device``. The entry point is ``named.py``.
"""
