"""Conversion of checkpoints on disk, without a process group or a model, one tensor at a time."""
