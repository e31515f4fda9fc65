"""Step: losses. The model's cross-entropy, in chunks where wanted, and plugins' terms go through the one normaliser."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchturbo.engine.hooks import Hooks, PluginError, name_of
from torchturbo.engine.model import base_model
from torchturbo.errors import Problem, fail
from torchturbo.objectives import chunked
from torchturbo.objectives.chunked_check import obstacle
from torchturbo.objectives.normalise import Normaliser, Term, own_loss_function

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context
    from torchturbo.plugins.contract import Plugin

METRICS = frozenset(
    {"loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos", "train_loss", "eval_loss"}
    | {"num_input_tokens_seen", "tokens_per_second", "mfu", "mfu_causal", "hfu"}
    | {"moe_aux_loss", "moe_z_loss", "cap_loss"}
)
"""Names under which the Trainer, the engine's observers and its objectives log."""
NUMBERED = re.compile(r"mtp_\d+_loss|dspark_(loss|accept(ed)?_\w+|confidence_\w+)")
"""Further names of metrics, one a depth or a position."""
CHUNKED, CHUNK_SIZE = "loss_chunk.enabled", "loss_chunk.chunk_size"


def check(model: nn.Module, config: EngineConfig, context: Context) -> list[Problem]:
    """Return a problem for each plugin whose loss term the model's loss has no place for, and for a loss in one piece."""
    base = base_model(model)
    problems = _chunking_problems(base, config) + _name_problems(context.hooks)
    if computes_causal_cross_entropy(base):
        return problems
    message = f"{type(base).__name__} computes a loss of its own, which takes no further term"
    return problems + [
        Problem("", f"plugin {name_of(plugin)}", message, "use the plugin with a causal language model")
        for plugin in context.hooks.overriding("loss_term")
    ]


def _chunking_problems(base: nn.Module, config: EngineConfig) -> list[Problem]:
    if not config.loss_chunk.enabled or (found := obstacle(base)) is None:
        return []
    return [Problem(config.origin(CHUNKED).place, CHUNKED, found, "set it to false")]


def _name_problems(hooks: Hooks) -> list[Problem]:
    """Return a problem for each plugin whose loss term would be logged over another metric."""
    return [
        Problem(
            "", f"plugin {name_of(plugin)}", "its loss term would be logged over the metric of this name", "rename it"
        )
        for plugin in hooks.overriding("loss_term")
        if name_of(plugin) in METRICS or NUMBERED.fullmatch(name_of(plugin))
    ]


def apply(model: nn.Module, config: EngineConfig, context: Context) -> None:
    """Install the normaliser on a model whose loss is Transformers' causal-LM cross-entropy, and the chunks below it.

    Any other loss (an own loss function, an encoder-decoder) stays with the framework, whose own scaling then holds.
    """
    base = base_model(model)
    size = config.resolved(CHUNK_SIZE)
    if config.loss_chunk.enabled:
        if problems := _chunking_problems(base, config):
            fail(problems)
        chunked.install(base, size)
    if computes_causal_cross_entropy(base):
        context.normaliser = Normaliser(
            ranks=context.world_size, summed=context.sharded and not context.averaged, sp_size=context.plan.sp_size
        )
        context.normaliser.terms += [term_of(plugin, context.hooks) for plugin in context.hooks.overriding("loss_term")]
        context.normaliser.install(model, base)


def undo(model: nn.Module) -> None:
    """Give a model its own loss back, in one piece."""
    base = base_model(model)
    Normaliser.remove(base)
    chunked.remove(base)


def term_of(plugin: Plugin, hooks: Hooks) -> Term:
    """Return a plugin's loss term as the normaliser takes it."""

    def value(outputs: Any, batch: Mapping[str, Any]) -> Any:
        return _scalar(hooks.call_one(plugin, "loss_term", outputs, batch), plugin, "loss_term")

    def weight(batch: Mapping[str, Any]) -> Any:
        return _scalar(hooks.call_one(plugin, "loss_weight", batch), plugin, "loss_weight")

    weighted = plugin in hooks.overriding("loss_weight")
    return Term(name_of(plugin), value, weight if weighted else None)


def _scalar(found: Any, plugin: Plugin, hook: str) -> Any:
    """Return what a hook of the loss returned; the engine's own errors about anything else would not name the plugin."""
    if found is None or (isinstance(found, Tensor) and not found.shape):
        return found
    what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"{type(found).__name__} {found!r:.60}"
    raise PluginError(f"plugin {name_of(plugin)}: {hook}: expected a scalar tensor or None, got {what}")


def computes_causal_cross_entropy(base: nn.Module) -> bool:
    """Return whether a model computes its loss by Transformers' own function and takes the arguments of its trainer."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss = own_loss_function(base)
    if getattr(loss, "replaces", loss) is not ForCausalLMLoss:  # a faster one says what it stands for
        return False
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return False
    if hasattr(base, "accepts_loss_kwargs"):
        return bool(base.accepts_loss_kwargs)
    parameters = inspect.signature(base.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
