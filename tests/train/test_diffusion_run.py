"""`torchturbo train` on a diffusion model: from rows to a model that writes its training set, block by block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from torchturbo.errors import ConfigError
from torchturbo.objectives.diffusion.decode import decode
from torchturbo.train.run import TrainResult, train

MASK, BLOCK = 310, 4
ROWS = [{"prompt": f"{asked}:", "completion": f" {answer}"} for asked, answer in tiny.TICKETS]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion")
    tiny.save(folder / "model", "qwen3", is_diffusion_model=True, mask_token_id=MASK)
    tiny.write_jsonl(folder / "rows.jsonl", ROWS)
    return folder


def run(material: Path, output: Path, *words: str, model: str = "model") -> TrainResult:
    return train(
        [
            "--model_name_or_path", str(material / model), "--dataset", str(material / "rows.jsonl"),
            "--output_dir", str(output), "--use_cpu", "true", "--learning_rate", "1e-2", "--save_strategy", "no",
            "--per_device_train_batch_size", "4", "--tt_bd_block_size", str(BLOCK), *words,
        ],
    )  # fmt: skip


def answers(result: TrainResult, **settings: Any) -> list[str]:
    """Return what a trained model answers to the prompts of its training set."""
    tokenizer = result.tokenizer
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in ROWS]
    written = [
        decode(result.model, prompt, **{"block_size": BLOCK, "max_new_tokens": 24} | settings) for prompt in prompts
    ]
    return [tokenizer.decode(tokens) for tokens in written]


def test_a_trained_model_reproduces_its_training_set(material: Path, tmp_path: Path) -> None:
    """Four rows; its loss falls, and so does CAP's. An answer ends where the text ended, whatever its block holds behind."""
    words = (
        "--max_steps",
        "160",
        "--tt_bd_mask_high",
        "1",
        "--tt_cap_lambda",
        "0.5",
        "--tt_gradient_checkpointing=false",
    )
    result = run(material, tmp_path / "out", *words, "--logging_steps", "20")
    logs = [entry for entry in result.log_history if "cap_loss" in entry]
    assert logs[-1]["loss"] < 0.2 * logs[0]["loss"]
    assert logs[-1]["cap_loss"] < 0.5 * max(entry["cap_loss"] for entry in logs)

    expected = [row["completion"] for row in ROWS]
    assert expected == answers(result)
    assert expected == answers(result, steps=BLOCK, threshold=0.7)

    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert saved.config.is_diffusion_model
    assert answers(result) == answers(replace(result, model=saved))


def test_the_cut_off_length_is_rounded_up_to_whole_blocks(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """33 tokens in blocks of 4 are 36; the log says so, and a resumed run compares what was in force."""
    result = run(material, tmp_path / "out", "--max_steps", "1", "--cutoff_len", "33")
    assert "--cutoff_len 33 is rounded up to 36: whole blocks of 4 tokens" in capsys.readouterr().err
    assert 36 == result.trainer.turbo_facts["cutoff_len"]

    run(material, tmp_path / "again", "--max_steps", "1", "--cutoff_len", "36")
    assert "rounded up" not in capsys.readouterr().err


def test_packed_rows_fill_a_sequence_and_not_more(material: Path, tmp_path: Path) -> None:
    """Each row takes the room of its whole blocks."""
    result = run(material, tmp_path / "out", "--max_steps", "2", "--packing", "true", "--cutoff_len", "64")
    lengths = [len(row["input_ids"]) for row in result.trainer.train_dataset.examples]
    assert len(lengths) < len(ROWS)
    for example in result.trainer.train_dataset.examples:
        starts = [at for at, position in enumerate(example["position_ids"]) if position == 0]
        sizes = [end - start for start, end in zip(starts, [*starts[1:], len(example["input_ids"])], strict=True)]
        assert sum(-(-size // BLOCK) * BLOCK for size in sizes) <= 64
    assert result.final_loss is not None


def test_what_a_diffusion_model_lacks_is_told_before_its_weights(material: Path, tmp_path: Path) -> None:
    """A mask token, an attention that can express the mask, a loss that is the model's own: all at once."""
    tiny.save(material / "maskless", "qwen3", is_diffusion_model=True)
    words = ("--attn_implementation", "flash_attention_2", "--label_smoothing_factor", "0.1")
    with pytest.raises(ConfigError) as caught:
        run(material, tmp_path / "out", *words, model="maskless")
    told = [str(problem) for problem in caught.value.problems]
    parts = (
        "mask_token_id",
        "--attn_implementation: flash_attention_2 can't express",
        "--label_smoothing_factor: a loss",
    )
    assert [part in line for part, line in zip(parts, told, strict=True)] == [True] * 3


PLUGIN = """
from torchturbo.objectives.diffusion.models import DiffusionModel, register
from torchturbo.plugins import Plugin
from torchturbo.plugins import register as plugin

register(DiffusionModel("Llama that diffuses", "llama", mask_token=310))

@plugin()
class Nothing(Plugin):
    pass
"""


def test_a_plugin_can_register_a_type(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its models are trained by block diffusion, with the mask token that it names."""
    from torchturbo.objectives.diffusion import models

    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    tiny.save(material / "llama")
    (tmp_path / "diffusing.py").write_text(PLUGIN)
    words = ("--max_steps", "1", "--tt_plugin", str(tmp_path / "diffusing.py"))
    result = run(material, tmp_path / "out", *words, model="llama")
    assert "block diffusion: blocks of 4 tokens" in capsys.readouterr().err
    assert 310 == result.trainer._noise.mask_token
