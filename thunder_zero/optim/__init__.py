"""Optimizers that step whole parameters, each by its owner; clipping and averages over ranks.

In: a sharded model's shards and gradients. Out: stepped shards, clipped gradients, averages. Doors: ``optimizer``
(``tz.whole``), ``global_numbers`` (``tz.clip_grad_norm_``, ``tz.global_mean``), ``ema`` (``tz.EMA``). When made::

    members    finds the parameters; refuses an ordinary optimizer by what  probe  finds of it
    owners     decides on integers who steps what      options  describes options as text, for probe and agreement

and in each step of the ``torch.optim.Optimizer`` over the shards::

    agreement -> for each bucket:  exchange.ToOwners -> stepper (the ordinary optimizer, whole) -> exchange.FromOwners
"""
