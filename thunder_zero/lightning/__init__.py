"""Strategies for Lightning's Fabric and Trainer.

Only this room imports Lightning, and ``import thunder_zero`` does not import this room. The strategies are for the
package ``lightning``, which LitGPT uses, and not for ``lightning_fabric`` or ``pytorch_lightning``: a Fabric and a
Trainer accept only strategies of their own package.

    script -> Fabric's wrapper -> Forward -> ZeroModule -> the plain module, with shards
                       \\______________________________________/
                        the wrapper refers to the plain module, too

    training_step -> self.net, the plain module -> Redirect, its forward -> ZeroModule -> its own forward, in traces
"""

from importlib import import_module

try:
    import_module("lightning.fabric")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"thunder_zero.lightning needs Lightning ({error}); run pip install -e '.[lightning]' in a checkout"
    ) from error

from thunder_zero.lightning.fabric import ZeroStrategy as ZeroStrategy
from thunder_zero.lightning.fabric import zero_module as zero_module
from thunder_zero.lightning.sharding import full_model_state_dict as full_model_state_dict
from thunder_zero.lightning.trainer import ZeroTrainerStrategy as ZeroTrainerStrategy

__all__ = ["ZeroStrategy", "ZeroTrainerStrategy", "full_model_state_dict", "zero_module"]
