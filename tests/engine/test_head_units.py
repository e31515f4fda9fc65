"""Units of sharding of extra heads: what they name, after the model's layers, in models of one part and of several."""

from __future__ import annotations

from typing import Any

import mtp_models
import parity
import pytest
import torch
from ranks import run_ranks

from torchturbo.engine.backends.fsdp2.prefetch import layers_of, prefetch_lists
from torchturbo.engine.backends.fsdp2.units import find_units


def test_heads_are_units_behind_the_layers() -> None:
    """A join and a layer for each depth, the layer's experts one of their own; all of them in one stack."""
    units = find_units(mtp_models.headed("deepseek_v3", num_nextn_predict_layers=2))
    names = [(one.name, [name for name, _ in one.experts], one.stack) for one in units.layers]
    experts = [f"mtp.layers.{at}.mlp.experts" for at in range(2)]
    assert [
        ("model.layers.0", [], "model.layers"),
        ("model.layers.1", ["model.layers.1.mlp.experts"], "model.layers"),
        ("mtp.joins.0", [], "mtp"), ("mtp.layers.0", [experts[0]], "mtp"),
        ("mtp.joins.1", [], "mtp"), ("mtp.layers.1", [experts[1]], "mtp"),
    ] == names  # fmt: skip


def test_heads_are_gathered_ahead_of_one_another() -> None:
    """But the model's last layer asks for none of them: the head runs in between."""
    units = find_units(mtp_models.headed("deepseek_v3", num_nextn_predict_layers=2))
    lists = prefetch_lists(layers_of(units), "expert_with_layer", "forward", 1, 1)
    assert ("model.layers.1.mlp.experts",) == lists["model.layers.1"].forward
    assert ("mtp.layers.0", "mtp.layers.0.mlp.experts") == lists["mtp.joins.0"].forward
    assert ("mtp.layers.0.mlp.experts", "mtp.joins.1") == lists["mtp.layers.0"].forward


VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
          "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}  # fmt: skip


def several_parts() -> Any:
    """Return a Qwen3.5 with a vision tower on meta, and heads."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from torchturbo.objectives.heads import attach
    from torchturbo.objectives.mtp.families import find

    text = mtp_models.SIZES | mtp_models.SETTINGS["qwen3_5_text"]
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=VISION)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
        planned = find(model, None)
        assert planned is not None and planned.build is not None
        attach(model, planned.build(model))
    return model


def test_heads_of_a_model_with_a_vision_tower_are_units_too() -> None:
    """They run for every batch, while the tower, which only some batches reach, is none."""
    units = find_units(several_parts())
    language = ["model.language_model.layers.0", "model.language_model.layers.1"]
    assert [*language, "mtp.joins.0", "mtp.layers.0"] == [one.name for one in units.layers]


def sharded(rank: int, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return which modules FSDP2 holds, one step's gradients here and in one process, and what is prefetched."""
    from torch.distributed.fsdp import FSDPModule

    def make() -> Any:
        made = mtp_models.model(kind, num_nextn_predict_layers=2)
        made.config._experts_implementation = "eager"
        return made

    window = parity.batches(2, vocabulary=mtp_models.VOCABULARY)
    alone = parity.config(mtp={"enabled": True})
    one = make()
    expected = parity.step(parity.prepared(one, alone), one, window)
    model, config = make(), parity.config(mtp={"enabled": True}, **settings)
    engine = parity.prepared(model, config, 2, rank)
    found = parity.step(engine, model, parity.share(window, 2, config.parallel_plan.sp_size, rank))
    parity.assert_equal(found, expected)
    return {"modules": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]}


@pytest.mark.parametrize(
    "settings",
    [{"backend_config": {"prefetch_strategy": "expert_with_layer", "prefetch_direction": "forward_backward"}},
     {"parallel_plan": {"ep_size": 2}}],
    ids=["prefetch", "experts"],
)  # fmt: skip
def test_sharded_heads_train_as_in_one_process(settings: dict[str, Any]) -> None:
    """Each unit gathered for itself, with lists of what comes next, and with experts divided."""
    for rank in run_ranks(2, sharded, "deepseek_v3", settings):
        heads = [name for name in rank["modules"] if name.startswith("mtp")]
        assert {"mtp.joins.0", "mtp.layers.0", "mtp.layers.0.mlp.experts", "mtp.joins.1", "mtp.layers.1"} < set(heads)
        assert "mtp" not in heads


def test_a_sharded_model_gets_no_heads_afterwards() -> None:
    """It was made for what it had."""
    (rank,) = run_ranks(1, later)
    assert [["mtp.enabled"], []] == rank


def later(rank: int) -> list[list[str]]:
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    made = []
    for first in (False, True):
        model = mtp_models.model("glm4_moe")
        config = parity.config(mtp={"enabled": first}, backend_config={"cpu_offload": {"enabled": True, "mode": "all"}})
        parity.prepared(model, config, 1, 0)
        other = parity.config(mtp={"enabled": True}, backend_config={"cpu_offload": {"enabled": True, "mode": "all"}})
        made.append(sorted({one.key for one in Engine(other, Context()).problems(model)}))
    return made
