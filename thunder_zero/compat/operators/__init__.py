"""Torch's own operators, one line each way, in place of what Thunder's autodiff decomposes."""
