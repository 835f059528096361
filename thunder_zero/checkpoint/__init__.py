"""Sharded checkpoints on disk: every rank writes its rows, any number of ranks loads them.

The doors are ``save.py`` (``tz.save``) and ``load.py`` (``tz.load``). ``manifest.py`` and ``folder.py`` decide when a
checkpoint is complete and visible; ``dcp_write.py`` and ``dcp_read.py`` write and read the files.
"""
