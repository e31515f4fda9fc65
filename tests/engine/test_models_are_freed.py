"""A model that nobody holds any more is freed, whatever an engine did to it: a search makes one for each trial."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import mtp_models
import parity
import pytest
import tiny

DRAFT = {"block_size": 3, "num_hidden_layers": 1, "target_layer_ids": [0], "mask_token_id": 319, "markov_rank": 4} | {
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "nothing": (tiny.model, {}),
    "chunked loss": (tiny.model, {"loss_chunk": {"enabled": True}}),
    "heads": (mtp_models.model, {"mtp": {"enabled": True}}),
    "heads that are off": (mtp_models.model, {}),
    "a draft": (lambda: tiny.model("qwen3", dspark_config=DRAFT), {"mtp": {"enabled": True}}),
    "router losses": (lambda: tiny.model("qwen3_moe"), {"moe": {"aux_loss_coeff": 0.1, "z_loss_coeff": 0.1}}),
    "block diffusion": (
        lambda: tiny.model("qwen3", is_diffusion_model=True, mask_token_id=1),
        {"diffusion": {"cap_lambda": 1.0}},
    ),
}


@pytest.mark.parametrize("released", [True, False], ids=["released", "as it is"])
@pytest.mark.parametrize("name", MODELS)
def test_a_prepared_model_is_freed(name: str, released: bool) -> None:
    """With its engine, after a step."""
    make, settings = MODELS[name]
    model = make()
    engine = parity.prepared(model, parity.config(**settings))
    if name != "block diffusion":  # whose batches are doubled by an adapter
        parity.step(engine, model, parity.batches(1, vocabulary=90))
    if released:
        engine.release(model)
    dead = [weakref.ref(model), weakref.ref(copy.deepcopy(model))]

    del model, engine
    gc.collect()

    assert [None, None] == [one() for one in dead]
