"""LLaMA-Factory's own trainer classes with the engine underneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchturbo.adapters import base
from torchturbo.adapters.hf_trainer import TurboMixin
from torchturbo.adapters.llama_factory.mapping import accuracy_problems
from torchturbo.checkpoint.record import write_record
from torchturbo.engine.hooks import Hooks
from torchturbo.errors import Problem, fail

if TYPE_CHECKING:
    from torchturbo.adapters.llama_factory.said import Said
    from torchturbo.engine.config import EngineConfig
    from torchturbo.plugins.contract import Plugin

FRAMEWORK = "llama_factory"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass
class Launch:
    """What the trainer of one launch needs to know beyond the arguments that LLaMA-Factory hands it."""

    config: EngineConfig
    said: Mapping[str, Said]
    plugins: Sequence[Plugin] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    """What a resumed run must share with this one beyond its training arguments."""
    hooks: Hooks = field(default_factory=Hooks)
    """The hooks of the trainer, once it is made."""
    grain: int = 1
    """Of how many tokens sequences are made: the block of a diffusion model, once its model is known."""


class LlamaFactoryMixin(TurboMixin):
    """What is different from any other Trainer where LLaMA-Factory makes the trainer."""

    turbo_framework = FRAMEWORK
    turbo_announces = False  # here, with LLaMA-Factory's own places
    launch: Launch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.turbo_facts = self.launch.facts
        super().__init__(*args, turbo_config=self.launch.config, turbo_loaded=self.launch.plugins, **kwargs)
        self.launch.hooks = self.turbo.context.hooks

    def _start_engine(self) -> None:
        if (problem := quantised(self.model)) is not None:
            fail([problem])
        super()._start_engine()
        said = self.launch.said.get(ACCUMULATION)
        if said is not None:
            base.report_accumulation(self.turbo.config, self.turbo_plan, said.value, said.place)
        base.announce(self.turbo.config, self.turbo_plan)

    def _other_losses(self) -> list[Problem]:
        """Return a problem for its accuracy too, in a run that evaluates alone and whose model was not looked at before."""
        found = accuracy_problems(self.launch.said)
        return [*super()._other_losses(), *found]

    def _settle_loss_owner(self) -> None:
        """Leave the scaling to the normaliser where there is one.

        LLaMA-Factory takes the token count away from a model with a processor, so that Trainer divides by the
        accumulation steps; a normalised loss would be divided twice. Its trainers hand ``compute_loss`` on as it
        came, except with a loss of their own, which has no normaliser here.
        """
        super()._settle_loss_owner()
        if self.turbo.context.normaliser is not None:
            self.model_accepts_loss_kwargs = True
            self._plain_loss = True

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save the model; beside the final one stands the record of the run."""
        super().save_model(output_dir, *args, **kwargs)
        if output_dir is None and self.args.should_save:
            write_record(Path(self.args.output_dir), self.turbo.config, self.turbo_run(), self.state.global_step)


def engine_trainer(trainer_class: type, launch: Launch) -> type:
    """Return a subclass of one of LLaMA-Factory's trainer classes with the engine underneath."""
    name = f"Turbo{trainer_class.__name__}"
    return type(name, (LlamaFactoryMixin, trainer_class), {"__doc__": trainer_class.__doc__, "launch": launch})


def quantised(model: Any) -> Problem | None:
    """Return a problem for a model whose own folder says that it is quantised."""
    config = getattr(model, "config", None)
    if model is None or not (getattr(model, "is_quantized", False) or getattr(config, "quantization_config", None)):
        return None
    name = getattr(config, "name_or_path", "") or type(model).__name__
    message = "the model is quantised, and quantised models are not trained here"
    return Problem(name, "", message, "train the model that it was made from")
