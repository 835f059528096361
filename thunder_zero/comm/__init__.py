"""Everything that talks to ``torch.distributed``: groups, collectives, agreement between ranks.

Three doors: :func:`thunder_zero.comm.backends.model_transport` makes the object that gathers parameters and averages
gradients, :mod:`thunder_zero.comm.agree` makes all ranks refuse what one refuses, and :mod:`thunder_zero.comm.peers`
has small collectives whose errors name the lost rank. Other rooms launch no collectives of their own.
"""
