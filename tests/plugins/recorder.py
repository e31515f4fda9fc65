"""A plugin that notes every hook with what it was shown; tests load it as a user's plugin file."""

from __future__ import annotations

from torchturbo.plugins import Plugin, register


@register()
class Recorder(Plugin):
    """Keeps (hook, facts) in order; the facts are plain values, so that ranks can hand them on."""

    name = "recorder"

    def __init__(self, settings=None):
        super().__init__(settings)
        self.notes = []

    @property
    def hooks(self):
        return [hook for hook, _ in self.notes]

    def note(self, hook, run, **facts):
        self.notes.append((hook, {"step": run.step, "error": type(run.error).__name__, **facts}))

    def model_built(self, model, run):
        parameter = next(model.parameters())
        facts = {"dtype": str(parameter.dtype), "device": parameter.device.type, "same": run.model is model}
        facts |= {"framework": run.framework, "output_dir": run.output_dir.name, "rank": (run.rank, run.world_size)}
        self.note("model_built", run, **facts)

    def before_shard(self, model, run):
        checkpointing = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
        self.note("before_shard", run, dtype=str(next(model.parameters()).dtype), checkpointing=checkpointing)

    def optimizer_built(self, optimizer, run):
        scheduled = run.trainer.lr_scheduler is not None
        self.note("optimizer_built", run, groups=len(optimizer.param_groups), scheduled=scheduled)

    def load_checkpoint(self, folder, run):
        from safetensors.torch import load_file

        saved = load_file(folder / "model.safetensors")["model.norm.weight"]
        loaded = run.model.model.norm.weight.detach()
        state = run.trainer.optimizer.state_dict()["state"]
        self.note("load_checkpoint", run, folder=folder.name, weights=bool((saved == loaded).all()), moments=len(state))

    def step_begin(self, micro_batches, run):
        shapes = [tuple(batch["input_ids"].shape) for batch in micro_batches]
        self.note("step_begin", run, shapes=shapes, devices={batch["labels"].device.type for batch in micro_batches})

    def loss_weight(self, batch, run):
        self.note("loss_weight", run, keys=sorted(batch))
        return (batch["labels"][:, 1:] != -100).sum()

    def loss_term(self, outputs, batch, run):
        self.note("loss_term", run, logits=tuple(outputs["logits"].shape), ids=tuple(batch["input_ids"].shape))

    def step_end(self, run):
        self.note("step_end", run)

    def log(self, metrics, run):
        self.note("log", run, loss="loss" in metrics)
        metrics["recorded"] = float(len(self.notes))

    def paused(self, run):
        self.note("paused", run)

    def resumed(self, run):
        self.note("resumed", run)

    def save_checkpoint(self, folder, run):
        whole = (folder / "model.safetensors").is_file() and (folder / "scheduler.pt").is_file()
        self.note("save_checkpoint", run, folder=folder.name, final=folder.parent == run.output_dir, whole=whole)
        (folder / f"recorder-{run.rank}.txt").write_text("kept")

    def end(self, run):
        self.note("end", run, saved=(run.output_dir / "model.safetensors").exists())
