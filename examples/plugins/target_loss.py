"""Plugin for HF Trainer alone: end the training early, once its loss has stayed below a target.

    torchturbo train ... --tt_plugin examples/plugins/target_loss.py:examples/plugins/target_loss.yaml

It counts logged losses, each the mean since the log before (``--logging_steps``). All ranks log the same figure, so
all of them stop at the same step. The stop itself is a switch of Hugging Face's Trainer.
"""

from __future__ import annotations

from torchturbo.plugins import Plugin, register

FILE = "target_loss.txt"
"""How many losses in a row a checkpoint had seen below the target."""


@register(framework="hf_trainer")
class TargetLoss(Plugin):
    """Stops Trainer after so many losses below the target."""

    name = "target_loss"
    settings_schema = {
        "type": "object",
        "properties": {
            "target": {"type": "number", "description": "Training loss that is good enough."},
            "patience": {
                "type": "integer",
                "minimum": 1,
                "default": 3,
                "description": "Logged losses in a row that must lie below the target.",
            },
            "checkpoint": {
                "type": "boolean",
                "default": True,
                "description": "Save a checkpoint where training ends, so that it can be resumed.",
            },
        },
        "required": ["target"],
        "additionalProperties": False,
    }

    below = 0
    """Losses in a row below the target."""

    def save_checkpoint(self, folder, run):
        if run.rank == 0:
            (folder / FILE).write_text(f"{self.below}\n", "utf-8")

    def load_checkpoint(self, folder, run):
        if (folder / FILE).is_file():
            self.below = int((folder / FILE).read_text("utf-8"))

    def log(self, metrics, run):
        if metrics.get("loss") is None:
            return
        self.below = self.below + 1 if metrics["loss"] < self.settings["target"] else 0
        metrics["below_target"] = self.below
        if self.below >= self.settings["patience"]:
            control = run.trainer.control
            control.should_training_stop = True
            control.should_save = control.should_save or self.settings["checkpoint"]
