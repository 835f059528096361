"""Strategies for Lightning's Fabric and Trainer.

Only this package imports Lightning, and ``import thunder_zero`` does not import it. The strategies are for the package
``lightning``, not for ``lightning_fabric`` or ``pytorch_lightning``, since a Fabric or a Trainer accepts only
strategies of its own package. Calls take these ways::

    Fabric    script -> Fabric's wrapper -> Forward -> ZeroModule -> the plain module, with shards
                                 \\______________________________________/
                                  the wrapper also refers to the plain module

    Trainer   training_step -> self.net, the plain module -> Redirect, its new forward -> ZeroModule -> its old forward
"""

from importlib import import_module

try:
    import_module("lightning.fabric")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"thunder_zero.lightning needs Lightning ({error}); run pip install -e '.[lightning]' in a checkout"
    ) from error

from thunder_zero.lightning.fabric import ZeroStrategy as ZeroStrategy
from thunder_zero.lightning.fabric import full_model_state_dict as full_model_state_dict
from thunder_zero.lightning.fabric import zero_module as zero_module
from thunder_zero.lightning.trainer import ZeroTrainerStrategy as ZeroTrainerStrategy

__all__ = ["ZeroStrategy", "ZeroTrainerStrategy", "full_model_state_dict", "zero_module"]
