"""Optimizers in which one rank, the owner, steps a whole parameter. Clipping, moving averages.

When ``tz.whole`` builds an optimizer::

    members    find the parameters; build the ordinary optimizer, or raise if it cannot step parts of the model
    probe      step small parameters, for the check in members
    owners     assign each parameter to a rank
    options    describe options as text, for probe and agreement

In each step of the ``torch.optim.Optimizer`` over the shards::

    agreement -> for each bucket:  exchange.ToOwners -> stepper (the ordinary optimizer, whole) -> exchange.FromOwners
"""
