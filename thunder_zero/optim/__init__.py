"""Optimizers that step whole parameters: each has one owner among the ranks that share it.

``members`` finds the parameters, and refuses what ``probe`` finds of the ordinary optimizer; ``owners`` decides on
integers who steps what, and in which buckets; ``agreement`` compares what ranks are about to do; ``exchange`` brings a
bucket's rows to their owners and back; ``stepper`` steps an ordinary optimizer on an owner's whole parameters;
``optimizer`` is the ``torch.optim.Optimizer`` over the shards.
"""
