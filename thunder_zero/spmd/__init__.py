"""Checks anybody's training step on the axes of a mesh: by types of its values, and by numbers.

By types: the step runs on one rank, and each value is replicated, a slice, or a share of a sum::

    step(mesh) -- record.py --> StepRecord (lines.py): each operator below DTensor and FSDP2
                                  |
    neighbours, in processes -----+--> flow.py: the types of each line. collectives.py has a table for collectives,
    (check.py, ranks.py)          |             rules.py runs other operators again (laws.py: experiments), and
                                  |             storages.py keeps what is known of each value
                                  +--> report.py --> verdict.py: what is wrong, the first cause first

By numbers: all ranks run as threads, and their gradients are compared with those of the plain module::

    build, parallelize, batch -- by_numbers.py --> comparison.py: wrong values, and the shapes of their errors
"""
