"""``tz.compile``: trains the joint graphs (forward and backward) of a module that dynamo captures.

In: a sharded module, and graphs of dynamo. Out: a program for each graph, choice of parameters, and mode. The entry
point is ``compile.py``::

    module        keep captured graphs and their programs              uses compat/dynamo.py, compat/aot/
    checkpoints   let backward recompute lines under checkpoints
    convert       turn a joint graph into a joint trace: rows, gathers, reductions
    programs      schedule, split, prove and run a joint trace
"""
