"""Typed wrappers of torch's private functions, and workarounds for torch, grouped by topic.

Thunder is not needed. Most functions only wrap a private function. Three functions register code with torch, for the
life of the process or of a module: ``on_failed_steps`` and ``share_found_inf`` (``optimizers.py``),
``refuse_fully_shard`` (``fully_shard.py``). They do not affect models of other packages::

    autograd.py            which backward runs, and when it ends; whether torch.func is active
    groups.py              process groups: launches, timeouts, gloo's threads, exit
    optimizers.py          steps that fail, hooks of all optimizers, scalers
    tensors.py             the attribute that marks a parameter, division of many tensors
    fully_shard.py         makes fully_shard of our models raise
"""
