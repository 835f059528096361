"""Decides how each parameter is sharded, before anything is traced: the policy, and a frozen plan.

In: a module, a ``Policy``, a ``Mesh`` of ranks. Out: a frozen ``Plan``, which all later rooms read. Entries:
``policy.Policy``, ``make_plan.make_plan``, ``Plan.geometry``, ``Plan.sizes``; ``rows.py`` splits tensors into rows::

    Policy(stage=3) -- STAGES --> sharded=True, resident=False, kept_unsharded=False
    module --------- make_plan -> Param('h.0.w', shape (5, 4), unit 'h.0', sharded), ...
                                  rank 0 [0 1 2]   rank 1 [3 4 .]          rows, padded with zeros
"""
