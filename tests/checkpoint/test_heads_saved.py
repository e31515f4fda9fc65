"""Models with heads saved by hand and resumed: Transformers' own way of saving, files beside a model, native state."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import draft_models
import headed
import mesh_runs
import parity
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from torchturbo.checkpoint.hf_export import export
from torchturbo.checkpoint.weights import WeightSource
from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine

MTP = {"mtp": {"enabled": True}}


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def assert_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    assert [] == [name for name, one in before.items() if not torch.equal(one.float(), after[name].float())]


@pytest.mark.parametrize("family", list(headed.MODELS))
def test_save_pretrained_writes_heads_while_they_are_trained_and_after(family: str, tmp_path: Path) -> None:
    """Of a prepared model, a released one, a copy of it, and one that another engine prepares again."""
    folder = headed.save(tmp_path / "model", family)
    before, model = headed.stored(folder), loaded(folder)
    engine = parity.prepared(model, parity.config(**MTP))
    model.save_pretrained(tmp_path / "prepared", max_shard_size="40KB")
    assert_same(before, headed.stored(tmp_path / "prepared"))
    heads = model.mtp
    with torch.no_grad():
        heads.layers[0].self_attn.o_proj.weight.add_(1)
    engine.release(model)
    model.save_pretrained(tmp_path / "released")
    copy.deepcopy(model).save_pretrained(tmp_path / "copy")
    after = headed.stored(tmp_path / "released")
    moved = [name for name, one in before.items() if not torch.equal(one.float(), after[name])]
    assert 1 == len(moved)
    assert moved[0].endswith("self_attn.o_proj.weight") and headed.is_head(moved[0])
    assert_same(after, headed.stored(tmp_path / "copy"))
    assert config(folder).get("num_nextn_predict_layers") == config(tmp_path / "released").get(
        "num_nextn_predict_layers"
    )
    parity.prepared(model, parity.config(**MTP))
    assert model.mtp is heads  # with the weights that were trained, not the checkpoint's
    again = loaded(tmp_path / "released")
    parity.prepared(again, parity.config(**MTP))
    assert_same(dict(model.state_dict()), dict(again.state_dict()))


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_a_model_that_lost_its_heads_says_so_wherever_it_is_saved(family: str, tmp_path: Path) -> None:
    """Its own configuration is what it was, once it is released."""
    folder = headed.save(tmp_path / "model", family)
    model = loaded(folder)
    said = model.config.to_dict()
    engine = parity.prepared(model, parity.config())
    export(model, tmp_path / "prepared", saved_dtypes={})
    engine.release(model)
    assert said == model.config.to_dict()
    model.save_pretrained(tmp_path / "released")
    assert said | {"dtype": "float32"} == model.config.to_dict() | {"dtype": "float32"}
    for name in ("prepared", "released"):
        assert 0 == config(tmp_path / name)["num_nextn_predict_layers"]
        assert [] == [one for one in headed.stored(tmp_path / name) if headed.is_head(one)]
    parity.prepared(model, parity.config(**MTP))  # from the checkpoint that it came from
    assert model.mtp.depths == 1


def test_heads_do_not_keep_a_model_from_being_pickled(tmp_path: Path) -> None:
    """As torch.save of a whole model does; what is read again is saved as the model is."""
    model = loaded(headed.save(tmp_path / "model", "glm4_moe"))
    parity.prepared(model, parity.config(**MTP)).release(model)
    other = pickle.loads(pickle.dumps(model))
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    other.save_pretrained(tmp_path / "saved")
    assert_same(headed.stored(tmp_path / "model"), headed.stored(tmp_path / "saved"))


def test_a_pickled_target_saves_its_draft_beside_it(tmp_path: Path) -> None:
    """None of it is in the target's own files."""
    model = draft_models.target()
    parity.prepared(model, parity.config(**MTP)).release(model)
    pickle.loads(pickle.dumps(model)).save_pretrained(tmp_path)
    assert [] == [name for name in headed.stored(tmp_path) if name.startswith("mtp.")]
    own, written = dict(model.mtp.state_dict()), load_file(tmp_path / "dspark/model.safetensors")
    assert_same(own, {name: written[name] for name in own})


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_an_engine_trains_the_heads_that_a_copy_came_with(copied: Any, tmp_path: Path) -> None:
    """They are the copy's own, with the weights that were trained; an engine without takes them out and says so."""
    model = loaded(headed.save(tmp_path / "model", "glm4_moe"))
    parity.prepared(model, parity.config(**MTP)).release(model)
    with torch.no_grad():
        model.mtp.layers[0].self_attn.o_proj.weight.add_(1)
    other = copied(model)
    heads = other.mtp
    engine = parity.prepared(other, parity.config(**MTP))
    assert other.mtp is heads
    assert heads is not model.mtp
    assert_same(dict(model.mtp.state_dict()), dict(heads.state_dict()))
    engine.release(other).save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "original")
    assert_same(headed.stored(tmp_path / "original"), headed.stored(tmp_path / "saved"))
    without = copied(model)
    parity.prepared(without, parity.config())
    assert not hasattr(without, "mtp")
    assert 0 == without.config.num_nextn_predict_layers


def test_a_kept_draft_is_held_against_resized_embeddings() -> None:
    """Its Markov head has a row for each token."""
    model = draft_models.target()
    parity.prepared(model, parity.config(**MTP)).release(model)
    before = model.config.vocab_size
    model.resize_token_embeddings(before + 8)
    engine = Engine(parity.config(**MTP), Context())
    (problem,) = [problem for problem in engine.problems(model) if problem.key == "mtp.enabled"]
    assert f"know {before} tokens, and its embeddings have {before + 8}" in problem.message


def test_a_draft_that_is_left_aside_or_begins_anew_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And an export into a folder with an earlier one takes that away: it belongs to another target."""
    model = draft_models.target()
    parity.prepared(model, parity.config(**MTP))
    export(model, tmp_path, saved_dtypes={})
    assert (tmp_path / "dspark/model.safetensors").is_file()
    target = loaded(tmp_path)
    capfd.readouterr()
    parity.prepared(target, parity.config())
    assert "dspark is left aside: what is saved will have no draft" in "".join(capfd.readouterr())
    export(target, tmp_path, saved_dtypes={})
    assert not (tmp_path / "dspark").exists()
    assert "dspark is removed" in "".join(capfd.readouterr())
    parity.prepared(loaded(tmp_path), parity.config(**MTP))
    assert "it begins anew" in "".join(capfd.readouterr())


def test_copies_are_written_only_where_the_checkpoint_has_them(tmp_path: Path) -> None:
    """A model that is from no checkpoint gets them: serving engines look for them."""
    folder = headed.save(tmp_path / "model", "glm4_moe", copies=False)
    model = loaded(folder)
    parity.prepared(model, parity.config(**MTP))
    export(model, tmp_path / "out", saved_dtypes={})
    assert headed.stored(folder).keys() == headed.stored(tmp_path / "out").keys()
    new = AutoModelForCausalLM.from_config(loaded(folder).config)
    parity.prepared(new, parity.config(**MTP))
    export(new, tmp_path / "new", saved_dtypes={})
    files = headed.stored(tmp_path / "new")
    assert 2 == len([name for name in files if headed.is_copy(name)])
    assert headed.stored(folder).keys() == {name for name in files if not headed.is_copy(name)}


# ---- native checkpoints ----


def trained(folder: Path, out: Path, words: list[str], **changes: Any) -> Any:
    from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args

    set_torchturbo_args(parse_torchturbo_args(["--tt_gbs", "4", *words])[0])
    return mesh_runs.trainer(str(out), words, model=loaded(folder), **changes)


def saved(rank: int, folder: Path, out: Path, words: list[str]) -> dict[str, Any]:
    return mesh_runs.saved(rank, str(out), words, "qwen3_moe", loaded(folder))


def resumed(rank: int, folder: Path, out: Path, words: list[str], checkpoint: Path) -> dict[str, Any]:
    return mesh_runs.resumed(rank, str(out), words, "qwen3_moe", str(checkpoint), loaded(folder))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_heads_resume_bit_for_bit_and_on_another_mesh(tmp_path: Path) -> None:
    """Two ranks with experts divided, and one process: weights, optimizer state and losses, the depths' too."""
    from test_native_meshes import assert_bit_equal
    from test_native_meshes import assert_same as assert_close

    folder, out = (
        headed.save(tmp_path / "model", "glm4_moe", "float32", vocab_size=mesh_runs.VOCABULARY),
        tmp_path / "out",
    )
    words = ["--tt_enable_mtp", "--tt_optimizer", "muon"]
    runs = run_ranks(2, saved, folder, out, [*words, "--tt_ep_size", "2"])
    for run in runs:
        assert_bit_equal(run)
        assert any(name.startswith("mtp.") for name in run["whole"]["weights"])
    (one,) = run_ranks(1, resumed, folder, tmp_path / "one", words, out / "checkpoint-2")
    assert_close(runs[0]["whole"], one)


def refused(rank: int, folder: Path, out: Path, checkpoint: Path) -> str:
    from torchturbo.errors import ConfigError

    words = ["--tt_resume_allow", "mtp.enabled"]
    with pytest.raises(ConfigError) as stopped:
        mesh_runs.resumed(rank, str(out), words, "qwen3_moe", str(checkpoint), loaded(folder))
    return str(stopped.value)


def test_a_run_with_heads_is_not_resumed_without(tmp_path: Path) -> None:
    """Nor the other way round, whatever is allowed: the optimizer's state is made for them."""
    folder, out = (
        headed.save(tmp_path / "model", "glm4_moe", "float32", vocab_size=mesh_runs.VOCABULARY),
        tmp_path / "out",
    )
    run_ranks(1, saved, folder, out, ["--tt_enable_mtp"])
    (told,) = run_ranks(1, refused, folder, tmp_path / "other", out / "checkpoint-2")
    assert "mtp.enabled" in told
    assert "use the old value" in told


# ---- heads that are made anew, and such as lie beside the model ----


def beside(rank: int, folder: Path, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="meta")
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    source = WeightSource.find(str(folder))
    engine = Engine(parity.config(**MTP), Context(world_size=2, rank=rank, weights=source))
    engine.prepare(model)
    assert not any(one.is_meta for one in model.parameters())
    export(model, out, saved_dtypes=engine.context.saved_dtypes)


def test_a_draft_is_made_alike_on_any_mesh_and_exported_beside_the_model(tmp_path: Path) -> None:
    """On the meta device until it is sharded; its files are in a folder of their own, and load again."""
    folder = tmp_path / "model"
    draft_models.target(vocab_size=321, tie_word_embeddings=True).save_pretrained(folder)
    run_ranks(2, beside, folder, tmp_path / "sharded")
    model = loaded(folder)
    engine = parity.prepared(model, parity.config(**MTP))
    export(model, tmp_path / "one", saved_dtypes=engine.context.saved_dtypes)
    engine.release(model).save_pretrained(tmp_path / "saved")
    files = {name: load_file(tmp_path / name / "dspark" / "model.safetensors") for name in ("sharded", "one", "saved")}
    for name in ("sharded", "saved"):
        assert_same(files["one"], files[name])
        assert_same(headed.stored(folder), headed.stored(tmp_path / name))
    again = loaded(tmp_path / "sharded")
    parity.prepared(again, parity.config(**MTP))
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
