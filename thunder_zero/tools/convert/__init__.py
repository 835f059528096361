"""Conversion of checkpoints on disk, without a process group or a model.

The doors are ``consolidate.py`` (a checkpoint to one file, or a few, of whole tensors) and ``shard_safetensors.py``
(the other way). Both hold one tensor, or one rank's rows of it, in memory at a time.
"""
