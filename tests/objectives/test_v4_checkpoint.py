"""DeepSeek-V4's heads in checkpoints: under their official names, loaded, trained, exported and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import v4
from ranks import run_ranks
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from torchturbo.checkpoint.hf_export import export
from torchturbo.checkpoint.weights import WeightSource
from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.engine.steps.heads import KEPT
from torchturbo.objectives.heads import extra_heads

SERIAL: dict[str, Any] = {"num_nextn_predict_layers": 2}
SETTINGS: dict[str, Any] = {"mtp": {"enabled": True}, "dspark": {"num_anchors": 4}}
KINDS = {"serial": (SERIAL, v4.serial_names(2)), "stages": (v4.DSPARK, v4.stage_names(3))}


def written(folder: Path, changes: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write a checkpoint with heads as they are published, and return the heads' tensors."""
    model = v4.model(**changes)
    parity.prepared(model, parity.config(**SETTINGS)).release(model)
    heads = {name: value.detach() for name, value in v4.named(v4.stir(KEPT[model], 3)).items()}
    formats = {name: value.dtype if name.endswith(kept) else dtype for name, value in heads.items()}
    model.to(dtype).save_pretrained(folder)
    heads = {name: value.to(formats[name]).clone() for name, value in heads.items()}
    save_file(v4.read(folder) | heads, folder / "model.safetensors", metadata={"format": "pt"})
    return heads


kept = ("norm.weight", "attn_sink", "gate.bias", "_fn", "_base", "_scale")
"""What published checkpoints hold in float32."""


def loaded(folder: Path) -> tuple[Any, Engine]:
    """Return a model with heads and its engine, as a run in one process makes them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, parity.prepared(model, parity.config(**SETTINGS))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_come_back_under_their_names(kind: str, tmp_path: Path) -> None:
    """Save, load, export: the files hold just the published names, the same numbers, and give the same step.

    The configuration says what it said: one serial head, where there are three stages.
    """
    changes, names = KINDS[kind]
    heads = written(tmp_path / "one", changes)
    assert names == heads.keys()
    model, engine = loaded(tmp_path / "one")
    expected = parity.step(engine, model, [v4.batch()])
    with engine.cache_as_found(model):
        export(model, tmp_path / "two", saved_dtypes=engine.context.saved_dtypes)
        model.save_pretrained(tmp_path / "three")
    for folder in (tmp_path / "two", tmp_path / "three"):
        found = {name: value for name, value in v4.read(folder).items() if name.startswith("mtp.")}
        assert names == found.keys()
        assert [] == [name for name in names if not torch.equal(heads[name], found[name])]
        assert changes["num_nextn_predict_layers"] == AutoConfig.from_pretrained(folder).num_nextn_predict_layers
    again, second = loaded(tmp_path / "two")
    found = parity.step(second, again, [v4.batch()])

    assert expected.loss == found.loss
    assert [] == [name for name, value in expected.gradients.items() if not torch.equal(value, found.gradients[name])]


def test_stages_that_are_off_are_exported_as_they_are(tmp_path: Path) -> None:
    heads = written(tmp_path / "one", v4.DSPARK)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    engine = parity.prepared(model, parity.config(mtp={"enabled": True}, dspark={"enabled": False}))
    parity.step(engine, model, [v4.batch()])
    export(model, tmp_path / "two", saved_dtypes=engine.context.saved_dtypes)
    found = v4.read(tmp_path / "two")

    assert heads.keys() == {name for name in found if name.startswith("mtp.")}
    assert [] == [name for name, value in heads.items() if not torch.equal(value, found[name])]


@pytest.mark.parametrize("kind", KINDS)
def test_without_heads_an_export_has_none_and_says_so(kind: str, tmp_path: Path) -> None:
    """Nor does it describe stages that it has not; the model does, once the engine has let go of it."""
    written(tmp_path / "one", KINDS[kind][0])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    engine = parity.prepared(model, parity.config())
    export(model, tmp_path / "two", saved_dtypes=engine.context.saved_dtypes)
    engine.release(model).save_pretrained(tmp_path / "three")

    for folder in (tmp_path / "two", tmp_path / "three"):
        assert [] == [name for name in v4.read(folder) if name.startswith("mtp.")]
        config = AutoConfig.from_pretrained(folder)
        assert (0, []) == (config.num_nextn_predict_layers, [name for name in vars(config) if "dspark" in name])
    assert ("dspark_block_size" in vars(model.config)) is (kind == "stages")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_in_float32_stays_so(kind: str, tmp_path: Path) -> None:
    """Norms, streams' weights, sinks and routers' biases of a bf16 checkpoint, in the model and in what it exports."""
    heads = written(tmp_path / "one", KINDS[kind][0], torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.bfloat16)
    engine = Engine(parity.config(**SETTINGS), Context())
    assert not engine.problems(model)
    engine.prepare(model.train())
    export(model, tmp_path / "two", saved_dtypes=engine.context.saved_dtypes)
    found = v4.read(tmp_path / "two")

    assert {torch.bfloat16, torch.float32} == {value.dtype for value in heads.values()}
    assert {} == {n: found[n].dtype for n, value in heads.items() if found[n].dtype != value.dtype}
    assert [] == [name for name, value in heads.items() if not torch.equal(value, found[name])]


def test_the_official_names_of_the_model_itself_are_read_with_the_heads(tmp_path: Path) -> None:
    """A checkpoint as published has no prefix, and the keys' norm has a name that Transformers does not write."""
    heads = written(tmp_path / "one", v4.DSPARK)
    ours = v4.read(tmp_path / "one")
    official = {v4.official(name): value for name, value in ours.items()}
    save_file(official, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    model, _ = loaded(tmp_path / "one")
    found = v4.named(extra_heads(model))

    assert {"embed.weight", "head.weight", "layers.1.attn.kv_norm.weight", "hc_head_fn"} <= official.keys()
    assert [] == [name for name, value in heads.items() if not torch.equal(value, found[name])]
    assert torch.equal(model.model.layers[1].self_attn.kv_norm.weight, official["layers.1.attn.kv_norm.weight"])


def test_copies_of_embeddings_and_head_are_known_for_what_they_are(tmp_path: Path) -> None:
    """Some checkpoints repeat them with each head: they are no tensors of it, and are written again."""
    written(tmp_path / "one", SERIAL)
    ours = v4.read(tmp_path / "one")
    ours |= {
        "mtp.0.emb.tok_emb.weight": ours["model.embed_tokens.weight"].clone(),
        "mtp.1.head.weight": ours["head.weight"].clone(),
    }
    save_file(ours, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    model, engine = loaded(tmp_path / "one")
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    export(model, tmp_path / "two", saved_dtypes=engine.context.saved_dtypes)
    found = v4.read(tmp_path / "two")

    assert torch.equal(found["mtp.0.emb.tok_emb.weight"], ours["model.embed_tokens.weight"])
    assert torch.equal(found["mtp.1.head.weight"], ours["head.weight"] + 1)


def test_a_checkpoint_without_the_heads_it_speaks_of_is_refused_before_it_is_read(tmp_path: Path) -> None:
    for number, changes in enumerate((SERIAL, v4.DSPARK)):
        folder = tmp_path / str(number)
        v4.model(**changes).save_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        context = Context(weights=WeightSource.find(str(folder)))
        (problem,) = Engine(parity.config(**SETTINGS), context).problems(model)

        assert "mtp.enabled" == problem.key
        assert "hold no tensor mtp.0." in problem.message


def shard(rank: int, folder: Path) -> None:
    """Load a model sharded, from meta, and export it again."""
    for kind in KINDS:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / kind))
        context = Context(world_size=2, rank=rank, weights=WeightSource.find(str(folder / kind)))
        engine = Engine(parity.config(**SETTINGS), context)
        assert not engine.problems(model)
        engine.prepare(model.train())
        assert context.weights is not None
        context.weights.load(model)
        export(model, folder / f"{kind}-again", saved_dtypes=context.saved_dtypes)


def test_sharded_models_load_their_shares_and_export_the_whole(tmp_path: Path) -> None:
    for kind, (changes, _) in KINDS.items():
        written(tmp_path / kind, changes)
    run_ranks(2, shard, tmp_path)
    for kind in KINDS:
        one, two = v4.read(tmp_path / kind), v4.read(tmp_path / f"{kind}-again")
        assert one.keys() == two.keys()
        assert [] == [name for name in one if not torch.equal(one[name], two[name])]
