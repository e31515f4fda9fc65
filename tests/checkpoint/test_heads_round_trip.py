"""Extra heads through a whole run: read from a checkpoint, trained, and written back as a serving engine finds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import headed
import pytest
import tiny
import torch
from ranks import run_ranks

FAMILIES = list(headed.MODELS)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    for family in FAMILIES:
        headed.save(folder / family, family)
    tiny.write_jsonl(folder / "rows.jsonl", tiny.rows(8))
    return folder


def command(material: Path, family: str, output: Path, *words: str) -> list[str]:
    return [
        "--model_name_or_path", f"{material}/{family}", "--dataset", f"{material}/rows.jsonl", "--output_dir", str(output),
        "--use_cpu", "--max_steps", "1", "--learning_rate", "1e-2", "--per_device_train_batch_size", "2",
        "--tt_gbs", "2", "--weight_decay", "0.1", "--lr_scheduler_type", "constant", *words,
    ]  # fmt: skip


def run_all(rank: int, lines: list[list[str]]) -> list[dict[str, float]]:
    from torchturbo.train import run

    run._draw = lambda *_: None  # type: ignore[assignment]  # the loss curve takes longer than all else
    return [run.train(line, quiet=True).log_history[0] for line in lines]


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def assert_same_layout(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Names, shapes and number formats are those of the checkpoint."""
    told = [{name: (one.shape, one.dtype) for name, one in files.items()} for files in (before, after)]
    assert told[0] == told[1]


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_writes_the_heads_back_under_their_own_names(world: int, material: Path, tmp_path: Path) -> None:
    """Trained, in the format they came in, and with copies of embeddings and head where the checkpoint had some."""
    lines = [command(material, family, tmp_path / family, "--tt_enable_mtp") for family in FAMILIES]
    logs = run_ranks(world, run_all, lines)[0]
    for family, log in zip(FAMILIES, logs, strict=True):
        before, after = headed.stored(material / family), headed.stored(tmp_path / family)
        assert_same_layout(before, after)
        assert config(tmp_path / family) == config(material / family)
        heads = [name for name in before if headed.is_head(name)]
        moved = [name for name in heads if not torch.equal(before[name], after[name])]
        assert len(moved) > len(heads) / 2, family  # not every expert met a token
        assert {"eh_proj", "fc"} & {name.split(".")[-2] for name in moved}
        assert_copies(after)
        assert [f"mtp_{at + 1}_loss" for at in range(headed.MODELS[family][2])] == depths_logged(log)


@pytest.mark.parametrize("world", [1, 2])
def test_heads_of_weight_0_are_written_bit_for_bit_and_heads_that_are_off_are_not_there(
    world: int, material: Path, tmp_path: Path
) -> None:
    """Weight decay does not move them; without them the configuration says 0, so that nobody looks for their tensors."""
    still, off = "glm4_moe", {family: tmp_path / family for family in ("glm4_moe", "qwen3_next")}
    lines = [
        command(material, still, tmp_path / "still", "--tt_enable_mtp", "--tt_mtp_loss_scaling_factor", "0"),
        *(command(material, family, folder) for family, folder in off.items()),
    ]
    logs = run_ranks(world, run_all, lines)[0]
    before, after = headed.stored(material / still), headed.stored(tmp_path / "still")
    assert_same_layout(before, after)
    own = [name for name in before if headed.is_head(name) and not headed.is_copy(name)]
    assert [] == [name for name in own if not torch.equal(before[name], after[name])]
    assert_copies(after)
    assert [["mtp_1_loss"], [], []] == [depths_logged(log) for log in logs]
    for family, folder in off.items():
        left = {name for name in headed.stored(material / family) if not headed.is_head(name)}
        assert left == headed.stored(folder).keys()
        assert config(material / family) | {"num_nextn_predict_layers": 0} == config(folder)


def assert_copies(files: dict[str, torch.Tensor]) -> None:
    """What repeats a weight of the model is equal to it, trained as it was."""
    copies = [name for name in files if headed.is_copy(name)]
    assert [] == [name for name in copies if not torch.equal(files[name], files[headed.copied(name)])]


def depths_logged(log: dict[str, float]) -> list[str]:
    return sorted(name for name in log if name.startswith("mtp_"))
