"""Serial heads: what the objective asks of heads for multi-token prediction, whatever a family's layers are like."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from torchturbo.objectives.heads import ExtraHeads
from torchturbo.objectives.taps import Call


class SerialHeads(ExtraHeads):
    """Heads of which each continues from the state that the one before it left, and predicts one token further.

    The objective calls, in each training forward and after the model's own: :meth:`first` once, and then
    :meth:`depth` for each of ``depths``. Subclasses define both, and :meth:`watched`.
    """

    depths: int
    """Number of heads, D."""

    def watched(self, base: nn.Module) -> Mapping[str, nn.Module]:
        """Return the modules of the model whose calls the heads need, under names of their own choice.

        One of them is ``"layer"``: the decoder layer whose arguments (mask, positions) the heads' layers get too.
        """
        raise TypeError(f"{type(self).__name__} does not say what it watches")

    def first(self, calls: Mapping[str, Call]) -> Tensor:
        """Return the model's state [B, S, ...] that depth 1 continues from, with its graph."""
        raise TypeError(f"{type(self).__name__} does not say where it begins")

    def depth(self, at: int, state: Tensor, embedded: Tensor, calls: Mapping[str, Call]) -> tuple[Tensor, Tensor]:
        """Run one head.

        Parameters
        ----------
        at
            0 for depth 1.
        state
            [B, S, ...] that the depth before left, or :meth:`first` returned.
        embedded
            [B, S, H], the embedding of the token ``at + 1`` places further.
        calls
            What was watched in the forward under way.

        Returns
        -------
        tuple
            The state for the next depth, and the hidden states [B, S, H] from which the model's head makes logits.

        """
        raise TypeError(f"{type(self).__name__} does not say what a depth is")
