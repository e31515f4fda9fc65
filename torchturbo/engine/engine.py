"""The engine: a configuration, the facts of this process, and the pipeline that turns a model into a trainable one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from torchturbo.engine import pipeline
from torchturbo.engine.context import Context
from torchturbo.engine.model import base_model, set_cache
from torchturbo.engine.steps import heads
from torchturbo.objectives.heads import extra_heads
from torchturbo.parallel.mesh import MeshPlan, is_sharded

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torchturbo.engine.config import EngineConfig
    from torchturbo.errors import Problem


OWNERS: WeakKeyDictionary[nn.Module, ref[Engine]] = WeakKeyDictionary()
"""The engine that prepared a model last."""
CACHES: WeakKeyDictionary[nn.Module, bool | None] = WeakKeyDictionary()
"""How a prepared model's key-value cache was before the first engine turned it off."""


class Engine:
    """Applies one configuration to a model and wraps its forward passes."""

    def __init__(self, config: EngineConfig, context: Context) -> None:
        self.config = config
        self.context = context
        self._use_cache: bool | None = None
        context.plan = MeshPlan.of(config, context.world_size)
        context.sharded = is_sharded(config, context.world_size)

    def problems(self, model: nn.Module) -> list[Problem]:
        """Return what the steps find wrong with a model; its weights may be on the meta device still.

        What an earlier engine put into the model is taken out first: it is no part of what the steps look at.
        """
        pipeline.undo(model)
        return pipeline.problems(model, self.config, self.context)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Run the pipeline's steps on a model, in place, after those of an earlier engine are undone.

        Training goes without a key-value cache: nothing reads it, recomputation would fill it twice, and with it
        Transformers does not look for document boundaries in packed rows.
        """
        pipeline.undo(model)
        base, found = base_model(model), set_cache(model, False)
        if found or base not in CACHES:  # off, it may be an earlier engine's doing
            CACHES[base] = found
        self._use_cache = CACHES[base]
        pipeline.apply(model, self.config, self.context)
        OWNERS[base] = ref(self)
        return model

    def owns(self, model: nn.Module) -> bool:
        """Return whether this engine was the last to prepare a model, and has not released it."""
        owner = OWNERS.get(base_model(model))
        return owner is not None and owner() is self

    @contextmanager
    def cache_as_found(self, model: nn.Module) -> Iterator[None]:
        """Give a model its key-value cache back for this block: what is saved should generate with it."""
        set_cache(model, self._use_cache)
        try:
            yield
        finally:
            set_cache(model, False)

    def release(self, model: nn.Module) -> nn.Module:
        """Make a trained model ready for use, in place: as its class wrote it, with the weights that were trained.

        Where FSDP2 holds it, it stays sharded, and divided experts stay divided: all ranks use it together.
        """
        set_cache(model, self._use_cache)
        base = base_model(model)
        trained = extra_heads(base)
        pipeline.undo(model)
        heads.keep(model, trained)
        for known in (OWNERS, CACHES):
            known.pop(base, None)
        return model.eval()

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model runs forward, in training and in evaluation alike."""
        dtype = self.context.autocast_dtype
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.context.runtime.device_type, dtype=dtype)
