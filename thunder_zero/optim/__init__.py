"""Optimizers in which an owner steps each whole parameter. Clipping and averages over ranks.

In: a sharded model's shards and gradients. Out: stepped shards, clipped gradients, averages. Entry points:
``optimizer`` (``tz.whole``), ``global_numbers`` (``tz.clip_grad_norm_``, ``tz.global_mean``), ``ema`` (``tz.EMA``).
When an optimizer is built::

    members    finds the parameters, and raises if  probe  shows that the ordinary optimizer cannot be used
    owners     assigns each parameter to a rank        options  describes options as text, for probe and agreement

In each step of the ``torch.optim.Optimizer`` over the shards::

    agreement -> for each bucket:  exchange.ToOwners -> stepper (the ordinary optimizer, whole) -> exchange.FromOwners
"""
