"""A sharded model under Hugging Face's Trainer: who wraps it, what a rank's loss means, how gradients are clipped."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torchturbo.engine.backends.fsdp2.clip import clip_grad_norm
from torchturbo.engine.backends.fsdp2.shard import reshard

if TYPE_CHECKING:
    from torch import Tensor

    from torchturbo.engine.engine import Engine


class DistributedMixin:
    """What :class:`torchturbo.adapters.hf_trainer.TurboMixin` does where FSDP2 holds the parameters.

    To Trainer, and to whoever overrides its methods, a loss is what is averaged over the ranks, as under DDP. FSDP2 sums
    gradients here, so every loss is divided by their number before it is differentiated.
    """

    turbo: Engine

    if TYPE_CHECKING:  # Trainer's own attributes, which its constructor sets
        args: Any
        model: Any
        accelerator: Any

    def _leave_the_model_to_the_engine(self) -> None:
        """Let accelerate compile the model where that was asked for, and neither wrap it nor move what is sharded."""
        prepare = functools.partial(
            self.accelerator.prepare_model, device_placement=not self.turbo.context.sharded, evaluation_mode=True
        )
        self.accelerator.prepare_model = lambda model, *_, **__: prepare(model)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.turbo.context.sharded:
            reshard(self.model)
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave a sharded model where its backend put it, which is host memory where it is offloaded."""
        if not self.turbo.context.sharded:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on one micro-batch, and return a loss whose mean over ranks is the global one."""
        if not self.turbo.context.sharded:
            return super().training_step(*args, **kwargs)  # type: ignore[misc, no-any-return]
        ranks, backward = self.turbo.context.world_size, self.accelerator.backward
        self.accelerator.backward = lambda loss, **options: backward(loss / ranks, **options)
        try:
            return super().training_step(*args, **kwargs)  # type: ignore[misc, no-any-return]
        finally:
            self.accelerator.backward = backward

    def _clip_grad_norm(self, model: Any) -> Any:
        if not self.turbo.context.sharded:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        return clip_grad_norm(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if not self.turbo.context.sharded:
            return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]
        norm = clip_grad_norm(model.parameters()) if grad_norm is None else grad_norm
        return norm.item() if hasattr(norm, "item") else norm
