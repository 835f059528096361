"""The other front end: dynamo captures graphs of a module, and Thunder compiles each of them.

In: a sharded module, and graphs of dynamo. Out: programs, one for each graph, choice of parameters and mode. Its door
is ``compile``::

    dynamo's graph -> captured.py: parameters by path -> acquire.py: Thunder's trace -> programs.py: Mode -> program
"""
