"""Sharded checkpoints on disk: every rank writes its rows, and any number of ranks can load them.

A save is a folder that appears in one rename. A load gives a model all values of a folder, or leaves it unchanged::

    save.py -> contents.py, optimizer_states.py -> dcp_write.py   -> folder.py, manifest.py
               this rank's values, by name         its file          a complete folder becomes visible

    load.py -> folder.py        -> optimizer_states.py   -> dcp_read.py, manifest.py
               find the folder     list the keys to read    read each file once, and hash it
               then write all values, or none
"""
