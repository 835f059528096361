"""Everything that talks to ``torch.distributed``: groups, collectives, agreement between ranks.

The doors: ``backends.model_transport`` makes the object that gathers parameters and averages gradients, ``agree.py``
makes all ranks refuse what one refuses, ``small_collectives.py`` carries numbers, objects and DTensors. Other rooms
launch no collectives of their own.
"""
