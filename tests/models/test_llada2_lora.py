"""LLaDA2-MoE with LoRA as LLaMA-Factory asks for it, as a causal language model, and what it answers generation with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.utils import GenerationMixin

from tests import parity
from tests.models import llada2_tiny as llada2


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=2, task_type="CAUSAL_LM", target_modules=["query_key_value", "dense"], init_lora_weights=False
    )
    return peft.get_peft_model(model, settings)


def test_a_causal_adapter_is_trained_and_saved(tmp_path: Path) -> None:
    """A step through the engine moves the adapter alone; what is saved loads onto the base model again."""
    peft = pytest.importorskip("peft")
    llada2.publish(tmp_path / "base")
    model = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine = parity.prepared(model, parity.config())
    found = parity.step(engine, model, parity.batches(1))
    trained = [value for value in model.parameters() if value.requires_grad]
    torch.optim.SGD(trained, lr=0.1).step()
    moved = {name for name, value in model.named_parameters() if not torch.equal(before[name], value)}

    assert found.norm > 0
    assert {name for name in before if ".lora_" in name} == moved
    engine.release(model)
    model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(8)[None] + 3
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, again.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "peft"])
def test_generation_token_by_token_is_refused(wrapped: bool) -> None:
    """Asked of the model, of an adapter around it, or past its own method as LLaMA-Factory does."""
    model = llada2.model()
    asked = adapted(model) if wrapped else model
    ids, plain = torch.arange(8)[None] + 3, cast("Any", GenerationMixin).generate
    for call in (asked.generate, partial(plain, model)):
        with pytest.raises(ValueError, match=r"block by block.*torchturbo\.objectives\.diffusion\.decode"):
            call(input_ids=ids, max_new_tokens=2)
