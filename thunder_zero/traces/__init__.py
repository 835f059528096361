"""Reads and writes Thunder's traces; never talks to ``torch.distributed``.

In: the trace of a plain module, forward and backward in one. Out: the traces that run, and their timeline. Entries, in
order: ``insert.py`` and ``lower.py``, transforms from trace to trace; ``pipeline.schedule`` (lift, passes);
``pipeline.write_program``, which writes the traces that run. ``operators.py`` reads the properties of torch's
operators; ``symbols.py`` has the lines that call the runtime::

    y = aten.mm(x, w)                                         plain
    w = zero_synchronize(t_w, 'w'); y = aten.mm(x, w)         insert
    p0 = zero_all_gather(t_w, 'w'); w = zero_wait(p0); ...    lower; lift reads it into a timeline
    gather p0 <- t_w; wait w <- p0; compute y <- x, w         the timeline, which passes reorder; write prints it
"""
