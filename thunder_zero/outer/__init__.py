"""Several sites train one model: each site alone, with an outer step between them. ``tz.sites``, ``tz.DiLoCo``.

::

    site a: torchrun, its own groups          TCPStore            site b: torchrun, its own groups
    rank 0 [rows 0] --- leads the site --->  who is there  <--- leads the site --- rank 0 [rows 0]
    rank 1 [rows 1]                                                                 rank 1 [rows 1]
       '---------- rows 1 of the change since the last exchange, encoded ------------'

``meeting.py`` decides who takes part in an exchange, ``exchange.py`` sends rows between ranks of equal place,
``rounds.py`` runs both in a thread until all agree that it succeeded, and ``diloco.py`` steps.
"""
