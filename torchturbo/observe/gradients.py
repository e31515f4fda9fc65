"""Follows gradients through a decoder layer: which of its products need that of their input.

In a model that is trained as a whole all do. Below the lowest trained weight none does, and in that weight's own layer
those that stand behind it do. What stands side by side (queries, keys and values; gate and up projection; a linear
layer and its adapter) is not behind one another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchturbo.observe.weights import Weight

ATTENTION = re.compile(r"(self_)?(attn|attention)")
"""Name of a decoder layer's attention."""
OUTPUT = ("o_proj", "c_proj", "out_proj", "dense", "wo")
"""Names of an attention's last projection, whose input is heads * value dimension."""
MLP_OUTPUT = re.compile(r"down_proj|c_proj|w2|fc2|fc_out|dense_4h_to_h|output_linear")
"""Names of an MLP's last projection."""
BEFORE_ATTENTION = re.compile(
    r"input_(layer_?)?norm|ln_1|ln_attn|norm_?1|(pre_)?((self_)?attn|attention)_(layer_?)?norm"
)
"""Names of a norm between a layer's input and its attention."""
AFTER_MLP = re.compile(r"post_(feedforward|feed_forward|mlp|ffw|ffn)")
"""Name of a norm behind a layer's last projection."""
NORM = re.compile(r"norm|ln_")
OPERANDS = {"q": "q", "query": "q", "k": "k", "key": "k", "v": "v", "value": "v", "kv": "kv"}
"""What the first word of a projection's name says that it makes; any other makes queries, keys and values."""


class Gradients(NamedTuple):
    """What of a layer needs a gradient."""

    inputs: dict[str, bool]
    """Of each weight, by its path: whether its product's input does."""
    queries: bool
    keys: bool
    values: bool
    output: bool
    """Whether the layer's output does, which is the next one's input."""


class _Site(NamedTuple):
    """A module that stands alone in its line: a linear layer with its adapters, a norm, one of a block's tensors."""

    name: str
    weights: list[Weight]

    @property
    def part(self) -> str:
        """The name of what it is inside its block."""
        return self.name.partition(".")[2].partition(".")[0]

    @property
    def trained(self) -> bool:
        """Whether any of its weights is."""
        return any(weight.tensor.requires_grad for weight in self.weights)

    def inputs(self, needed: bool) -> Iterator[tuple[str, bool]]:
        """Yield for each weight whether its product's input needs a gradient, where the site's input does or not."""
        adapted = needed  # an adapter's products follow one another, beside the base layer
        for weight in self.weights:
            yield weight.path, adapted
            base = weight.path.startswith(f"{self.name}.base_layer.")  # the first of them
            adapted = adapted or (weight.tensor.requires_grad and not base)


def follow(weights: Iterable[Weight], needed: bool, side_by_side: bool) -> Gradients:
    """Return what of a layer needs a gradient.

    Parameters
    ----------
    weights
        The layer's.
    needed
        Whether the layer's input does.
    side_by_side
        Whether the MLP takes what the attention takes, and not what it gives.

    """
    blocks = _blocks(weights)
    norms = {name: _trained(sites) for name, sites in blocks.items() if NORM.search(name)}
    before = any(trained for name, trained in norms.items() if BEFORE_ATTENTION.match(name))
    between = [t for name, t in norms.items() if not BEFORE_ATTENTION.match(name) and not AFTER_MLP.match(name)]
    inputs: dict[str, bool] = {}
    operands = dict.fromkeys("qkv", needed or before)
    stream = needed or before
    for name in filter(ATTENTION.fullmatch, blocks):
        stream = _attention(blocks[name], stream, inputs, operands)
    entering = (needed or (any(between) if between else before)) if side_by_side else (stream or any(between))
    for name, sites in blocks.items():
        if name in norms:
            for site in sites:
                inputs.update(site.inputs(needed))
        elif not ATTENTION.fullmatch(name):
            entering = _mlp(sites, entering, inputs)
    return Gradients(inputs, operands["q"], operands["k"], operands["v"], stream or entering or any(norms.values()))


def _attention(sites: Sequence[_Site], needed: bool, inputs: dict[str, bool], operands: dict[str, bool]) -> bool:
    """Follow gradients through an attention; returns whether its output needs one."""
    lines: dict[str, bool] = {}  # of one word each: q_proj and q_norm, or latent attention's q_a_proj and q_b_proj
    last = [site for site in sites if site.part in OUTPUT]
    for site in sites:
        if site not in last:
            word = site.part.partition("_")[0]
            inputs.update(site.inputs(lines.get(word, needed)))
            lines[word] = lines.get(word, needed) or site.trained
            for operand in OPERANDS.get(word, "qkv"):
                operands[operand] = operands[operand] or lines[word]
    needed = needed or any(lines.values())
    for site in last:
        inputs.update(site.inputs(needed))
        needed = needed or site.trained
    return needed


def _mlp(sites: Sequence[_Site], needed: bool, inputs: dict[str, bool]) -> bool:
    """Follow gradients through an MLP, or the experts of several; returns whether its output needs one."""
    inside: dict[str, bool] = {}  # by what the projections stand in: an expert of its own, or all experts at once
    for site in sites:
        parent, _, name = site.name.rpartition(".")
        if not MLP_OUTPUT.fullmatch(name):
            inputs.update(site.inputs(needed))
            inside[parent] = inside.get(parent, needed) or site.trained
    for site in sites:
        parent, _, name = site.name.rpartition(".")
        if MLP_OUTPUT.fullmatch(name):
            inputs.update(site.inputs(inside.get(parent, needed)))
    return needed or _trained(sites)


def _blocks(weights: Iterable[Weight]) -> dict[str, list[_Site]]:
    """Return a layer's sites by the layer's child in which they stand."""
    sites: dict[str, _Site] = {}
    for weight in weights:
        name = _site_name(weight.path)
        sites.setdefault(name, _Site(name, [])).weights.append(weight)
    blocks: dict[str, list[_Site]] = {}
    for site in sites.values():
        blocks.setdefault(site.name.partition(".")[0], []).append(site)
    return blocks


def _site_name(path: str) -> str:
    """Return a weight's path without its own name, and without what an adapter adds to it."""
    words = path.split(".")
    adapter = next((at for at, word in enumerate(words) if word == "base_layer" or word.startswith("lora_")), None)
    if adapter is not None:
        return ".".join(words[:adapter])
    name = path.removesuffix(".weight").removesuffix(".bias")
    return name.removesuffix("_bias")  # of a tensor that holds all experts' weights


def _trained(sites: Iterable[_Site]) -> bool:
    return any(site.trained for site in sites)
