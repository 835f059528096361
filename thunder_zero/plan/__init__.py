"""What is decided before anything is traced: the policy, and the plan of each parameter.

In: a module, a ``Policy``, how many ranks. Out: a frozen ``Plan``, which all later rooms ask. Doors: ``policy.Policy``,
``params.make_plan``, ``Plan.sizes``; ``rows.py`` cuts tensors as ``layout.py`` says::

    Policy(stage=3) -- STAGES --> sharded, not resident, not kept unsharded
    module --------- make_plan -> Param('h.0.w', shape (5, 4), unit 'h.0', sharded), ...
                                  rank 0 [0 1 2]   rank 1 [3 4 .]          rows, padded with zeros
"""
