"""Which parameters of extra heads go to Muon: matrices that map features to features, inside layers and between them."""

from __future__ import annotations

import draft_models
import mtp_models
import parity

from torchturbo.optim.groups import matrices, parameter_groups


def test_joins_and_layers_of_depths_are_muons() -> None:
    """Their routers and norms are AdamW's, as in the model."""
    model = mtp_models.headed("deepseek_v3")
    taken = {matrix.name for matrix in matrices(model)}
    heads = {name for name, _ in model.named_parameters() if name.startswith("mtp.")}
    left = {name for name in heads - taken if "norm" not in name}
    assert {"mtp.layers.0.mlp.gate.weight"} == left
    assert {"mtp.joins.0.eh_proj.weight", "mtp.layers.0.mlp.experts.gate_up_proj"} <= taken
    like = {name.replace("mtp.layers.0", "model.layers.1") for name in taken if name.startswith("mtp.layers")}
    assert like == {name for name in taken if name.startswith("model.layers.1")}


def test_what_of_a_draft_makes_logits_or_looks_up_tokens_is_not() -> None:
    """Features' projection and the gate are; one row, which the confidence head has, is a vector."""
    model = draft_models.target()
    parity.prepared(model, parity.config(mtp={"enabled": True}))
    taken = {matrix.name for matrix in matrices(model)}
    heads = [name for name, _ in model.named_parameters() if name.startswith("mtp.") and "norm" not in name]
    layers = [name for name in heads if name.startswith("mtp.layers.")]
    assert {"mtp.fc.weight", "mtp.markov_head.gate_proj.weight", *layers} == {name for name in heads if name in taken}
    assert len(layers) == 2 * 7
    grouped = [id(one) for group in parameter_groups(model, 0.1, ()) for one in group["params"]]
    assert sorted(grouped) == sorted(id(one) for one in model.parameters())
