"""Makes a sharded model: captures forward, converts it into a trace, and runs its calls.

In: a plain module with a policy, and calls of the model. Out: the result of forward, connected to our backward, and the
traces that ran. Each entry applies ``ZeroTransform``: ``tz.compile``, ``plugin.py``, and ``thunder.jit`` itself::

    transform.py    shards a module once        arguments.py, refusals.py, placement.py
    zero_module.py  takes a call                placement.py checks, compilations.py reports
    forward.py      dynamo captures graphs      graphs.py reads them
    joint.py        PyTorch adds the backward   compat/aot/
    convert.py      a trace of the plain module proxies.py names its values
    programs.py     the program of a mode       traces/ transforms and schedules the trace
"""
