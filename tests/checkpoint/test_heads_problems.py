"""Heads that the files lack, or hold in part or in another shape: told before a weight is read, and nothing else."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import headed
import pytest
import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from torchturbo.checkpoint.weights import WeightSource
from torchturbo.errors import ConfigError

EXPERT = "model.layers.2.mlp.experts.1.up_proj.weight"
JOIN = "model.layers.2.eh_proj.weight"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Write a checkpoint whose files are a changed one's."""
    headed.save(folder, "glm4_moe")
    tensors = change(headed.stored(folder))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: one for name, one in tensors.items() if name not in names}


def without_heads(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in tensors.items() if not headed.is_head(name)}


def narrow(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {JOIN: tensors[JOIN][:, :48].contiguous()}


def fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    scale = {JOIN.removesuffix("weight") + "weight_scale_inv": torch.ones(1, 1)}
    return tensors | {JOIN: tensors[JOIN].to(torch.float8_e4m3fn), EXPERT: tensors[EXPERT].to(torch.int8)} | scale


def stray(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    computed = {"model.layers.2.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    return tensors | {"model.layers.2.weird.weight": torch.ones(2)} | computed


def second(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    heads = {
        name.replace("layers.2.", "layers.3."): one.clone() for name, one in tensors.items() if headed.is_head(name)
    }
    return tensors | heads


CASES = {
    "none": (without_heads, ["num_nextn_predict_layers is 1 in its config.json, and its files hold no tensor model.layers.2.*"]),
    "an expert": (without(EXPERT), [f"lacks 1 of the 29 weights of the extra heads: {EXPERT}"]),
    "a norm and the join": (without(JOIN, "model.layers.2.enorm.weight"), ["lacks 2 of the 29 weights", JOIN]),
    "shape": (narrow, ["holds mtp.joins.0.eh_proj.weight as [32, 48], the model expects [32, 64]"]),
    "fp8": (fp8, [f"holds {JOIN} as float8_e4m3fn (and 1 more of its heads' tensors): heads are read without scales"]),
    "stray": (stray, ["holds 1 tensors of the extra heads that nothing reads: model.layers.2.weird.weight"]),
    "second": (second, ["num_nextn_predict_layers is 1 in its config.json, and its files hold 2 of them"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_told_before_weights_are_read(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `torchturbo train` and `torchturbo plan` alike, with the key; without the heads the same files are well."""
    from torchturbo.cli.main import main
    from torchturbo.train.run import train

    change, texts = CASES[case]
    folder = rewrite(tmp_path / "model", change)
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.rows(4))
    line = [
        "--model_name_or_path",
        str(folder),
        "--dataset",
        str(rows),
        "--output_dir",
        str(tmp_path / "out"),
        "--use_cpu",
    ]
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError) as stopped:
        train([*line, "--tt_enable_mtp"])
    (told,) = stopped.value.problems
    assert [] == [text for text in texts if text not in told.message], told
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(["plan", "--world_size", "2", *line, "--tt_enable_mtp"])
    words = " ".join(out.getvalue().split())
    assert 2 == status
    assert texts[-1].split(" of ")[0] in words
    with contextlib.redirect_stdout(io.StringIO()):
        assert 0 == main(["plan", "--world_size", "2", *line])


def test_loading_heads_alone_stops_at_the_same(tmp_path: Path) -> None:
    """Whoever calls it."""
    folder = rewrite(tmp_path, without(EXPERT))
    model = headed.attached(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with pytest.raises(ConfigError, match="lacks 1 of the 29 weights of the extra heads"):
        WeightSource.find(str(folder)).load_heads(model)
    with pytest.raises(ConfigError, match="lacks 1 of the 29 weights of the extra heads"):
        WeightSource.find(str(folder)).load(model)


def test_heads_that_nothing_is_made_of_are_told(tmp_path: Path) -> None:
    """All names are there, and the table makes nothing of some: random values would take their place."""
    folder = headed.save(tmp_path, "glm4_moe")
    model = headed.attached(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    model.mtp.transforms = [one for one in model.mtp.transforms if "mtp.norms.0." not in one.target_patterns]
    source = WeightSource.find(str(folder))
    norm = source.stored["model.layers.2.shared_head.norm.weight"]
    source.stored["mtp.norms.0.weight"] = norm  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"holds nothing that makes 1 weights of the extra heads: mtp\.norms"):
        source.load_heads(model)


def test_transformers_says_nothing_of_the_heads_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has no modules for them, and would print a table; what else it does not know is told as before."""
    import logging

    from torchturbo.train.arguments import ModelArguments
    from torchturbo.train.model import load_config, load_model

    folder = headed.save(tmp_path, "deepseek_v3")
    arguments = ModelArguments(model_name_or_path=str(folder))
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        config = load_config(arguments)
        model = load_model(arguments, config)
        assert "UNEXPECTED" not in caplog.text
        known = type(model)._keys_to_ignore_on_load_unexpected
        assert [r"model\.layers\.61.*"] == list(known)  # the class is as it was
        tensors = headed.stored(folder) | {"model.stray.weight": torch.ones(2)}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        load_model(arguments, config)
    finally:
        logger.removeHandler(caplog.handler)
    assert "model.stray.weight" in caplog.text
    assert "layers.2" not in caplog.text
