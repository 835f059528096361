"""Typed wrappers of private functions of torch, and workarounds, by topic. Thunder is not needed.

Most functions only wrap a private function. Three functions change torch's behaviour, by torch's own registries, for
the life of the process or of a module: ``on_failed_steps`` and ``share_found_inf`` (``optimizers.py``),
``refuse_fully_shard`` (``fully_shard.py``). They do not affect models of other packages::

    autograd.py            which backward runs, and when it ends; whether torch.func is active
    groups.py              process groups: launches, timeouts, gloo's threads, exit
    optimizers.py          steps that fail, hooks of all optimizers, scalers
    tensors.py             the attribute that marks a parameter, division of many tensors
    fully_shard.py         makes fully_shard of our models raise
"""
