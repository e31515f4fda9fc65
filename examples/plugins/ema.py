"""Plugin: an exponential moving average of the weights, saved with each checkpoint and as a model at the end.

    torchturbo train ... --tt_plugin examples/plugins/ema.py:examples/plugins/ema.yaml

The averaged model lies in ``ema/`` in the output folder and loads like any other. It often generalises better than
the last weights (Polyak and Juditsky 1992, https://doi.org/10.1137/0330046). After ``n`` optimizer steps

    average = d * average + (1 - d) * weights,   d = min(decay, (1 + n) / (10 + n)) with warm-up, else decay

The warm-up is that of ``tf.train.ExponentialMovingAverage`` and forgets the first, untrained weights faster.
"""

from __future__ import annotations

import shutil

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from torchturbo.plugins import Plugin, register

FILE = "ema.safetensors"
"""The averages in a checkpoint, by parameter name, in fp32."""


@register()
class ExponentialMovingAverage(Plugin):
    """Keeps the average of every trained parameter, in fp32."""

    name = "ema"
    settings_schema = {
        "type": "object",
        "properties": {
            "decay": {
                "type": "number",
                "minimum": 0,
                "exclusiveMaximum": 1,
                "default": 0.999,
                "description": "How much of the average stays at each step; 0.999 looks back about 1000 steps.",
            },
            "warm_up": {
                "type": "boolean",
                "default": True,
                "description": "Begin with a smaller decay, so that a short run is not dominated by its first weights.",
            },
            "device": {
                "enum": ["model", "cpu"],
                "default": "model",
                "description": "Where the averages are kept; cpu saves memory on the device and copies each step.",
            },
        },
        "additionalProperties": False,
    }

    def optimizer_built(self, optimizer, run):
        """Begin the average with the weights as they are, sharded as they are; only what is trained has one."""
        self.averages = {name: self._kept(parameter) for name, parameter in self._trained(run.model)}

    def load_checkpoint(self, folder, run):
        """Go on with the checkpoint's average, or begin with its weights where it was made without this plugin."""
        if not (folder / FILE).is_file():
            self.optimizer_built(None, run)
            return
        for name, average in load_file(folder / FILE).items():
            kept = self.averages[name]
            if isinstance(kept, DTensor):  # each rank takes its shard, on whatever mesh the average was saved
                average = average.to(kept.device)
                average = distribute_tensor(average, kept.device_mesh, kept.placements, src_data_rank=None)
            kept.copy_(average)

    @torch.no_grad()
    def step_end(self, run):
        decay = self.settings["decay"]
        if self.settings["warm_up"]:
            decay = min(decay, (1 + run.step) / (10 + run.step))
        for name, parameter in self._trained(run.model):
            average = self.averages[name]
            average.lerp_(parameter.detach().to(average.device, average.dtype), 1 - decay)

    def save_checkpoint(self, folder, run):
        whole = {}
        for name, average in self.averages.items():
            found = average.full_tensor() if isinstance(average, DTensor) else average  # on every rank
            if run.rank == 0:
                whole[name] = found
        if run.rank == 0:
            save_file(whole, folder / FILE)

    @torch.no_grad()
    def end(self, run):
        """Save the model once with its averages in place of its weights; a run that failed has nothing to show."""
        if run.error is not None:
            return
        last = {name: parameter.detach().clone() for name, parameter in self._trained(run.model)}
        try:
            for name, parameter in self._trained(run.model):
                parameter.copy_(self.averages[name])
            self._save(run)
        finally:  # whoever goes on with the model has the weights that were trained
            for name, parameter in self._trained(run.model):
                parameter.copy_(last[name])

    def _save(self, run):
        """Write the model beside its place and rename it there: a save that fails leaves no half of a model."""
        folder, partial = run.output_dir / "ema", run.output_dir / ".ema.partial"
        try:
            run.trainer.save_model(str(partial), _internal_call=True)  # on every rank; the first one writes
            if run.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
                partial.rename(folder)
        finally:
            if run.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)

    def _kept(self, parameter):
        device = parameter.device if self.settings["device"] == "model" else "cpu"
        return parameter.detach().to(device, torch.float32, copy=True)

    @staticmethod
    def _trained(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves some parameters gathered
        return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
