"""Types the values of a training step on the axes of a mesh, and says what is wrong.

In: a user's step. Out: a verdict with the lines that are wrong::

    step(mesh) -- record.py --> StepRecord: each operator below DTensor and FSDP2
                                  |
    neighbours, in processes -----+--> flow.py: types of each line, by experiments (laws.py) and by a table
                                  |             for collectives (collectives.py)
                                  +--> check.py --> report.py: what is wrong, the first cause first
"""
