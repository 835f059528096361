"""``tz.compile``: dynamo captures graphs of a module, and PyTorch's joint graph of each is trained.

In: a sharded module, and graphs of dynamo. Out: a program for each graph, choice of parameters, and mode. The entry
point is ``compile.py``::

    module.py     captured graphs, their numbers, their programs        compat/dynamo.py, compat/aot/
    checkpoints   backward recomputes the lines that checkpoints tag
    convert       joint graph -> joint trace: rows, gathers, reductions
    programs      scheduled, split, proved, run
"""
