"""The strategy of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Unpack

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy as TrainerDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from thunder_zero.capture.arguments import Arguments
from thunder_zero.capture.zero_module import ZeroModule
from thunder_zero.lightning.fabric import TIMEOUT, Sharding, full_model_state_dict, require_supported
from thunder_zero.plan.policy import Policy
from thunder_zero.sharded.dtensors import load_parts
from thunder_zero.sharded.frozen import encoded_values
from thunder_zero.sharded.full_state_dict import full_optimizer_state_dict, shard_optimizer_state_dict

from thunder.core.module import ThunderModule

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer


class ZeroTrainerStrategy(TrainerDDPStrategy):
    """DDP, ZeRO-1, ZeRO-2 or ZeRO-3 in Thunder, as a strategy of Lightning's Trainer.

    >>> trainer = Trainer(accelerator="cpu", devices=2, strategy=ZeroTrainerStrategy(stage=3))
    >>> trainer.fit(lightning_module, loader)

    One submodule of the LightningModule, such as ``self.net``, must have all parameters. The strategy shards it before
    ``configure_optimizers``. Hooks such as ``training_step`` run as Python, and their calls of ``self.net(batch)`` are
    compiled. Checkpoints have full tensors under the plain module's names, as without a strategy. See
    :class:`ZeroStrategy` for the arguments and the errors.
    """

    def __init__(
        self,
        policy: Policy | int | None = None,
        *,
        mesh_shape: tuple[int, int] | None = None,
        jit_options: Mapping[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        **arguments: Unpack[Arguments],
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._sharding = Sharding(policy, mesh_shape, jit_options, arguments)
        self._sharded: ZeroModule | None = None

    @property
    def sharded(self) -> ZeroModule:
        """The sharded model, for functions such as ``tz.print_trace``."""
        if self._sharded is None:
            raise RuntimeError("the Trainer has not sharded a model yet; call trainer.fit first")
        return self._sharded

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, since checkpoints are loaded into the shards that ``setup`` creates."""
        return True

    def setup_environment(self) -> None:
        require_supported(self.precision_plugin)
        if self._layer_sync is not None:
            raise ValueError("ZeroTrainerStrategy does not support sync_batchnorm=True; leave it out")
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ValueError(
                    f"ZeroTrainerStrategy does not support the callback {type(callback).__name__}, which copies full "
                    f"weights; leave it out, and average them by tz.EMA(trainer.strategy.sharded)"
                )
        self.accelerator.setup(trainer)
        module = only_submodule(self.lightning_module)
        forward = vars(module).get("forward")
        if isinstance(forward, Redirect):  # an earlier call of the Trainer has sharded the model
            self._sharded = forward.model
        else:
            self.precision_plugin.convert_module(self.lightning_module)
            self._sharded = self._sharding.shard(module, self.root_device)
            vars(module)["forward"] = Redirect(self._sharded, forward)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                optimizer.register_load_state_dict_pre_hook(shard_optimizer_state_dict, prepend=True)
        self.setup_precision_plugin()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure (forward and backward) before the step, since the step needs gradients when it begins."""
        results = [closure()]

        def take_result() -> Any:
            if not results:
                raise RuntimeError(
                    f"{type(optimizer).__name__} evaluates the loss more than once in a step, which the strategy does "
                    f"not support; choose another optimizer"
                )
            return results.pop()

        return super().optimizer_step(optimizer, take_result, model, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Defer reductions for all micro-batches of ``accumulate_grad_batches`` except the last."""
        return self.sharded.no_sync()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return full_model_state_dict(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        load_parts(module, encoded_values(module, checkpoint["state_dict"]), module.state_dict(), strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return full_optimizer_state_dict(plain, wanted=self.is_global_zero)

    def teardown(self) -> None:
        """Tear down the Trainer's state, and leave the shards on their device."""
        module = self.lightning_module
        self._lightning_module = None  # otherwise Lightning would move its tensors to the CPU
        super().teardown()
        self._lightning_module = module


class Redirect:
    """A replacement for a plain module's ``forward``. It calls the sharded model, which traces the original forward."""

    def __init__(self, model: ZeroModule, forward: Callable[..., Any] | None) -> None:
        self.model = model
        self._attributes = {} if forward is None else {"forward": forward}  # set while the module is traced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(self.model.plain)
        del attributes["forward"]
        attributes |= self._attributes
        try:
            return self.model(*args, **kwargs)
        finally:
            attributes["forward"] = self


def only_submodule(module: LightningModule) -> nn.Module:
    params = [name for name, _ in module.named_parameters(recurse=False)]
    children: dict[str, nn.Module] = {
        name: child for name, child in module.named_children() if any(True for _ in child.parameters())
    }
    if params or len(children) != 1:
        raise ValueError(
            f"{type(module).__name__} has parameters in {', '.join([*params, *children]) or 'no submodule'}, and the "
            f"strategy shards one submodule: put all parameters into one, such as self.net, and call self.net(batch) "
            f"in training_step"
        )
    ((name, child),) = children.items()
    if isinstance(child, ThunderModule):
        raise TypeError(
            f"{type(module).__name__}.{name} is jitted already; leave the plain module there, and give the strategy "
            f"the arguments of ZeroTransform, and jit_options"
        )
    if child._forward_pre_hooks or child._forward_hooks:
        raise ValueError(
            f"{type(module).__name__}.{name} has forward hooks, which would run twice, outside of the program and in "
            f"it; move their code into its forward"
        )
    return child
