"""Optimizers in which one rank, the owner, steps a whole parameter. Clipping, moving averages.

In: a sharded model's shards and gradients. Out: stepped shards, clipped gradients, averages. Entry points:
``optimizer`` (``tz.whole``), ``global_numbers`` (``tz.clip_grad_norm_``, ``tz.global_mean``), ``ema`` (``tz.EMA``).
When an optimizer is built::

    members    find the parameters; build the ordinary optimizer, or raise if it cannot step parts of the model
    probe      step small parameters, for the check in members
    owners     assign each parameter to a rank
    options    describe options as text, for probe and agreement

In each step of the ``torch.optim.Optimizer`` over the shards::

    agreement -> for each bucket:  exchange.ToOwners -> stepper (the ordinary optimizer, whole) -> exchange.FromOwners
"""
