"""What docs/guides/plugins.md says is true: its plugins train, its errors are printed, its table is the contract."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tiny

from torchturbo.cli.main import main
from torchturbo.plugins import Plugin
from torchturbo.plugins.contract import HOOKS, Run
from torchturbo.plugins.modules import GROUP
from torchturbo.train.run import train

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "plugins.md").read_text("utf-8")
FENCE = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.S | re.M)
BLOCKS = [(match[1], match[2] or "", match[3]) for match in FENCE.finditer(PAGE)]
FILES = {title: text for _, title, text in BLOCKS if title}


@pytest.fixture
def site(folder: Path) -> Path:
    """The page's files, a model and rows in the current folder."""
    tiny.save(folder / "model")
    tiny.write_jsonl(folder / "rows.jsonl", tiny.rows(8))
    for name in ("padding.py", "padding.yaml", "entropy.py"):
        (folder / name).write_text(FILES[name])
    return folder


def words(*more: str) -> list[str]:
    return [
        "--model_name_or_path", "model", "--dataset", "rows.jsonl", "--output_dir", "out", "--use_cpu", "--max_steps",
        "2", "--logging_steps", "1", "--per_device_train_batch_size", "4", *more,
    ]  # fmt: skip


def test_the_plugins_of_the_page_train(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One watches, the other adds to the loss; both are logged."""
    result = train(words("--tt_plugin", "padding.py:padding.yaml", "--tt_plugin", "entropy.py"))
    entries = [entry for entry in result.log_history if "loss" in entry]

    assert 2 == len(entries)
    assert all(0 < entry["padding"] < 1 for entry in entries)
    assert all(-0.01 * 5.8 < entry["entropy"] < -0.01 * 5 for entry in entries)  # ln 320 = 5.77 at the start
    (site / "padding.yaml").write_text("limit: 0\n")
    train(words("--tt_plugin", "padding.py:padding.yaml", "--overwrite_output_dir"))
    assert re.search(r"step 1: \d+% of the tokens are padding; try --packing true", capsys.readouterr().out)


def test_the_loss_term_of_the_page_refuses_chunks(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "turbo.yaml").write_text("loss_chunk:\n  enabled: true\n")

    assert 2 == main(["train", *words("--tt_config", "turbo.yaml", "--tt_plugin", "entropy.py")])
    assert "plugin entropy: it needs the logits, which loss_chunk.enabled never holds" in capsys.readouterr().err


def test_the_errors_of_the_page_are_printed(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [text.splitlines() for language, _, text in BLOCKS if language == "text"]
    (site / "padding.yaml").write_text("limit: 4\nlimt: 1\n")
    assert 2 == main(["train", *words("--tt_plugin", "padding.py:padding.yaml")])
    assert samples[1] == capsys.readouterr().err.splitlines()

    (site / "padding.yaml").write_text("limit: 1\n")
    assert 1 == main(["train", *words("--packing", "--tt_plugin", "padding.py:padding.yaml")])
    assert any(line.startswith(samples[0][0]) for line in capsys.readouterr().err.splitlines())


def test_the_schema_for_the_editor_is_written(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (text for language, _, text in BLOCKS if language == "bash" and "config schema" in text)
    assert 0 == main(line.partition(" >")[0].split()[1:])
    assert '"limit"' in capsys.readouterr().out
    (line,) = (text for language, _, text in BLOCKS if language == "bash" and "config validate" in text)
    assert 0 == main(line.split()[1:])
    assert "padding.yaml: ok\n" == capsys.readouterr().out


def test_the_package_of_the_page_offers_the_plugin() -> None:
    """Group, name and module as the loader looks for them."""
    points = tomllib.loads(FILES["pyproject.toml"])["project"]["entry-points"]

    assert {GROUP: {"padding": "padding"}} == points
    assert "class Padding(Plugin)" in FILES["padding.py"]


def test_the_objects_of_the_page_are_used(site: Path) -> None:
    """The line of one's own train.py, with its names filled in."""
    from transformers import TrainingArguments

    from torchturbo.adapters.hf_trainer import TurboTrainer
    from torchturbo.engine.args import set_torchturbo_args
    from torchturbo.train.batches import Collator
    from torchturbo.train.examples import Examples

    set_torchturbo_args(None)
    names: dict[str, Any] = {"TurboTrainer": TurboTrainer, "model": tiny.model()}
    exec(FILES["padding.py"], names)
    names["arguments"] = TrainingArguments(
        str(site / "own"), max_steps=1, use_cpu=True, report_to="none", save_strategy="no"
    )
    names["rows"] = Examples([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 8)
    exec(FILES["own.py"], names)
    trainer = names["trainer"]
    trainer.data_collator = Collator(0)
    trainer.train()

    assert 0.4 == trainer.turbo.context.hooks.plugins[0].settings["limit"]
    assert 0.0 == trainer.turbo.context.hooks.plugins[0].share


def test_the_table_is_the_contract() -> None:
    """Every hook in its order, with its arguments, and nothing else; every attribute of a run that is named exists."""
    table = PAGE.partition("| Hook |")[2].partition("\n\n")[0]
    named = [
        found for row in table.splitlines()[2:] for found in re.findall(r"`(\w+)\(([^)]*)\)`", row.split(" | ")[0])
    ]
    expected = [("__init__", "settings")]
    for hook in HOOKS:
        expected.append((hook, ", ".join(list(inspect.signature(getattr(Plugin, hook)).parameters)[1:])))

    assert expected == named
    facts = PAGE.partition("`run` tells about the run:")[2].partition("\n\n")[0]
    fields = set(Run.__dataclass_fields__)
    assert {"config", "model", "step", "rank"} <= set(re.findall(r"`(\w+)`", facts)) <= fields
