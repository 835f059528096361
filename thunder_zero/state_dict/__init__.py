"""State dicts of sharded models and their optimizers, full or as DTensors.

The functions of ``torch.distributed.checkpoint.state_dict`` under their names; ``api.py`` is the door. The listing in
``contents.py`` and the writing in ``all_or_nothing.py`` serve ``checkpoint/``, too.
"""

from torch.distributed.checkpoint.state_dict import StateDictOptions

from thunder_zero.state_dict.api import (
    full_state_dict,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "StateDictOptions",
    "full_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
