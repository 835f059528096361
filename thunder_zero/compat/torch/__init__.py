"""Typed wrappers of torch's private functions, and workarounds for torch, grouped by topic.

Thunder is not needed. Most functions only wrap a private function. Three functions register code with torch, for the
life of the process or of a module: ``on_failed_steps`` and ``share_found_inf`` (``optimizers.py``),
``refuse_fully_shard`` (``fully_shard.py``). They do not affect models of other packages::

    groups.py              process groups: launches, timeouts, gloo's threads
    optimizers.py          steps that fail, hooks of all optimizers, scalers
    fully_shard.py         makes fully_shard of our models raise
"""
