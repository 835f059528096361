"""Reads and writes Thunder's traces; never talks to ``torch.distributed``.

In: the trace that Thunder acquired, or the trace of a joint graph of PyTorch. Out: the traces that run, and their
timeline. Entries, in order: ``insert.py``, before Thunder's autodiff; ``pipeline.schedule_trace``, for the joint trace
(lift, passes, emit); ``pipeline.compile_program``, for the traces that run. ``operators.py`` reads the properties of
torch's operators; ``symbols.py`` has the lines that call the runtime::

    y = linear(x, t_w)                                        acquired
    t0 = zero_synchronize(t_w, 'w'); y = linear(x, t0)        insert
    p0 = zero_all_gather(t_w, 'w'); t0 = zero_wait(p0); ...   lowered by Thunder: lift reads it into a timeline
    gather p0 <- t_w; wait t0 <- p0; compute y <- x, t0       the timeline, which the passes reorder; emit writes it
"""
