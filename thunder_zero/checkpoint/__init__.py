"""Sharded checkpoints on disk: every rank writes its rows, any number of ranks loads them.

In: a sharded model, its optimizers and extras. Out: a folder that appears in one rename; or the values of a folder,
loaded in full or not at all. Doors: ``save.py`` (``tz.save``), ``load.py`` (``tz.load``), ``hugging_face.py``
(``tz.save_pretrained``).

    save.py -> contents.py, optimizer_states.py -> dcp_write.py -> folder.py, manifest.py
               what this rank has, by name         its file        complete, then visible

    load.py -> folder.py -> read.py, optimizer_states.py -> dcp_read.py, manifest.py
               find it      what to read, by name           each file once, hashed on the way
               then all values are written, or none
"""
