"""Finds a model's matrix products in its module tree, as the parts that :mod:`torchturbo.observe.flops` adds up.

The tree says what a configuration does not: adapters, frozen weights, tied heads, which layers are checkpointed. The
configuration says what the tree does not: how many experts a token meets, and which keys a layer's queries see. Every
weight with two dimensions or more has to be explained; one that is not makes the model uncountable, not the figure wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchturbo.engine.model import base_model
from torchturbo.objectives import chunked
from torchturbo.objectives.heads import extra_heads
from torchturbo.observe.flops import FULL, TARGETS, Flops, Part, Span
from torchturbo.observe.gradients import AFTER_MLP, ATTENTION, BEFORE_ATTENTION, NORM, OUTPUT, follow
from torchturbo.observe.weights import weights_in_use

ROUTER_CLASS = re.compile(r"Router|Gate")
ROUTER = re.compile(r"router|gate|\w+_gate")
"""Name of a linear layer whose output only weighs another's."""
SPANS = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
WINDOW_SIZES = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}


class Uncountable(Exception):
    """A model of whose flops nothing certain can be said; the message says why."""


class Product(NamedTuple):
    """One matrix product: a weight, and how many multiply-adds it costs a token."""

    name: str
    module: nn.Module
    """The module that holds the weight."""
    weight: Tensor
    cost: float
    linear: bool
    """Whether it is a linear layer of its own: nothing of its output is kept for backward."""


def count(model: nn.Module) -> Flops:
    """Return the flops of a model, as it is now: trained, frozen, adapted, checkpointed; it may be on the meta device.

    Extra heads are not in it: see :func:`torchturbo.observe.objectives.count`.

    Raises
    ------
    Uncountable
        With the reason.

    """
    base: Any = base_model(model)
    config = base.config.get_text_config() if hasattr(base, "config") else None
    if config is None or not hasattr(base, "get_decoder"):
        raise Uncountable(f"{type(base).__name__} is no decoder of Transformers")
    if getattr(config, "is_encoder_decoder", False):
        raise Uncountable(f"{type(base).__name__} is an encoder and a decoder")
    decoder, layers = decoder_of(base, config)
    below = _input_needs_gradient(base, layers)
    parts = []
    for index, layer in enumerate(layers):
        part, below = layer_part(f"layer {index}", layer, index, config, below, checkpointing_of(layer, decoder))
        parts.append(part)
    parts += _around(decoder, layers, config, _input_needs_gradient(base, layers))
    parts += _heads(base, decoder, config, below, chunked.recomputes(model))
    return Flops(tuple(parts), _left_out(base, decoder))


def decoder_of(base: Any, config: Any) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module that holds the layers, and the layers."""
    wanted = getattr(config, "num_hidden_layers", None)
    for module in (base.get_decoder(), base.base_model, *base.children()):
        found = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) == wanted]
        if len(found) == 1:
            return module, found[0]
    raise Uncountable(f"{type(base).__name__} has no list of its {wanted} layers")


def layer_part(
    name: str, layer: nn.Module, index: int, config: Any, below: bool, checkpointing: str
) -> tuple[Part, bool]:
    """Return a layer's part, and whether a gradient flows out of it into the next one's input.

    ``below`` says whether a gradient is needed of its input.
    """
    products = list(matrix_products(layer, config))
    pair = pair_of(layer, index, config)
    weights = list(weights_in_use(layer))
    trained = any(weight.tensor.requires_grad for weight in weights)
    # Reentrant checkpointing gives a trained layer inputs that require grad, since it would have no gradient otherwise.
    needed = below or (checkpointing == "reentrant" and trained)
    found = follow(weights, needed, _side_by_side(layer, config))
    again = recomputed_of(layer, products, checkpointing) if found.output else 0.0
    part = Part(
        name,
        forward=sum(product.cost for product in products),
        inputs=sum(product.cost for product in products if found.inputs[product.name]),
        weights=sum(product.cost for product in products if product.weight.requires_grad),
        recomputed=again,
        pair=pair.scores + pair.values,
        # scores = queries x keys, out = scores x values: each product has a gradient for each of its two factors
        pair_backward=pair.scores * (found.queries + found.keys)
        + pair.values * ((found.queries or found.keys) + found.values),
        pair_recomputed=pair.scores + pair.values if again else 0.0,
        span=pair.span,
    )
    return part, found.output


def _side_by_side(layer: nn.Module, config: Any) -> bool:
    """Return whether a layer's MLP takes the layer's input, as its attention does."""
    said = [getattr(config, name, None) for name in ("use_parallel_residual", "parallel_attn")]
    norms = [name for name, _ in layer.named_children() if NORM.search(name)]
    return any(said) or (len(norms) == 1 and BEFORE_ATTENTION.match(norms[0]) is not None)


def recomputed_of(layer: nn.Module, products: list[Product], checkpointing: str) -> float:
    """Return what a token costs again in backward.

    Non-reentrant checkpointing stops as soon as it has all that backward needs; the output of a layer's last product
    is not among that, unless something behind it (a norm, dropout) needs it.
    """
    if not checkpointing:
        return 0.0
    again = sum(product.cost for product in products)
    if checkpointing == "non-reentrant" and products and products[-1].linear and not _behind(layer, products[-1]):
        again -= products[-1].cost
    return again


def _behind(layer: nn.Module, last: Product) -> bool:
    """Return whether something that keeps its input for backward stands behind a layer's last product."""
    modules = list(layer.named_modules())
    at = next(at for at, (_, module) in enumerate(modules) if module is last.module)
    after = [module for _, module in modules[at + 1 :]]
    after += [module for name, module in modules if AFTER_MLP.match(name)]
    norm = any(AFTER_MLP.match(name) and hasattr(module, "weight") for name, module in modules)
    return norm or any(isinstance(module, nn.Dropout) and module.p > 0 for module in after)


def checkpointing_of(layer: nn.Module, decoder: nn.Module) -> str:
    """Return how a layer is checkpointed: ``reentrant``, ``non-reentrant``, or not (empty)."""
    for module in (layer, decoder):
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            return "reentrant" if _is_reentrant(function) else "non-reentrant"
    return ""


def _is_reentrant(function: Any) -> bool:
    """Return what Transformers told torch's checkpoint function; the engine may have put a function around it."""
    if not isinstance(function, partial):
        return True  # what torch does that is not told
    if "use_reentrant" in function.keywords:
        return bool(function.keywords["use_reentrant"])
    inner = [arg for arg in function.args if isinstance(arg, partial)]
    return _is_reentrant(inner[0]) if inner else True


def matrix_products(root: nn.Module, config: Any) -> Iterator[Product]:
    """Yield the matrix products of a module in the order in which it registers them."""
    for path, module, weight in weights_in_use(root):
        if weight.dim() >= 2 and not path.endswith("bias") and not isinstance(module, nn.Embedding):
            yield Product(path, module, weight, *_cost(path, root, module, weight, config))


def _cost(path: str, root: nn.Module, module: nn.Module, weight: Tensor, config: Any) -> tuple[float, bool]:
    """Return a weight's multiply-adds a token, and whether its module is a linear layer of the layer's own line."""
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    size = (
        module.in_features * module.out_features if isinstance(module, nn.Linear) else weight.numel()
    )  # packed or not
    if weight.dim() == 2 and (linear or ROUTER_CLASS.search(type(module).__name__)):
        if held := _experts_beside(
            path, root
        ):  # experts that are modules of their own, each met by its share of tokens
            return size * _active(config) / held, False
        return float(size), linear and not ROUTER.fullmatch(path.rpartition(".")[0].rpartition(".")[2])
    if weight.dim() == 3 and _holds_experts(path, module, weight.shape[0], config):
        return weight.numel() / weight.shape[0] * _active(config), False
    raise Uncountable(f"{path} of {type(module).__name__} is no weight of a matrix product that is known")


def _experts_beside(path: str, root: nn.Module) -> int:
    """Return how many experts stand in the list that holds this one; 0 for a weight of no such list."""
    words = path.split(".")
    at = words.index("experts") if "experts" in words else len(words)
    if any(word.startswith("lora_") for word in words[at + 1 : at + 2]):
        raise Uncountable(f"{path} adapts all experts at once, in a way that is not known")
    if at + 1 >= len(words) or not words[at + 1].isdigit():
        return 0
    return len(list(root.get_submodule(".".join(words[: at + 1])).children()))


def _holds_experts(path: str, module: nn.Module, number: int, config: Any) -> bool:
    """Return whether a tensor's first dimension are all experts, or a rank's share of them."""
    experts = _experts(config)
    named = "expert" in f"{path}.{type(module).__name__}".lower()
    return number > 0 and (number == experts or (named and experts > 0 and experts % number == 0))


def _experts(config: Any) -> int:
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        if isinstance(number := getattr(config, name, None), int):
            return number
    return 0


def _active(config: Any) -> int:
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"):
        if isinstance(number := getattr(config, name, None), int):
            return number
    raise Uncountable(f"{type(config).__name__} does not say how many experts a token meets")


class Pair(NamedTuple):
    """What a (query, key) pair costs in a layer, in multiply-adds, and which pairs there are."""

    scores: float
    """The product of query and key."""
    values: float
    """The weighted value."""
    span: Span


def pair_of(layer: nn.Module, index: int, config: Any) -> Pair:
    """Return what a (query, key) pair costs in a layer.

    A head takes the product of query and key (qk dimension) and adds the value, weighted (v dimension).
    """
    found = [(name, child) for name, child in layer.named_children() if ATTENTION.fullmatch(name)]
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds and index < len(kinds) else None
    if len(found) != 1 or kind not in (None, *SPANS) or hasattr(config, "index_topk"):
        raise Uncountable(f"{type(layer).__name__} {index} attends in a way that is not known ({kind or 'no name'})")
    attention: Any = found[0][1]
    heads = getattr(config, "num_attention_heads", 0)
    plain = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or _split(config, heads)
    qk = getattr(attention, "qk_head_dim", None) or plain
    value = getattr(attention, "v_head_dim", None) or plain
    width = _input_width(attention)
    if width is None or width % value:
        raise Uncountable(f"{type(attention).__name__} has no output projection whose heads can be counted")
    return Pair(width // value * qk, width, _span(kind, config))


def _split(config: Any, heads: int) -> int:
    return int(config.hidden_size) // heads


def _input_width(attention: nn.Module) -> int | None:
    """Return the width of what an attention's output projection takes."""
    for name in OUTPUT:
        projection = getattr(attention, name, None)
        projection = getattr(projection, "base_layer", projection)  # PEFT's wrapper
        if projection is not None and isinstance(weight := getattr(projection, "weight", None), Tensor):
            return int(getattr(projection, "in_features", weight.shape[0]))  # Conv1D has its input first
    return None


def _span(kind: str | None, config: Any) -> Span:
    if kind is None:  # one window for all layers, where there is one
        window = getattr(config, "sliding_window", None)
        used = getattr(config, "use_sliding_window", True)
        return Span("sliding", window) if isinstance(window, int) and window > 0 and used else FULL
    name = SPANS[kind]
    size = getattr(config, WINDOW_SIZES.get(name, ""), None)
    return Span(name, size) if isinstance(size, int) and size > 0 else FULL


def _input_needs_gradient(base: Any, layers: nn.ModuleList) -> bool:
    """Return whether a gradient is needed of the first layer's input.

    It is where the embeddings are trained, or a tower or projector whose features stand among them, or where they are
    made to look as if they were (Transformers' ``enable_input_require_grads``).
    """
    if getattr(base, "_require_grads_hook", None) is not None:
        return True
    behind = {id(weight) for weight in layers.parameters()} | _of_extra_heads(base)
    embeddings = base.get_input_embeddings()
    tied = {id(weight) for weight in embeddings.parameters()} if isinstance(embeddings, nn.Module) else set()
    behind |= {id(weight) for _, head in _head_modules(base) for weight in head.parameters()} - tied
    return any(weight.requires_grad and weight.dim() > 1 for weight in base.parameters() if id(weight) not in behind)


def _around(decoder: nn.Module, layers: nn.ModuleList, config: Any, below: bool) -> list[Part]:
    """Return the parts of a decoder's products outside its layers: projections of the embeddings."""
    inside = {id(weight) for weight in layers.parameters()}
    outside = [product for product in matrix_products(decoder, config) if id(product.weight) not in inside]
    return [
        Part(name, cost, cost * (below and weight.requires_grad), cost * weight.requires_grad)
        for name, _, weight, cost, _ in outside
    ]


def _heads(base: Any, decoder: nn.Module, config: Any, below: bool, recomputed: bool) -> list[Part]:
    """Return the parts of the linear layers that follow the decoder, as a rule the language model's head."""
    norms = any(weight.requires_grad for name, weight in decoder.named_parameters() if "norm" in name)
    return [
        Part(name, cost, cost * (below or norms), cost * weight.requires_grad, cost if recomputed else 0.0, per=TARGETS)
        for name, head in _head_modules(base)
        for _, _, weight, cost, _ in matrix_products(head, config)
    ]


def _head_modules(base: Any) -> list[tuple[str, nn.Module]]:
    head = base.get_output_embeddings()
    if head is not None:
        return [("head", head)]
    return [(name, child) for name, child in base.named_children() if isinstance(child, nn.Linear)]


def _left_out(base: Any, decoder: nn.Module) -> str:
    """Return the names of what stands beside decoder and head with weights of its own: a vision tower, a projector."""
    counted = {id(weight) for weight in decoder.parameters()} | _of_extra_heads(base)
    counted |= {id(weight) for _, head in _head_modules(base) for weight in head.parameters()}
    names: dict[str, None] = {}
    for name, weight in base.named_parameters():
        if id(weight) not in counted and weight.dim() > 1:
            names[name.removeprefix(f"{base.base_model_prefix}.").split(".")[0]] = None
    return ", ".join(names)


def _of_extra_heads(base: Any) -> set[int]:
    """Return the ids of the weights that :mod:`torchturbo.observe.objectives` counts."""
    heads = extra_heads(base)
    return set() if heads is None else {id(weight) for weight in heads.parameters()}
