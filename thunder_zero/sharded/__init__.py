"""One rank's share of a model: what it holds, and what training code and traces do with it.

``state.py`` is all of it; ``Share`` there, what calls read and change. Its doors: ``calls.py`` for compiled traces,
``sharded_model.py`` for everything that is given a model (checkpoints, state dicts, clipping), ``initial_values/``
before there is a model. Nothing here knows Thunder, and messages travel through ``comm/`` only.
"""
