"""Devices: by name, from files, and as measured on this machine.

In: a name, a file or this machine. Out: ``Device`` or ``Calibrated``; ``named.py`` is the door.
"""
