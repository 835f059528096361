"""How elements travel: as they are, cast, or as bytes with a scale for each block.

An encoding counts, writes and reads its bytes. It knows no parameters, ranks or messages. Doors: ``Encoding``, and its
kinds ``Int8`` and ``NF4``::

    x (n,)  -- encode -->  payload, Encoding.nbytes(n) bytes  -- decode -->  x, within Encoding.error
"""
