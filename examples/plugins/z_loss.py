"""Plugin: the z-loss, which keeps the softmax's normaliser near 1 so that logits do not drift away in long runs.

    torchturbo train ... --tt_plugin examples/plugins/z_loss.py:examples/plugins/z_loss.yaml

    z_loss = coefficient * mean over target tokens of log(Z)^2,   log(Z) = logsumexp of the token's logits

From PaLM (Chowdhery et al. 2022, section 5, https://arxiv.org/abs/2204.02311), which uses 1e-4. The mean runs over
all target tokens of an optimizer step, on every rank and in every micro-batch, like the loss it is added to. What it
contributes is logged as ``z_loss``.
"""

from __future__ import annotations

from torchturbo.plugins import Plugin, register

IGNORED = -100
"""Label of a token that is no target."""


@register()
class ZLoss(Plugin):
    """Adds the z-loss to the loss of each micro-batch."""

    name = "z_loss"
    settings_schema = {
        "type": "object",
        "properties": {
            "coefficient": {
                "type": "number",
                "exclusiveMinimum": 0,
                "default": 1e-4,
                "description": "Weight of the term beside the cross-entropy.",
            },
        },
        "additionalProperties": False,
    }

    def problems(self, model, run):
        if run.config.loss_chunk.enabled:
            return ["it needs the logits, which loss_chunk.enabled never holds at once; turn one of the two off"]
        return []

    def loss_weight(self, batch, run):
        """Return the number of target tokens, a scalar: what the sum below is divided by."""
        return self._targets(batch).sum()

    def loss_term(self, outputs, batch, run):
        """Return the sum over this micro-batch's target tokens; the engine divides by all of the step's."""
        logits = outputs["logits"]  # [B, T, V]
        if batch.get("shift_labels") is None:
            logits = logits[:, :-1]  # position t predicts token t + 1
        log_z = logits.float().logsumexp(-1)  # [B, T - 1]
        return self.settings["coefficient"] * log_z.square()[self._targets(batch)].sum()

    @staticmethod
    def _targets(batch):
        shifted = batch.get("shift_labels")
        labels = batch["labels"][:, 1:] if shifted is None else shifted
        return labels != IGNORED
