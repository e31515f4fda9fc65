"""Keys of ours under LLaMA-Factory: what each of them does to its run, and freezing with one owner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_vlm

PARTS = ("vision_tower", "multi_modal_projector", "language_model")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny vision-language model and a tokenizer."""
    folder = tmp_path_factory.mktemp("llava")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_vlm.TEXT, "vocab_size", 320)
        tiny_vlm.model("llava").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def trained(model: Any) -> dict[str, bool]:
    """Return whether each part has a parameter that is trained."""
    groups: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        part = next((part for part in PARTS[:2] if part in name), "language_model")
        groups[part] = groups.get(part, False) or parameter.requires_grad
    return {part: groups[part] for part in PARTS}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (False, False, True)),  # LLaMA-Factory's defaults, which nobody touches
        (["freeze_vision_tower=false"], (True, False, True)),
        (["freeze_multi_modal_projector=false"], (False, True, True)),
        (["--tt_freeze_vision_tower"], (False, True, True)),  # with a key of ours the section is ours
        (["--tt_freeze_language_model"], (True, True, False)),
        (["--tt_freeze_language_model", "freeze_language_model=false"], (True, True, False)),
        (["freeze_vision_tower=true", "--tt_freeze_vision_tower", "false"], (True, True, True)),
    ],
)
def test_freezing_has_one_owner(
    words: list[str], expected: tuple[bool, ...], settings: Callable[..., Path], engine: Any, pictures: Path
) -> None:
    """LLaMA-Factory's own defaults hold where nobody says anything; what somebody says holds for both."""
    ours = engine(settings(model_name_or_path=str(pictures), max_steps=1), *words)

    assert dict(zip(PARTS, expected, strict=True)) == trained(ours.model)


def test_adapters_stay_out_of_frozen_parts(settings: Callable[..., Path], engine: Any, pictures: Path) -> None:
    """LLaMA-Factory places them by the same switches, and never in a projector."""
    path = settings(model_name_or_path=str(pictures), max_steps=1, finetuning_type="lora")
    for words, expected in (([], (False, False, True)), (["--tt_freeze_language_model"], (True, False, False))):
        ours = engine(path, f"output_dir={path.parent / 'out'}-{len(words)}", *words)
        assert dict(zip(PARTS, expected, strict=True)) == trained(ours.model)


def test_a_chunked_loss_is_the_same_loss(settings: Callable[..., Path], engine: Any) -> None:
    """And no logits come out of the model in training."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    path = settings()
    plain = engine(path)
    sizes = set()

    def look(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, LlamaForCausalLM) and module.training:
            sizes.add(isinstance(output.logits, torch.Tensor) and type(output.logits) is torch.Tensor)

    handle = torch.nn.modules.module.register_module_forward_hook(look)
    try:
        words = ["--tt_enable_chunk_loss", "--tt_loss_chunk_size", "16", f"output_dir={plain.output}-chunked"]
        chunked = engine(path, *words)
    finally:
        handle.remove()

    assert plain.steps.keys() == chunked.steps.keys()
    for step, figures in plain.steps.items():
        assert figures == pytest.approx(chunked.steps[step], abs=2e-5)
    assert {False} == sizes


def test_a_plugin_is_for_llamafactory_or_for_any(settings: Callable[..., Path], engine: Any, tmp_path: Path) -> None:
    """One for the other framework is not activated."""
    plugin = tmp_path / "my plugins.py"
    plugin.write_text(
        "from torchturbo.plugins.contract import Plugin, register\n"
        "for framework in ('llama_factory', 'hf_trainer', None):\n"
        "    class Seen(Plugin):\n"
        "        name = f'seen_{framework}'\n"
        "        def log(self, metrics, run):\n"
        "            metrics[self.name] = float(run.framework == 'llama_factory')\n"
        "    register(framework=framework)(Seen)\n"
    )
    ours = engine(settings(max_steps=1), "--tt_plugin", str(plugin))

    (entry,) = [entry for entry in ours.history if "loss" in entry]
    assert {"seen_llama_factory": 1.0, "seen_None": 1.0} == {k: v for k, v in entry.items() if k.startswith("seen_")}


def test_deterministic_algorithms_end_with_the_run(settings: Callable[..., Path], engine: Any) -> None:
    """Under Trainer's own name of it."""
    import torch

    seen = []

    def look(module: Any, inputs: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())

    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        ours = engine(settings(full_determinism=True, max_steps=1))
    finally:
        handle.remove()

    assert {True} == set(seen)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "use_deterministic_algorithms: true" in (ours.output / "torchturbo.yaml").read_text()
    assert json.loads((ours.output / "torchturbo_run.json").read_text())["step"] == 1
