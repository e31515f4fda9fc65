"""A draft in a run: resumed, in half precision, told of where it can't run, and beside sequence parallelism."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import dspark_models
import parity
import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainingArguments

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.engine.steps.dspark import settings_of
from torchturbo.objectives.dspark.anchors import draw_blocks
from torchturbo.train.batches import Collator
from torchturbo.train.examples import Examples


def run(folder: Path, resume: bool = False, **changes: Any) -> Any:
    """Train for three steps of two micro-batches of one row each, and return the trainer."""
    words = ["--tt_enable_mtp", "--tt_dspark_num_anchors", "2", "--tt_gbs", "2"]
    set_torchturbo_args(parse_torchturbo_args(words)[0])
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=1, logging_steps=1, use_cpu=True, save_strategy="steps",
        save_steps=1, report_to="none", disable_tqdm=True, learning_rate=1e-2, **({"max_steps": 3} | changes),
    )  # fmt: skip
    ids = torch.randint(3, 320, (8, 10), generator=torch.Generator().manual_seed(1)).tolist()
    rows = Examples([{"input_ids": row, "labels": row} for row in ids])
    trainer = TurboTrainer(model=dspark_models.model(), args=args, train_dataset=rows, data_collator=Collator(0))
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def test_a_resumed_run_draws_the_same_anchors(tmp_path: Path) -> None:
    """Bit for bit, with fewer anchors than candidates and micro-batches that are accumulated."""
    whole = run(tmp_path)
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")

    torch.manual_seed(99)
    resumed = run(tmp_path, resume=True)

    ends = [dict(trainer.model.named_parameters()) for trainer in (whole, resumed)]
    assert ends[0].keys() == ends[1].keys()
    assert [name for name, one in ends[0].items() if not torch.equal(one, ends[1][name])] == []
    losses = [[log["dspark_loss"] for log in one.state.log_history if "dspark_loss" in log] for one in (whole, resumed)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("seed", [42, 7])
def test_anchors_begin_with_the_seed_of_the_run(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of the same data under another seed looks elsewhere."""
    seen: list[Any] = []

    def noted(sequences: Any, *given: Any, **sizes: Any) -> Any:
        seen.append((sequences, given, drawn := draw_blocks(sequences, *given, **sizes)))
        return drawn

    monkeypatch.setattr("torchturbo.objectives.dspark.objective.draw_blocks", noted)
    run(tmp_path, seed=seed, max_steps=1)

    assert {(2, seed, 0)} == {given for _, given, _ in seen}
    others = [draw_blocks(sequences, 2, seed + 1, 0, size=3, mask_token_id=319).anchors for sequences, _, _ in seen]
    assert any(not torch.equal(one.anchors, other) for (_, _, one), other in zip(seen, others, strict=True))


def test_half_precision_is_near() -> None:
    window = parity.batches(2)
    steps = []
    for precision in ("fp32", "bf16"):
        model = dspark_models.model(initializer_range=0.05)
        engine = parity.prepared(model, dspark_models.settings(mixed_precision=precision))
        steps.append(parity.step(engine, model, window))
    assert steps[0].loss == pytest.approx(steps[1].loss, rel=2e-2)
    for name in ("mtp.fc.weight", "mtp.layers.1.self_attn.k_proj.weight", "mtp.markov_head.markov_w2.weight"):
        one, two = (step.gradients[name].float() for step in steps)
        assert float((one - two).norm() / one.norm()) < 5e-2, name


@pytest.mark.parametrize("said", [True, None])
def test_what_cannot_run_is_told_where_it_was_asked_for(said: bool | None, capfd: pytest.CaptureFixture[str]) -> None:
    """The default asks for nothing: a model with serial heads trains those without a word."""
    from torchturbo.engine.context import Context
    from torchturbo.engine.steps import dspark

    asked = {} if said is None else {"dspark": {"enabled": said}}
    settings = parity.config(mtp={"enabled": True}, **asked)
    context = Context()

    dspark.apply(tiny.model("qwen3"), settings, context)

    told = capfd.readouterr().err
    assert bool(said) == ("Qwen3ForCausalLM has no DSpark fields in its configuration" in told)


class LogitRows(TorchDispatchMode):
    """Notes the most rows of logits that one tensor holds."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() > 1 and result.shape[-1] == 320:
            memory = result.untyped_storage().nbytes()  # none where they are expanded from one number
            self.most = max(self.most, memory // (320 * result.element_size()))
        return result


def test_a_step_never_holds_more_than_a_chunk_of_logits() -> None:
    """Neither the model's nor the draft's; a chunk is larger than the matrices [H, V] that a product may turn."""
    model, window = dspark_models.model(), parity.batches(1, rows=4, length=64)
    changes: dict[str, Any] = {"loss_chunk": {"enabled": True, "chunk_size": 40}, "dspark": {"num_anchors": 40}}
    engine = parity.prepared(model, dspark_models.settings(**changes))
    assert sum(map(len, dspark_models.drawn(window[0], 40))) > 2 * 40

    with LogitRows() as seen:
        parity.step(engine, model, window)

    assert seen.most == 40


@pytest.mark.parametrize(("given", "size"), [({"enabled": True, "chunk_size": 7}, 7), ({"enabled": True, "chunk_size": None}, 1024), ({"enabled": False}, 1024)])  # fmt: skip
def test_a_draft_has_chunks_without_chunked_loss_too(given: dict[str, Any], size: int) -> None:
    assert size == settings_of(dspark_models.settings(loss_chunk=given)).chunk_size
