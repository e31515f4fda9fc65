"""Plans of diffusion models: what train refuses, the doubled sequence and its mask, activations of a real micro-batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
import tiny
import torch

from tests.objectives import diffusing
from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.observe.tracker import TensorTracker
from torchturbo.plan import activations
from torchturbo.plan.diffusion import doubled, mask_dtype
from torchturbo.plan.model import settled_facts

Run = Callable[..., Any]
ROWS, LENGTH = 4, 61


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("diffusion")
    tiny.save(parent / "model", "qwen3", is_diffusion_model=True, mask_token_id=diffusing.MASK)
    return parent / "model"


def test_errors_are_those_of_train(plan: Run, folder: Path) -> None:
    """Label smoothing, an attention that can't express the mask, a mask token that is none: where train stops, too."""
    settings = json.loads((folder / "config.json").read_text()) | {"mask_token_id": 9999}
    lone = Path("alone")
    lone.mkdir()
    (lone / "config.json").write_text(json.dumps(settings))  # without a tokenizer, which is not asked for then
    smooth = ("--label_smoothing_factor", 0.1)
    for line, told in (
        (("--model", folder, *smooth), ["--label_smoothing_factor: a loss"]),
        (("--model", folder, "--attn_implementation", "flash_attention_2"), ["flash_attention_2 can't express"]),
        (("--model", lone, *smooth), ["the mask token 9999 is none", "--label_smoothing_factor"]),
    ):
        done = plan("--world_size", 1, "--cutoff_len", 64, *line)
        assert 2 == done.status
        assert [] == [text for text in told if not any(text in error for error in done.errors)], done.out
    done = plan("--world_size", 1, "--cutoff_len", 64, "--model", folder)
    assert (0, "") == (done.status, done.err)


@pytest.mark.parametrize(
    ("kind", "precision", "size"), [("sdpa", "fp32", 4), ("sdpa", "bf16", 2), ("flex_attention", "fp32", 0)]
)
def test_a_sequence_is_doubled_and_so_is_its_mask(
    plan: Run, folder: Path, kind: str, precision: str, size: int
) -> None:
    """65 tokens in blocks of 32 are 96, run as 192; a mask of numbers for each pair, which flex attention does without."""
    words = ("--world_size", 1, "--model", folder, "--cutoff_len", 65, "--per_device_train_batch_size", 8)
    words += ("--attn_implementation", kind, "--tt_mixed_precision", precision)
    tree = plan(*words, "--format", "json").json
    assert (96, 192, 8 * 96) == tuple(
        tree["batch"][key] for key in ("sequence_length", "doubled_length", "tokens_per_step")
    )
    assert 8 * 192**2 * size == tree["memory"]["attention_mask"]
    assert tree["memory"]["activations"] > 0
    out = " ".join(plan(*words).out.split())
    assert "96 in a sequence; the model runs on 192, noisy and clean" in out
    assert bool(size) == ("of block diffusion, over both halves" in out)


def test_ranks_that_share_a_sequence_share_whole_blocks() -> None:
    settings = parity.config(diffusion={"bd_block_size": 4})
    assert [128, 128, 144] == [doubled(61, settings, ranks) for ranks in (1, 2, 3)]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cap": ("qwen3", {"cap_lambda": 2.0}),
    "chunked cap": ("qwen3", {"cap_lambda": 2.0, "loss_chunk": {"enabled": True, "chunk_size": 64}}),
    "recomputed": ("llada2_moe", {"activation_checkpointing": {"enabled": True}}),
    "bf16": ("llada2_moe", {"mixed_precision": "bf16"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_micro_batch_holds_about_what_was_estimated(case: str) -> None:
    """With its mask, which a plan counts apart, and all tokens hidden, within a twentieth."""
    kind, given = CASES[case]
    sections = {name: value for name, value in given.items() if name != "cap_lambda"}
    diffusion = {"bd_block_size": 4, "bd_mask_low": 1.0, "bd_mask_high": 1.0, "cap_lambda": given.get("cap_lambda", 0)}
    settings = parity.config(**sections, diffusion=diffusion)
    model = diffusing.model(kind)
    mask = mask_dtype(model, settings)
    assert mask is not None
    found = measured(model, settings)
    with torch.device("meta"):
        model = diffusing.model(kind)
    context = Context()
    Engine(settings, context)
    settled_facts(model, settings, context)
    estimate = activations.estimate(model, settings, context, ROWS, LENGTH)
    assert estimate.bytes is not None, estimate.reason
    planned = estimate.bytes + ROWS * doubled(LENGTH, settings, 1) ** 2 * mask.itemsize
    assert planned == pytest.approx(found, rel=0.05)


def measured(model: Any, settings: Any) -> int:
    """Return the bytes at the peak of one real micro-batch, whose rows are padded, so that each has its own mask."""
    engine = parity.prepared(model, settings)
    lengths = [LENGTH] * (ROWS - 1) + [LENGTH - 8]
    batch = diffusing.noise(1.0, 1.0)(diffusing.ragged(lengths, prompt=0), 0)
    normaliser = engine.context.normaliser
    normaliser.open_window([batch], torch.device("cpu"))
    tracker = TensorTracker(model)
    with tracker, normaliser.applied():
        with engine.autocast():
            loss = model(**batch).loss
        loss.backward()
        del loss
    tracker._settle((parameter.grad for parameter in model.parameters()), "gradients")
    return max(moment.bytes["activations"] + moment.bytes["other"] for moment in tracker.moments())
