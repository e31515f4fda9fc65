"""The flops that objectives add to a model's own: depths of multi-token prediction, a draft, CAP's look at the head.

Trained heads have gradients of all that they compute from; what they continue from has its own. Heads with a weight of
0 run forward alone. :mod:`torchturbo.observe.flops` has the conventions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from torchturbo.engine.model import base_model
from torchturbo.objectives import chunked
from torchturbo.objectives.chunked import ChunkedHead, head_of
from torchturbo.objectives.diffusion.models import is_diffusion_model
from torchturbo.objectives.dspark.backbone import Draft
from torchturbo.objectives.heads import ExtraHeads, extra_heads
from torchturbo.objectives.mtp.serial import SerialHeads
from torchturbo.observe import matmuls
from torchturbo.observe.flops import ROWS, SLOTS, TARGETS, TOKENS, Flops, Part
from torchturbo.observe.matmuls import Product, checkpointing_of, matrix_products

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig

MTP, DSPARK = "mtp.loss_scaling_factor", "dspark.loss_scaling_factor"
ANCHORS = "dspark.num_anchors"
CONTEXT = ("k_proj", "v_proj")
"""A draft's projections that the context goes through, too."""


class Sizes(NamedTuple):
    """What of a step's batches has to be counted beside their tokens, for the objectives of one model."""

    block: int = 0
    """Tokens of a block of block diffusion; 0 for other models."""
    anchors: int = 0
    """Blocks of a draft in a row at most; 0 without a draft."""
    slots: int = 0
    """Slots of each."""


def sizes(model: nn.Module, config: EngineConfig) -> Sizes:
    """Return what a model's objectives make of its batches."""
    if is_diffusion_model(model):
        return Sizes(block=config.diffusion.bd_block_size)
    draft = _draft(model, config)
    return Sizes() if draft is None else Sizes(anchors=config.resolved(ANCHORS), slots=draft.block_size)


def count(model: nn.Module, config: EngineConfig) -> Flops:
    """Return the flops of a model and of the objectives that a configuration trains it for.

    Raises
    ------
    Uncountable
        With the reason.

    """
    found = matmuls.count(model)
    parts = [*_depths(model, config), *_of_draft(model, config), *_cap(model, config)]
    return Flops((*found.parts, *parts), found.left_out)


def trains(heads: ExtraHeads, config: EngineConfig) -> bool:
    """Return whether heads are trained: their loss is not off, and has a weight."""
    if isinstance(heads, Draft):
        return bool(config.dspark.enabled and config.resolved(DSPARK) != 0)
    return bool(config.resolved(MTP) != 0)


def _part(name: str, products: list[Product], trained: bool, per: str = TOKENS, again: float = 0.0) -> Part:
    """Return the part of products whose inputs have gradients where anything has."""
    cost = sum(product.cost for product in products)
    weights = sum(product.cost for product in products if product.weight.requires_grad)
    return Part(name, cost, cost * trained, weights * trained, again * trained, per=per)


def _head(base: Any, config: Any) -> list[Product]:
    return list(matrix_products(base.get_output_embeddings(), config))


# ---- multi-token prediction ----


def _depths(model: nn.Module, config: EngineConfig) -> Iterator[Part]:
    """Yield the parts of each depth: its join, its layer, and the model's head once more."""
    base: Any = base_model(model)
    heads = extra_heads(base)
    if not isinstance(heads, SerialHeads) or not config.mtp.enabled:
        return
    trained, text = trains(heads, config), base.config.get_text_config()
    joins, head = getattr(heads, "joins", None), _head(base, text)
    decoder, _ = matmuls.decoder_of(base, text)
    layers: Any = heads.layers
    like: int = getattr(heads, "pattern_layer", text.num_hidden_layers - 1)  # it tells what they attend to
    for at, layer in enumerate(layers):
        name = f"mtp {at + 1}"
        if joins is not None:
            yield _part(f"{name} join", list(matrix_products(joins[at % len(joins)], text)), trained)
        part, _ = matmuls.layer_part(name, layer, like, text, True, checkpointing_of(layer, decoder))
        yield part if trained else part._replace(inputs=0, weights=0, recomputed=0, pair_backward=0, pair_recomputed=0)
        again = sum(product.cost for product in head) if chunked.recomputes(model) else 0.0
        yield _part(f"{name} head", head, trained, again=again)


# ---- a draft ----


def _draft(model: nn.Module, config: EngineConfig) -> Draft | None:
    heads = extra_heads(base_model(model))
    return heads if isinstance(heads, Draft) and config.mtp.enabled and config.dspark.enabled else None


def _of_draft(model: nn.Module, config: EngineConfig) -> Iterator[Part]:
    """Yield the parts of a draft: of the context for every token, of the blocks for every slot."""
    draft: Any = _draft(model, config)
    if draft is None:
        return
    base: Any = base_model(model)
    trained, own = trains(draft, config), draft.config
    layers = {id(weight) for weight in draft.layers.parameters()}
    small = [one for one in (draft.markov, draft.confidence) if one is not None]
    after = {id(weight) for module in small for weight in module.parameters()}
    before = [one for one in matrix_products(draft, own) if id(one.weight) not in layers | after]
    yield _part("draft: features", before, trained)._replace(inputs=0)  # which come without a graph
    for at, layer in enumerate(draft.layers):
        yield from _draft_layer(f"draft {at}", layer, at, own, trained, checkpointing_of(layer, draft))
    vocabulary = sum(one.cost for one in _head(base, own))
    # The target's logits have no gradient; the draft's get theirs in forward, so that none are computed twice.
    yield Part("draft: head", vocabulary, vocabulary * trained, per=ROWS)
    yield Part("draft: teacher", vocabulary, per=ROWS)
    for module in small:
        for one in matrix_products(module, own):
            yield _part(f"draft: {one.name}", [one], trained, ROWS)


def _draft_layer(
    name: str, layer: nn.Module, at: int, config: Any, trained: bool, checkpointing: str
) -> Iterator[Part]:
    products = list(matrix_products(layer, config))
    context = [one for one in products if one.name.split(".")[-2] in CONTEXT]
    seen = sum(one.cost for one in context) if checkpointing else 0.0
    again = matmuls.recomputed_of(layer, products, checkpointing)
    yield _part(f"{name}: context", context, trained, again=seen)
    pair = matmuls.pair_of(layer, at, config)
    cost = pair.scores + pair.values
    yield _part(name, products, trained, ROWS, again)._replace(
        pair=cost,
        pair_backward=2 * cost * trained,
        pair_recomputed=cost * bool(again) * trained,
        span=SLOTS,
    )


# ---- CAP ----


def _cap(model: nn.Module, config: EngineConfig) -> Iterator[Part]:
    """Yield what CAP computes a second time where logits come in chunks: the head, forward, again, and backward."""
    base: Any = base_model(model)
    if is_diffusion_model(model) and config.diffusion.cap_lambda and isinstance(head_of(base), ChunkedHead):
        products = _head(base, base.config.get_text_config())
        cost = sum(one.cost for one in products)
        weights = sum(one.cost for one in products if one.weight.requires_grad)
        yield Part("cap head", recomputed=3 * cost + weights, per=TARGETS)
