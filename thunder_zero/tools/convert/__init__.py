"""Conversion of checkpoints on disk, without a process group or a model.

``consolidate.py`` writes a checkpoint's whole tensors to one or more files. ``shard_safetensors.py`` makes a checkpoint
from safetensors files. Memory holds one tensor at a time, or one rank's rows of a tensor.
"""
