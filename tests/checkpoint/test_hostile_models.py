"""Models from hostile hands: an error with its place and what to do, and nothing that they bring along is run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from torchturbo.errors import ConfigError
from torchturbo.train.arguments import ModelArguments
from torchturbo.train.model import load_config, load_model


class Trap:
    """What makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def test_a_bomb_among_weights_is_refused_without_advice_to_run_it(tmp_path: Path) -> None:
    """Older checkpoints are pickles."""
    folder = tiny.save(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Trap(tmp_path / "ran")}, folder / "pytorch_model.bin")
    arguments = ModelArguments(model_name_or_path=str(folder))
    with pytest.raises(ConfigError) as caught:
        load_model(arguments, load_config(arguments))
    expected = (
        f"--model_name_or_path: {folder}: its weights (*.bin) hold other things than tensors, so they are not loaded"
    )
    assert str(caught.value).startswith(f"{expected}; use its safetensors files")
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": -4},
        {"hidden_size": "many"},
        {"num_attention_heads": 0},
        {"rope_parameters": 5},
        {"dtype": "none"},
    ],
    ids=str,
)
def test_a_configuration_that_is_none_is_told_with_its_place(change: dict[str, Any], tmp_path: Path) -> None:
    """Each of Transformers' configurations has checks, and errors, of its own."""
    folder = tiny.save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    arguments = ModelArguments(model_name_or_path=str(folder))
    with pytest.raises(ConfigError, match="--model_name_or_path: .*: no usable (configuration|model): "):
        load_model(arguments, load_config(arguments))
