"""Conversion of checkpoints on disk, without a process group or a model.

``consolidate.py`` makes one file of whole tensors, or a few, from a checkpoint. ``shard_safetensors.py`` makes a
checkpoint from such files. Memory holds one tensor at a time, or one rank's rows of a tensor.
"""
