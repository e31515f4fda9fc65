"""LoRA under FSDP2: two ranks train, resume and export the adapters of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import acceptance
import parity
import pytest
import tiny
import torch
from ranks import run_ranks

Found = tuple[dict[int, tuple[float, float]], dict[str, torch.Tensor]]
WORDS = ["--tt_gbs", "4"]


def trained(rank: int, folder: str, words: list[str], resume: Path | None = None, checkpointing: bool = True) -> Found:
    """Train adapters on this rank; return the history and the trained weights, and export them."""
    words = [*words, "--tt_gradient_checkpointing", str(checkpointing).lower()]
    made = acceptance.trainer(folder, words, kind="qwen3", save_strategy="steps", save_steps=2, model=adapted())
    made.train(resume_from_checkpoint=None if resume is None else str(resume))
    made.save_model(f"{folder}/final")
    weights = {name: parity.whole(p) for name, p in made.model.named_parameters() if p.requires_grad}
    return acceptance.history(made), weights


def adapted() -> Any:
    """Return a model with adapters on attention."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    made = get_peft_model(tiny.model("qwen3"), LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    for name, parameter in made.named_parameters():  # adapters begin at zero, where half of the gradients are
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return made


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found: Found = run_ranks(1, trained, str(tmp_path_factory.mktemp("one")), WORDS)[0]
    return found


def assert_same(expected: Found, found: Found, first: int = 1) -> None:
    for step in range(first, acceptance.STEPS + 1):
        assert found[0][step] == pytest.approx(expected[0][step], rel=2e-5), step
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-3, atol=1e-5)  # four steps of Adam


@pytest.mark.parametrize("plan", [[], ["--tt_sp_size", "2"]], ids=["dp", "sp"])
def test_adapters_train_resume_and_export(plan: list[str], one: Found, tmp_path: Path) -> None:
    """The base model is sharded and frozen; only adapters have gradients, state and a place in the export."""
    from peft import PeftModel
    from safetensors.torch import load_file

    both = run_ranks(2, trained, str(tmp_path), [*WORDS, *plan])

    for found in both:
        assert_same(one, found)
    rest = run_ranks(2, trained, str(tmp_path / "rest"), [*WORDS, *plan], tmp_path / "checkpoint-2")
    for step in (3, 4):
        assert both[0][0][step] == rest[0][0][step]  # bit-equal on the same mesh
    saved = load_file(tmp_path / "final" / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved) and len(saved) == len(one[1])
    loaded = PeftModel.from_pretrained(tiny.model("qwen3"), tmp_path / "final")
    for name, parameter in loaded.named_parameters():
        if name in both[0][1]:
            assert torch.equal(both[0][1][name], parameter), name
    native = sum(path.stat().st_size for path in (tmp_path / "checkpoint-2" / "native").iterdir())
    assert native < sum(parameter.numel() * 4 for parameter in loaded.parameters())
