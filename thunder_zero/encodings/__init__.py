"""Encodes elements for the wire: unchanged, cast, or as bytes with a scale for each block.

An encoding writes and reads payloads, and computes their size, independently of parameters, ranks and messages.
Entries: ``Encoding``, and its subclasses ``Int8`` and ``NF4``::

    x (n,)  -- encode -->  payload, Encoding.nbytes(n) bytes  -- decode -->  x, within Encoding.error
"""
