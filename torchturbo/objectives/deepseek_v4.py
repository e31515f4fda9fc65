"""What DeepSeek-V4's two kinds of extra heads share: the names of ``mtp.*`` in checkpoints, and the block they are made of.

A V4 checkpoint keeps multi-token prediction and DSpark under one prefix, ``mtp.0``, ``mtp.1``, …. Each of them is a
decoder block whose attention sees a sliding window alone, without compressed keys, and whose router is learned, not
hashed. Names as in https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash-DSpark. Transformers' table for V4 does not fit
these tensors: it renames every ``.norm.``, and the heads have norms of that name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from torchturbo.errors import shorten

MODEL_TYPE = "deepseek_v4"
PATTERN = re.compile(r"mtp\.(\d+)\.")
"""A head's tensors in a checkpoint, and its number."""
COPY = re.compile(r"mtp\.\d+\.(?:(?P<embeddings>embed|embed_tokens|emb\.tok_emb)|head|lm_head)\.weight")
"""What repeats the model's embeddings or head there, in some checkpoints."""

BLOCK: tuple[tuple[str, str], ...] = (
    (".attn.", ".self_attn."),
    (".attn_sink", ".sinks"),
    (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."),
    (".q_norm.", ".q_a_norm."),
    (".wkv.", ".kv_proj."),
    (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn.", ".mlp."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".gate.bias", ".gate.e_score_correction_bias"),
    (".shared_experts.w1.", ".shared_experts.gate_proj."),
    (".shared_experts.w2.", ".shared_experts.down_proj."),
    (".shared_experts.w3.", ".shared_experts.up_proj."),
    *((f".hc_{half}_{name}", f".{half}_hc.{name}") for half in ("attn", "ffn") for name in ("fn", "base", "scale")),
    *((f".hc_head_{name}", f".hc_head.hc_{name}") for name in ("fn", "base", "scale")),
)
"""Parts of the names of a block's tensors: in checkpoints, and in Transformers' modules."""


def transforms(moved: Iterable[tuple[str, str]] = ()) -> list[Any]:
    """Return Transformers' conversions from a checkpoint's ``mtp.*`` to heads that hold their blocks in ``layers``.

    ``moved`` are beginnings of names below ``mtp.`` that do not become a part of a block: in checkpoints, and in the
    heads.
    """
    renamings = [WeightRenaming(rf"^mtp\.{re.escape(disk)}", rf"^mtp\.{re.escape(own)}") for disk, own in moved]
    renamings += [WeightRenaming(re.escape(disk), re.escape(own)) for disk, own in BLOCK]
    renamings += [WeightRenaming(r"^mtp\.(?=\d)", r"^mtp\.layers\.")]
    one_by_one, stacked = r"\.experts.*.{}.weight", r"\.experts.{}"
    return [
        *renamings,
        WeightConverter(
            [one_by_one.format("w1"), one_by_one.format("w3")],
            stacked.format("gate_up_proj"),
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(one_by_one.format("w2"), stacked.format("down_proj"), [MergeModulelist(dim=0)]),
    ]


def count(names: Iterable[str]) -> int:
    """Return how many heads a checkpoint has, by the names of its tensors: those that are numbered from 0 on."""
    numbers = _numbers(names)
    return next(at for at in range(len(numbers) + 1) if str(at) not in numbers)


def gap(names: Iterable[str]) -> str | None:
    """Return what is wrong with the numbers of a checkpoint's heads; None where they go from 0 on without a gap."""
    numbers = _numbers(names)
    first = count(numbers.values())
    stray = min((numbers[number] for number in numbers.keys() - set(map(str, range(first)))), default=None)
    if stray is None:
        return None
    return f"its files hold {shorten(stray)} and no tensor mtp.{first}.*, expected numbers from 0 on without a gap"


def _numbers(names: Iterable[str]) -> dict[str, str]:
    """Return the numbers of the heads in a checkpoint, and the first name of a tensor of each.

    They are left as text: whoever wrote the file chose their length.
    """
    return {match[1]: match.string for match in map(PATTERN.match, sorted(names, reverse=True)) if match}


def copies(base: Any, stored: Collection[str]) -> dict[str, str]:
    """Return which of a checkpoint's tensors repeat a weight of the model, and what that is called in the model."""
    names = {id(parameter): name for name, parameter in base.named_parameters()}
    found = ((name, COPY.fullmatch(name)) for name in stored)
    return {
        name: names[id((base.get_input_embeddings() if match["embeddings"] else base.get_output_embeddings()).weight)]
        for name, match in found
        if match
    }


def blocks(kind: Any, config: Any, number: int) -> nn.ModuleList:
    """Return decoder blocks of a class, made from a V4 configuration as those after the model's last layer.

    The configuration lists the model's own layers, so that the blocks are built from one that lists them, too. Later
    they look into the model's own, where a choice of attention is made for all.
    """
    longer = copy.copy(config)
    layers = config.num_hidden_layers
    longer.layer_types = [*config.layer_types[:layers], *["sliding_attention"] * number]
    longer.mlp_layer_types = [*config.mlp_layer_types[:layers], *["moe"] * number]
    made = nn.ModuleList([kind(longer, layers + at) for at in range(number)])
    for module in made.modules():
        if getattr(module, "config", None) is longer:
            module.config = config
    return made


def streams(embedded: Tensor, number: int) -> Tensor:
    """Return embeddings [B, T, H] as the equal streams [B, T, hc, H] that a model's first block begins with."""
    return embedded.unsqueeze(2).expand(-1, -1, number, -1).contiguous()


def other_architecture(config: Any, number: int, names: Collection[str] | None) -> str | None:
    """Return what tells a model's heads from those of V4 that are known here; None where nothing does.

    DeepSeek-V4.1 keeps stages of another kind under the same names: nothing joins the streams of the last one, tapped
    layers give what comes into them, and the draft has experts of its own number. Transformers has no model of it, so
    that there is nothing to hold stages against.
    """
    fields = [name for name in ("dspark_n_routed_experts", "dspark_num_experts_per_tok") if hasattr(config, name)]
    if fields:
        return f"its configuration has {', '.join(fields)}: DeepSeek-V4.1's stages are of another architecture"
    join = f"mtp.{number - 1}.hc_head_fn"
    if names is not None and number and join not in names:
        return f"its files hold no {join}: DeepSeek-V4.1's stages, which join no streams, are of another architecture"
    return None
