"""Depths: heads in the layouts of DeepSeek-V3 and of Qwen3-Next, made of the family's own decoder layer.

One depth, after https://arxiv.org/abs/2412.19437 (section 2.2)::

    u = eh_proj(concat(enorm(Emb(token k further)), hnorm(h of the depth before)))       [B, S, 2H] -> [B, S, H]
    h = norm(layer(u))

``h`` of depth 0 is what the model's own head gets, after the final norm. The embedding comes first in ``concat``, and
embedding and head are the model's own. DeepSeek-V3 and the GLM models have all of it once for each depth; Qwen3-Next
and 3.5 have one ``eh_proj`` with its norms, and one final norm, for all depths
(``vllm/model_executor/models/{deepseek,glm4_moe,qwen3_next}_mtp.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchturbo.objectives.mtp.families import Family, layer_of
from torchturbo.objectives.mtp.serial import SerialHeads

if TYPE_CHECKING:
    from torchturbo.objectives.planned import Stored
    from torchturbo.objectives.taps import Call


class Join(nn.Module):
    """What brings a token's embedding and the state before it together."""

    def __init__(self, norm: nn.Module, size: int) -> None:
        super().__init__()
        self.enorm, self.hnorm = like(norm, size), like(norm, size)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return [B, S, H] of two tensors [B, S, H]."""
        joined: Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return joined


class Depths(SerialHeads):
    """Heads of which each is a :class:`Join`, a decoder layer of the family's class, and a norm.

    Parameters
    ----------
    base
        The Transformers model.
    heads
        How many depths.
    shared
        Whether all depths have one join and one norm together.

    """

    def __init__(self, base: Any, heads: int, *, shared: bool) -> None:
        super().__init__()
        decoder = base.get_decoder()
        config, own = decoder.config, 1 if shared else heads
        self.depths, self.pattern_layer = heads, layer_of(config)
        kind = type(decoder.layers[self.pattern_layer])
        self.joins = nn.ModuleList(Join(decoder.norm, config.hidden_size) for _ in range(own))
        # The index of a layer decides its kind of attention, and between dense and experts.
        self.layers = nn.ModuleList(kind(config, self.pattern_layer) for _ in range(heads))
        self.norms = nn.ModuleList(like(decoder.norm, config.hidden_size) for _ in range(own))
        joins = [f"joins.{at}" if own == heads else "" for at in range(heads)]
        self.units = tuple(name for at in range(heads) for name in (joins[at], f"layers.{at}") if name)

    def watched(self, base: Any) -> dict[str, nn.Module]:
        """Return the layer whose arguments the heads' layers get, and the final norm, whose output depth 1 gets."""
        decoder = base.get_decoder()
        return {"layer": decoder.layers[self.pattern_layer], "norm": decoder.norm}

    def first(self, calls: Mapping[str, Call]) -> Tensor:
        """Return what the model's own head gets, [B, S, H]."""
        hidden: Tensor = calls["norm"].output
        return hidden

    def depth(self, at: int, state: Tensor, embedded: Tensor, calls: Mapping[str, Call]) -> tuple[Tensor, Tensor]:
        """Run one head: its normed output goes to the model's head, and on to the next depth, as in Megatron-LM."""
        joined = self.joins[at % len(self.joins)](embedded, state)
        made = self.layers[at](joined, **calls["layer"].kwargs)
        hidden: Tensor = self.norms[at % len(self.norms)](made[0] if isinstance(made, tuple) else made)
        return hidden, hidden


def like(norm: nn.Module, size: int) -> nn.Module:
    """Return a new norm over H numbers, of another's class and with its epsilon."""
    kind: Any = type(norm)
    epsilon = next(getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name))
    made: nn.Module = kind(size, eps=epsilon)
    return made


# ---- names in checkpoints ----


def build(base: Any, family: Family, heads: int, stored: Stored) -> Depths:
    """Return heads whose tensors a checkpoint holds as layers behind the last, or under ``mtp``."""
    from transformers.core_model_loading import WeightRenaming

    behind = "{layer}" in family.place
    made, layers = Depths(base, heads, shared=not behind), base.config.get_text_config(decoder=True).num_hidden_layers
    places = [family.place.format(layer=layers + at, depth=at) for at in range(heads)]
    names = [pair for at, place in enumerate(places) for pair in (_behind(place, at) if behind else [])]
    renamings = [WeightRenaming(f"^{re.escape(old)}", re.escape(new)) for old, new in names or _beside()]
    made.transforms = [*renamings, *_experts(places, stored)]
    if behind:
        made.pattern = re.compile("|".join(map(re.escape, places)))
        made.copies = _copies(base, places)
    else:
        made.pattern = re.compile(r"mtp\.")
    return made


def _behind(place: str, at: int) -> list[tuple[str, str]]:
    """Return how names begin in files that hold a head as one layer more, and in the model."""
    joined = [(f"{place}{name}.", f"mtp.joins.{at}.{name}.") for name in ("enorm", "hnorm", "eh_proj")]
    return [*joined, (f"{place}shared_head.norm.", f"mtp.norms.{at}."), (place, f"mtp.layers.{at}.")]


def _beside() -> list[tuple[str, str]]:
    """Return the same for files that hold heads beside the model, under ``mtp``; those of the layers are alike."""
    return [
        ("mtp.fc.", "mtp.joins.0.eh_proj."),
        ("mtp.pre_fc_norm_embedding.", "mtp.joins.0.enorm."),
        ("mtp.pre_fc_norm_hidden.", "mtp.joins.0.hnorm."),
        ("mtp.norm.", "mtp.norms.0."),
    ]


def _copies(base: Any, places: list[str]) -> dict[str, str]:
    """Return the copies of embeddings and head that files may hold with each head, and what they are copies of."""
    names = {id(parameter): name for name, parameter in base.named_parameters(remove_duplicate=False)}
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    return {
        f"{place}{name}.weight": names[id(module.weight)]
        for place in places
        for name, module in (("embed_tokens", embeddings), ("shared_head.head", head))
    }


def _experts(places: list[str], stored: Stored) -> list[Any]:
    """Return what fuses the experts of a layer, which files hold one by one or, in some families, fused already."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    fused = any(name.startswith(tuple(places)) and name.endswith("mlp.experts.down_proj") for name in stored or ())
    table = [] if fused else get_checkpoint_conversion_mapping("qwen2_moe") or []
    return [entry for entry in table if isinstance(entry, WeightConverter)]
