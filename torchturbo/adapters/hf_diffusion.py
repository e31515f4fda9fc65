"""Data of a diffusion model under Hugging Face's Trainer: every micro-batch is doubled and gets its noise.

It happens where a step's micro-batches have been fetched, whatever loader and collator they come from, and before
anything counts their tokens: there the optimizer step is known from which the noise follows, so a resumed run has the
noise of a whole one, and nothing depends on how far a loader fetches ahead.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchturbo.adapters.hf_data import own_losses
from torchturbo.engine.model import base_model
from torchturbo.engine.steps.diffusion import installed
from torchturbo.errors import Problem, fail
from torchturbo.objectives.diffusion.models import SHIFTED, fill_token, mask_token, place_of, token_problems
from torchturbo.objectives.diffusion.noise import DOUBLED, EVALUATION, Noise
from torchturbo.objectives.diffusion.probe import Failed, obstacle

if TYPE_CHECKING:
    from torchturbo.engine.engine import Engine

ALONE = "leave the loss to the model, and add to it by a plugin's loss_term"


class DiffusionMixin:
    """What :class:`torchturbo.adapters.hf_trainer.TurboMixin` does about the data of a diffusion model."""

    turbo: Engine

    if TYPE_CHECKING:  # Trainer's own attributes, which its constructor sets
        args: Any
        model: Any
        state: Any
        processing_class: Any

    _noise: Noise | None = None

    def _settle_diffusion(self) -> None:
        """Find out the noise of a diffusion model, once Trainer is made; refuse what has no place beside it."""
        base: Any = base_model(self.model)
        if installed(base) is None:
            return
        config, tokenizer = base.config, self.processing_class
        problems = [Problem(place_of(config), "", *found) for found in token_problems(config, tokenizer)]
        problems += self._other_losses()
        hidden, filler = mask_token(config, tokenizer), fill_token(config, tokenizer)
        if problems or hidden is None or filler is None:
            fail(problems)
        settings, seed = self.turbo.config.diffusion, self.args.data_seed
        self._noise = Noise(
            settings.bd_mask_low,
            settings.bd_mask_high,
            settings.bd_block_size,
            hidden,
            filler,
            seed=self.args.seed if seed is None else seed,
            divisor=self.turbo.context.plan.sp_size,
        )

    def _other_losses(self) -> list[Problem]:
        """Return a problem for each way in which something else than the model makes the loss, or reads its logits."""
        problems = []
        if self.turbo.context.normaliser is None:
            problems.append(Problem("", "", SHIFTED, ALONE))
        for kind in own_losses(type(self)):
            message = f"{kind.__name__}.compute_loss would see a doubled batch, of which half the tokens have no label"
            problems.append(Problem("", "", message, ALONE))
        if getattr(self.args, "predict_with_generate", False):
            message = "generation writes token by token, which a diffusion model does not"
            remedy = "set it to false, and decode with torchturbo.objectives.diffusion.decode"
            problems.append(Problem("predict_with_generate", "", message, remedy))
        return problems

    def _mask_blocks(self, micro_batches: MutableSequence[Any], step: int) -> None:
        """Put a doubled batch in the place of each micro-batch of a diffusion model that has labels."""
        if self._noise is None or not micro_batches:
            return
        self._probe()
        for at, batch in enumerate(micro_batches):
            if DOUBLED not in batch and batch.get("labels") is not None:
                micro_batches[at] = self._noise(batch, step)

    def _probe(self) -> None:
        """Refuse a model that does not keep to its masks, before its first batch. A collective."""
        base: Any = base_model(self.model)
        diffusion = installed(base)
        if diffusion is None or diffusion.probed:
            return
        size, divisor = base.get_input_embeddings().num_embeddings, self.turbo.context.plan.sp_size
        found = obstacle(self.model, size, divisor, self.args.device, self.turbo.autocast())
        if isinstance(found, Failed):  # some models look at the number of rows
            diffusion.every_row = True
            found = obstacle(self.model, size, divisor, self.args.device, self.turbo.autocast())
        if found is not None:
            message = f"{type(base).__name__} can't be trained by block diffusion: it {found}"
            fail([Problem(place_of(base.config), "", message, "use another model, or another attn_implementation")])
        diffusion.probed = True

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict one batch: a diffusion model's has the same noise in all evaluations of a run, and its noisy half's logits.

        Where ranks share sequences, and of a model without ``logits_to_keep``, the forward gives those of both halves.
        """
        batches = [inputs]
        self._mask_blocks(batches, EVALUATION)
        loss, logits, labels = super().prediction_step(model, batches[0], *args, **kwargs)  # type: ignore[misc]
        doubled = batches[0].get(DOUBLED)
        return loss, logits if doubled is None else _noisy(logits, doubled.length), labels

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count a batch's tokens once, and not again as noise."""
        if DOUBLED in inputs:
            length = inputs[DOUBLED].length
            halved = {name: _half(value, length) for name, value in inputs.items()}
            super()._track_num_input_tokens(halved)  # type: ignore[misc]
        else:
            super()._track_num_input_tokens(inputs)  # type: ignore[misc]


def _noisy(outputs: Any, length: int) -> Any:
    """Return outputs, one or several, with the tokens [B, 2L, ...] of both halves cut to the first L."""
    if isinstance(outputs, list | tuple):
        return type(outputs)(_noisy(one, length) for one in outputs)
    doubled = isinstance(outputs, Tensor) and outputs.dim() == 3 and outputs.shape[1] == 2 * length
    return outputs[:, :length] if doubled else outputs


def _half(value: Any, length: int) -> Any:
    return value[:, :length] if isinstance(value, Tensor) and value.dim() == 2 else value
