"""Several sites train one model, each alone, with an outer step between them.

::

    site a: torchrun, its own groups          TCPStore            site b: torchrun, its own groups
    rank 0 [rows 0] --- leads the site --->  who is there  <--- leads the site --- rank 0 [rows 0]
    rank 1 [rows 1]                                                                 rank 1 [rows 1]
       '---------- rows 1 of the change since the last exchange, encoded ------------'

``store.py`` reaches the store, ``meeting.py`` decides who takes part in an exchange, ``exchange.py`` sends rows between
ranks of equal place, ``rounds.py`` runs all in a thread until sites agree that it succeeded, ``agreed.py`` has the rows
and steps the outer optimizer, ``diloco.py`` calls all in turn.
"""
