"""Everything that talks to ``torch.distributed``: groups, collectives, agreement between ranks.

::

    launch                 tag -> peers         the first message of a phase names the phase
      all_gather           rows -> peers        in the background
    handle.wait()          tags are compared    a rank in another phase: an error on both sides
      full parameters      <- rows of peers     a rank that died: an error that names the rank

Other rooms launch no collectives of their own.
"""
