"""This rank's state of a model: shards, gradients, and functions that traces and training call.

In: a plan and a module's initial values. Out: shards for optimizers, rows for programs, and gradients. ``state.py`` has
the state. The entry points are ``runtime.py`` for compiled traces, ``sharded_model.py`` for functions that take a model
(checkpoints, state dicts, clipping), and ``initial_values/`` to create a model. No module here knows Thunder::

    optimizer.step() --> shards  DTensor (5, 8)           Rows.apply(shards)     rows (3, 8), in the same memory
          ^                 |                             zero_all_gather(rows)  --> transport --> full (5, 8)
          |              the same memory                  ...
        .grad  <---------  rows  (3, 8) <--- mean ---     zero_reduce_scatter(gradient + deferred gradient)
"""
