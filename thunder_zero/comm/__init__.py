"""Everything that talks to ``torch.distributed``: groups, collectives, agreement between ranks.

In: the tensors of a bucket, with the ``Param`` of each; or numbers, objects and facts that ranks exchange. Out:
handles, whose ``wait`` returns the received tensors; or an error on all ranks, if a rank raises or is lost::

    launch                 tag -> peers         the first message of a phase names the phase
      all_gather           rows -> peers        in the background
    handle.wait()          tags are compared    a rank in another phase: an error on both sides
      full parameters      <- rows of peers     a rank that died: an error that names the rank

Entries: ``backends.model_transport`` builds the object that gathers parameters and averages gradients. ``agree.py``
makes all ranks raise if one rank raises. ``small_collectives.py`` exchanges numbers, objects and DTensors. Other rooms
launch no collectives of their own.
"""
