"""The DSpark term of a model's loss: from the states of its training forward to the draft's loss and metrics.

Everything that comes from the target is detached: its inner and last states, its embeddings, its head. So the term adds
nothing to the gradients of any parameter but the draft's.

Under sequence parallelism the ranks of a group put their parts of the states together, which without gradients is one
gather, and share the blocks. A draft of a dense target looks back over the whole row, so that a halo would not do. What
a rank computes of the context for its own blocks, and the gradients of that, add up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchturbo.engine.model import input_embeddings
from torchturbo.objectives.chunked import head_of, linear_of
from torchturbo.objectives.dspark import metrics
from torchturbo.objectives.dspark.anchors import Blocks, Sequences, draw_blocks
from torchturbo.objectives.dspark.backbone import Draft, DraftStates
from torchturbo.objectives.dspark.loss import Alphas, Head, Slots, confidence_loss, logit_losses
from torchturbo.objectives.dspark.visibility import Visibility
from torchturbo.objectives.normalise import Normaliser
from torchturbo.objectives.taps import Call, Taps
from torchturbo.parallel.all_to_all import gathered
from torchturbo.parallel.ulysses import SHARED, MicroBatch


@dataclass(frozen=True)
class Settings:
    """How a draft is trained."""

    most: int
    """Anchors of a row at most."""
    gamma: float
    """Slots after which the loss weight has fallen to 1 / e; 0 lets all count the same."""
    alphas: Alphas
    chunk_size: int
    """Rows of logits at once."""
    seed: int = 0
    """Begins the draws of this run."""


class DSpark:
    """The term of one model.

    Parameters
    ----------
    base
        The Transformers model, with its draft attached.
    draft
        Its draft.
    taps
        Of the model that is called.
    normaliser
        Takes the metrics.
    settings
        How the draft is trained.
    step
        Returns the optimizer steps done; anchors are drawn anew in each.

    """

    def __init__(
        self,
        base: nn.Module,
        draft: Draft,
        taps: Taps,
        normaliser: Normaliser,
        settings: Settings,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        self.base, self.draft, self.taps, self.normaliser = base, draft, taps, normaliser
        self.settings, self.step = settings, step
        body = _body(base)
        self._body = taps.watch(body)
        self._calls = [taps.watch(_tapped(base, body, at)) for at in draft.taps]
        names = metrics.names(draft.block_size, confidence=draft.confidence is not None)
        normaliser.ratios += [name for name in names if name not in normaliser.ratios]

    def blocks(self, sequences: Sequences) -> Blocks:
        """Return the blocks of a micro-batch: the same ones whenever it is asked within a step."""
        return draw_blocks(
            sequences,
            self.settings.most,
            self.settings.seed,
            self.step(),
            size=self.draft.block_size,
            mask_token_id=self.draft.mask_token_id,
        )

    def weight(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the weights of a micro-batch's slots, summed: its part of D."""
        return self.blocks(Sequences.of(batch)).weights(self.settings.gamma).sum()

    def value(self, outputs: Any, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the losses of this rank's slots, summed by their weights, and log the metrics.

        None without a gradient, for which nothing is tapped.
        """
        if self.taps.batch is None:
            return None
        with torch.no_grad():
            features = self.draft.features([_states(call).detach() for call in self._calls])
            teacher = _states(self._body).detach()
            sequences = Sequences.of(self.taps.batch).to(teacher.device)
            blocks = self.blocks(sequences)
            if (shared := batch.get(SHARED)) is not None:
                features, teacher, blocks = _shared(shared, features, teacher, blocks)
            embeddings: Any = input_embeddings(self.base)
            embedded = embeddings(blocks.ids)
        states: DraftStates = self.draft(features, embedded, Visibility.of(blocks, sequences))
        return self._loss(states, teacher, blocks)

    def _loss(self, states: DraftStates, teacher: Tensor, blocks: Blocks) -> Tensor:
        """Return the summed loss of slots with states [B, A, K, H], given the target's last states [B, S, H]."""
        draft, alphas = self.draft, self.settings.alphas
        weights = blocks.weights(self.settings.gamma)
        # Slots that do not count never meet the vocabulary. One is kept where none counts, with weight 0: every
        # parameter gets a gradient on every rank.
        kept = blocks.valid.flatten().nonzero().squeeze(1)
        kept = kept if len(kept) else kept.new_zeros(1)
        markov = draft.markov
        latent = None if markov is None else _flat(markov.latent(blocks.previous, states.head))[kept]
        rows = torch.arange(len(teacher), device=teacher.device)[:, None, None].expand_as(blocks.teacher)
        own = rows.flatten()[kept], blocks.teacher.flatten()[kept]
        counted = weights.flatten()[kept]
        slots = Slots(_flat(states.head)[kept], latent, teacher[own], blocks.labels.flatten()[kept], counted)
        w2 = None if markov is None else markov.markov_w2.weight
        total, accepted = logit_losses(slots, self._head(), w2, alphas, self.settings.chunk_size)
        chances = torch.zeros(blocks.valid.numel(), dtype=accepted.dtype, device=accepted.device)
        found = list(metrics.acceptance(chances.index_copy(0, kept, accepted).view_as(blocks.valid), blocks.valid))
        if draft.confidence is not None:
            previous = None if markov is None else markov.embed(blocks.previous.flatten()[kept])
            logits = draft.confidence(_flat(states.confidence)[kept], previous)
            total = total + alphas.confidence * confidence_loss(logits, accepted, counted)
            found.append(metrics.confidence(logits.detach(), accepted, counted))
        for name, numerator, denominator in found:
            self.normaliser.ratio(name, numerator, denominator)
        return total

    def _head(self) -> Head:
        """Return the target's head; read in the model's forward hook, while a sharded model's root unit is whole."""
        linear: Any = linear_of(head_of(self.base))
        return Head(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def _shared(shared: MicroBatch, features: Tensor, teacher: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor, Blocks]:
    """Return whole features [B, S, m*H] and last states [B, S, H] of a group's parts, and this rank's blocks."""
    whole = [gathered(part, shared.group, 1)[:, : shared.length] for part in (features, teacher)]
    return whole[0], whole[1], blocks.of_rank(shared.rank, shared.size)


def _flat(states: Tensor) -> Tensor:
    """Return [B, A, K, X] as [B * A * K, X]."""
    return states.flatten(0, 2)


def _body(base: Any) -> nn.Module:
    """Return the decoder of a Transformers model: embeddings, layers, final norm."""
    body: nn.Module = base.get_decoder()
    return body


def _tapped(base: nn.Module, body: Any, layer: int) -> nn.Module:
    """Return the module whose output a tap is: a decoder layer, or the embeddings for -1."""
    module: Any = input_embeddings(base) if layer == -1 else body.layers[layer]
    return module  # type: ignore[no-any-return]


def _states(call: Call) -> Tensor:
    """Return the hidden states that a module returned."""
    output = call.output
    if isinstance(output, Mapping):
        output = output["last_hidden_state"]
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states
