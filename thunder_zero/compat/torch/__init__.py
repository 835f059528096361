"""What torch gives by private names alone, or gets wrong, by what it serves. Thunder is not needed.

Most functions are a public, typed name for a private one. Three change what torch does, by its own registries, for the
life of the process or of a module: ``on_failed_steps`` and ``share_found_inf`` (``optimizers.py``),
``refuse_fully_shard`` (``fully_shard.py``). They leave other people's models alone::

    autograd.py            which backward runs, and when it ends; whether torch.func is active
    groups.py              process groups: launches, timeouts, gloo's threads, exit
    optimizers.py          steps that fail, hooks of all optimizers, scalers
    tensors.py             the mark of a parameter, many tensors in one call
    fully_shard.py         refuses fully_shard of our models
"""
