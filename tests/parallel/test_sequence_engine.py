"""Shared sequences under the whole engine, FSDP2 included: with everything else that changes a forward pass."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import sequences
import torch
import torch.distributed as dist
from ranks import run_ranks

from torchturbo.objectives.normalise import TokenMean


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(
        sequences.model("qwen3"), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


MODELS = {
    "experts": lambda: sequences.model("qwen3_moe"),
    "windows": lambda: sequences.model("mistral", sliding_window=4),
    "adapters": lora,
}
CHUNKED = {"loss_chunk": {"enabled": True, "chunk_size": 5}}
REENTRANT = {"activation_checkpointing": {"enabled": True, "use_reentrant": True}}
CASES: dict[str, tuple[int, str, dict[str, Any], int]] = {
    "accumulated, experts over ranks, recomputed": (
        4,
        "experts",
        {"ep_size": 2, "activation_checkpointing": {"enabled": True}},
        3,
    ),
    "accumulated, in chunks, recomputed": (4, "windows", CHUNKED | REENTRANT, 3),
    "all ranks share one sequence": (4, "experts", {"sp_size": 4}, 2),
    "adapters": (2, "adapters", CHUNKED, 2),
}


def step(rank: int, world_size: int, kind: str, settings: Any, accumulation: int) -> dict[str, float]:
    """Return the errors of a window of micro-batches, the last of which has no target, and look at the gradients."""
    dp_size = world_size // settings.parallel_plan.sp_size
    window = parity.batches(accumulation * dp_size, length=sequences.LENGTH)
    model = MODELS[kind]()
    expected = parity.reference(model, window)
    engine = parity.prepared(model, settings, world_size, rank)
    mine = parity.share(window, world_size, settings.parallel_plan.sp_size, rank)
    return parity.errors(parity.step(engine, model, mine), expected)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_one_process(name: str, tmp_path: Any, monkeypatch: Any) -> None:
    """Gradients are summed over dp x sp ranks, losses over tokens: a micro-batch counts once, however many share it."""
    monkeypatch.chdir(tmp_path)
    world_size, kind, words, accumulation = CASES[name]
    plan = {"sp_size": words.get("sp_size", 2), "ep_size": words.get("ep_size", 1)}
    settings = parity.config(parallel_plan=plan, **{key: value for key, value in words.items() if "size" not in key})

    for found in run_ranks(world_size, step, world_size, kind, settings, accumulation):
        assert {} == {name: error for name, error in found.items() if not error <= parity.TOLERANCE}


def evaluated(rank: int, settings: Any) -> tuple[float, float, float]:
    """Return the loss of one process, the mean of the ranks' losses, and the mean over tokens."""
    window = parity.batches(3, length=sequences.LENGTH)[:2]
    model = sequences.model()
    with torch.no_grad():
        count = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in window)
        whole = sum(float(model(**batch, num_items_in_batch=count).loss) for batch in window)
    engine = parity.prepared(model, settings, 4, rank)
    model.eval()
    normaliser, mine = engine.context.normaliser, window[rank // 2]
    normaliser.open_window([mine], torch.device("cpu"), with_terms=False)
    normaliser.evaluation = TokenMean()
    with torch.no_grad(), normaliser.applied():
        output = model(**mine)
    total = output.loss.clone()
    dist.all_reduce(total)
    assert (2, sequences.LENGTH, 320) == output.logits.shape
    mean = normaliser.evaluation.reduced(4, None, torch.device("cpu"))
    return whole, float(total) / 4, float(mean or 0)


def test_an_evaluated_loss_is_a_mean_over_ranks(tmp_path: Any, monkeypatch: Any) -> None:
    """Trainer gathers the losses of ranks and takes their mean."""
    monkeypatch.chdir(tmp_path)
    for whole, mean, tokens in run_ranks(4, evaluated, parity.config(parallel_plan={"sp_size": 2})):
        assert whole == pytest.approx(mean, rel=parity.TOLERANCE)
        assert whole == pytest.approx(tokens, rel=parity.TOLERANCE)
