"""LLaMA-Factory's own training with the engine underneath: the figures of LLaMA-Factory alone, and what is added."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

METHODS = {
    "sft full": {},
    "sft freeze": {"finetuning_type": "freeze", "freeze_trainable_layers": 1},
    "sft lora": {"finetuning_type": "lora", "lora_rank": 4, "learning_rate": 1e-2},
    "sft neat packing": {"neat_packing": True},
    "sft packing": {"packing": True},
    "sft accuracy": {"compute_accuracy": True, "val_size": 0.1},
    "sft blocks": {"finetuning_type": "freeze", "freeze_trainable_layers": 1, "use_llama_pro": True},
    "sft lora of other kinds": {
        "finetuning_type": "lora",
        "use_dora": True,
        "use_rslora": True,
        "loraplus_lr_ratio": 4,
    },
    "sft pissa": {"finetuning_type": "lora", "pissa_init": True},
    "sft attention and noise": {"flash_attn": "disabled", "neftune_noise_alpha": 5.0},
    "sft dft": {"use_dft_loss": True},
    "sft eaft": {"use_eaft_loss": True},
    "sft asft": {"use_asft_loss": True},
}


@pytest.mark.parametrize("changes", METHODS.values(), ids=METHODS)
def test_loss_and_gradients_are_those_of_llamafactory_alone(
    changes: dict[str, Any], settings: Callable[..., Path], engine: Any, stock: Any
) -> None:
    """To five decimals, every step, with rows of unequal length in an accumulation window."""
    path = settings(**changes)
    alone = stock(path)
    ours = engine(path)

    assert alone.steps == ours.steps
    assert len(ours.steps) == 3
    trained = {name for name, value in alone.model.named_parameters() if value.requires_grad}
    assert trained == {name for name, value in ours.model.named_parameters() if value.requires_grad}


def test_pretraining_is_a_mean_over_what_is_predicted(settings: Callable[..., Path], engine: Any, stock: Any) -> None:
    """Of a text of 64 tokens 63 are predicted; Transformers 5.6 divides by 64."""
    path = settings(stage="pt", dataset="wiki_demo", max_samples=40)
    alone = stock(path)
    ours = engine(path)

    assert len(ours.steps) == 3
    for step, (loss, norm) in alone.steps.items():
        assert ours.steps[step] == pytest.approx((loss * 64 / 63, norm * 64 / 63), abs=2e-5)


def test_a_processor_changes_no_loss(
    settings: Callable[..., Path], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one LLaMA-Factory lets Trainer divide by the accumulation steps, which a normalised loss has behind it."""
    from torchturbo.adapters.llama_factory.package import import_package

    path = settings()
    without = engine(path)
    workflow = import_package().workflows["sft"]
    load = workflow.load_tokenizer

    class Processor:
        def save_pretrained(self, folder: str) -> None:
            Path(folder, "processor").touch()

    monkeypatch.setattr(workflow, "load_tokenizer", lambda *args: load(*args) | {"processor": Processor()})
    having = engine(path, f"output_dir={without.output}-processor")

    assert without.steps == having.steps
    assert (having.output / "processor").is_file()


def test_gbs_sets_the_accumulation(settings: Callable[..., Path], engine: Any, stock: Any, logged: list[str]) -> None:
    """It trains as LLaMA-Factory does with that many steps, and the line names both places."""
    path = settings(gradient_accumulation_steps=2)
    ours = engine(path, "--tt_gbs", "3")

    assert ours.trainer_args.gradient_accumulation_steps == 3
    assert stock(path, gradient_accumulation_steps=3).steps == ours.steps
    (line,) = [line for line in logged if "gives way" in line]
    assert line.endswith("gradient_accumulation_steps 2 gives way to gbs 3 (--tt_gbs): 3 accumulation steps")
    assert line.startswith(f"{path}:")
    assert "batch: micro-batch 2 x accumulation 3 x data-parallel ranks 1 = 6 sequences per step" in logged


@pytest.mark.parametrize(
    ("words", "on", "reentrant"),
    [
        ([], True, False),
        (["use_reentrant_gc=true"], True, True),
        (["disable_gradient_checkpointing=true"], False, None),
        (["gradient_checkpointing=false"], False, None),
        (["--tt_gradient_checkpointing", "false"], False, None),
        (["disable_gradient_checkpointing=true", "--tt_gradient_checkpointing", "true"], True, False),
    ],
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_activation_checkpointing_has_one_owner(
    words: list[str], on: bool, reentrant: bool | None, method: str, settings: Callable[..., Path], engine: Any
) -> None:
    """What the engine's configuration says is what the layers do, whatever LLaMA-Factory would have done."""
    ours = engine(settings(finetuning_type=method, max_steps=1), *words)

    base = ours.model.get_base_model() if method == "lora" else ours.model
    layers = list(base.model.layers)
    assert [on, on] == [layer.gradient_checkpointing for layer in layers]
    if on:
        assert [{"use_reentrant": reentrant}] * 2 == [how(layer._gradient_checkpointing_func) for layer in layers]
    assert "gradient_checkpointing_enable" not in vars(base)  # LLaMA-Factory's own replacement
    assert len(ours.steps) == 1


def how(function: Any) -> Any:
    """Return the keywords of torch's checkpoint inside what a layer calls."""
    return function.keywords or how(function.args[-1])


def test_bf16_is_autocast_by_the_engine(settings: Callable[..., Path], engine: Any, logged: list[str]) -> None:
    """Under LLaMA-Factory's own name of it, beaten by ours; the parameters stay fp32."""
    import torch

    formats = set()

    def look(module: Any, inputs: Any, output: Any) -> None:
        if (
            isinstance(module, torch.nn.Linear) and output.shape[-1] == 320
        ):  # the head, whatever the engine tries before
            formats.add(output.dtype)

    handle = torch.nn.modules.module.register_module_forward_hook(look)
    try:
        ours = engine(settings(bf16=True, max_steps=1))
        assert {torch.bfloat16} == formats
        assert {torch.float32} == {value.dtype for value in ours.model.parameters()}
        assert any(line.startswith("mixed_precision = bf16  (") and line.endswith(": bf16)") for line in logged)
        formats.clear()
        path = settings(bf16=True, max_steps=1, output_dir=str(ours.output) + "-2")
        engine(path, "--tt_mixed_precision", "fp32")
        assert {torch.float32} == formats
    finally:
        handle.remove()
    (line,) = [line for line in logged if "asked the framework" in line]
    assert line.startswith(f"mixed_precision: {path}:") and line.endswith("--tt_mixed_precision sets fp32, which holds")


def test_what_is_left_behind(settings: Callable[..., Path], engine: Any) -> None:
    """The model, LLaMA-Factory's own logs and plot, and the record, which loads back."""
    from torchturbo.engine.config import load_config

    ours = engine(
        settings(
            enable_torch_profiler=True, plot_loss=True, val_size=0.2, eval_strategy="steps", eval_steps=2, do_eval=True
        ),
        "--tt_gbs",
        "2",
    )

    names = {path.name for path in ours.output.iterdir()}
    assert names >= {
        "model.safetensors", "config.json", "tokenizer.json", "trainer_log.jsonl", "training_loss.png",
        "training_eval_loss.png", "all_results.json", "profiler", "torchturbo.yaml", "torchturbo_run.json",
    }  # fmt: skip
    assert load_config(ours.output / "torchturbo.yaml").gbs == 2
    run = json.loads((ours.output / "torchturbo_run.json").read_text())["run"]
    assert (run["dataset"], run["template"], run["finetuning_type"]) == (["identity"], "chatml", "full")
    log = [json.loads(line) for line in (ours.output / "trainer_log.jsonl").read_text().splitlines()]
    assert [entry["current_steps"] for entry in log if "loss" in entry] == [1, 2, 3]
    assert json.loads((ours.output / "all_results.json").read_text())["eval_loss"] > 0


def test_the_evaluation_is_a_mean_over_tokens(settings: Callable[..., Path], engine: Any) -> None:
    """It does not depend on the batches."""
    losses = []
    for size in (1, 4):
        path = settings(
            do_train=False, do_eval=True, val_size=0.2, per_device_eval_batch_size=size, output_dir=f"unused-{size}"
        )
        from torchturbo.adapters.llama_factory.command import read_command
        from torchturbo.adapters.llama_factory.run import run_command

        output = path.parent / f"eval-{size}"
        run_command(read_command([str(path), f"output_dir={output}"]))
        losses.append(json.loads((output / "eval_results.json").read_text())["eval_loss"])

    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_predictions_are_generated(settings: Callable[..., Path], engine: Any) -> None:
    """By a model that just trained, with the key-value cache and without labels."""
    path = settings(max_steps=1, do_predict=True, predict_with_generate=True, val_size=4, max_new_tokens=4)
    ours = engine(path)

    rows = [json.loads(line) for line in (ours.output / "generated_predictions.jsonl").read_text().splitlines()]
    assert 4 == len(rows)
    assert {"prompt", "predict", "label"} == rows[0].keys()
    assert json.loads((ours.output / "predict_results.json").read_text())["predict_rouge-l"] >= 0


def test_llamafactory_is_as_before_afterwards(settings: Callable[..., Path], engine: Any) -> None:
    """Its names hold what they held, after an error too."""
    from torchturbo.adapters.llama_factory.package import TRAINERS, import_package
    from torchturbo.errors import ConfigError

    package = import_package()
    before = {
        name: value
        for module in (package.tuner, *package.workflows.values())
        for name, value in vars(module).items()
        if callable(value)
    }
    engine(settings(max_steps=1))
    with pytest.raises(ConfigError):
        engine(settings(dataset="nothing"))
    after = {
        name: value
        for module in (package.tuner, *package.workflows.values())
        for name, value in vars(module).items()
        if callable(value)
    }
    assert before == after
    assert {name for _, name in TRAINERS.values()} <= before.keys()
