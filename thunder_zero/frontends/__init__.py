"""Turns a module into a sharded model: the transform, dynamo, plugins, and checks that raise.

In: a plain module with a policy, and calls of the model. Out: the result of forward, connected to our backward, and the
traces that ran. Entry points: ``transform.ZeroTransform``, ``dynamo.compile.compile``, ``plugin`` (``zero``, ``Zero``,
``Recipe``), ``zero_module.traces_of``::

    thunder.jit(module, transforms=[ZeroTransform])      tz.compile(module)
              Thunder interprets forward,                    dynamo captures graphs of forward,
              and differentiates it                          AOTAutograd differentiates each
                        |  program_transform.py                       |  dynamo/convert.py
                        +-----------------> joint trace <-------------+
                                               |  traces/pipeline.py: scheduled, split, proved
    arguments.py, refusals.py  before          |
    placement.py               each call     ZeroModule, DynamoModule
"""
