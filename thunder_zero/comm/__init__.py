"""Everything that talks to ``torch.distributed``: groups, collectives, agreement between ranks.

In: tensors of one bucket, and the plans of their parameters; numbers, objects and facts that ranks exchange. Out:
handles, whose ``wait`` gives what arrived; or an error on all ranks, if a rank refuses or is lost::

    launch                 tag -> peers         the first message of a phase says what this rank does there
      all_gather           rows -> peers        in the background
    handle.wait()          tags are compared    a rank that does something else: an error on both sides
      parameters in full   <- rows of peers     a rank that died: an error that names it

The doors: ``backends.model_transport`` makes the object that gathers parameters and averages gradients, ``agree.py``
makes all ranks refuse what one refuses, ``small_collectives.py`` carries numbers, objects and DTensors. Other rooms
launch no collectives of their own.
"""
