"""Writes docs/support.md: which family trains with what, as the checks at the start of a launch say it.

Run it after a change: ``python docs/tables/support.py``. A test holds the committed page to it. Each family of the
registries is made at its default size and without weights, and every check of the pipeline is asked about it: what the
page says is what a launch says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a checkout that is not installed

import torch  # noqa: E402
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM  # noqa: E402

from torchturbo.engine.args import parse_torchturbo_args  # noqa: E402
from torchturbo.engine.config import EngineConfig, build_from_args  # noqa: E402
from torchturbo.engine.context import Context  # noqa: E402
from torchturbo.engine.engine import Engine  # noqa: E402
from torchturbo.generated.keys import KEYS  # noqa: E402
from torchturbo.models import llada2  # noqa: E402
from torchturbo.objectives import routers  # noqa: E402
from torchturbo.objectives.diffusion.models import MODELS  # noqa: E402
from torchturbo.objectives.dspark import layouts  # noqa: E402
from torchturbo.objectives.mtp import families  # noqa: E402
from torchturbo.parallel import experts  # noqa: E402

FILE = ROOT / "docs" / "support.md"
DENSE = {
    "llama": "Llama 2 and 3, SmolLM2",
    "mistral": "Mistral",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, text",
    "glm4": "GLM-4",
    "phi3": "Phi-3 and Phi-4",
    "olmo2": "OLMo 2",
    "gpt2": "GPT-2",
}
"""Families without experts, which no registry lists."""
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "flex_olmo": {"num_experts": 8},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 4},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 1},
}
"""What a family's configuration needs where its defaults are no model that is published."""


LAYERS = 8
"""Enough for one of each kind of layer."""


@dataclass(frozen=True, eq=False)
class Column:
    """Something that a family can be trained with."""

    title: str
    settings: dict[str, Any]
    """Keys of the configuration that turn it on."""
    fields: Callable[[str], dict[str, Any]] = lambda _: {}
    """Fields that the configuration of a model type has to have for it."""
    parallel: bool = False
    """Whether it is one of the two that every other one is tried together with."""


SP, EP, MTP = {"parallel_plan.sp_size": 2}, {"parallel_plan.ep_size": 2}, {"mtp.enabled": True}
DRAFT = {
    "block_size": 4, "num_draft_layers": 1, "target_layer_ids": [0], "mask_token_id": 5, "markov_rank": 8,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
STAGES = {
    "dspark_block_size": 5, "dspark_noise_token_id": 5, "dspark_target_layer_ids": [5, 6, 7], "dspark_markov_rank": 8,
}  # fmt: skip


def draft_fields(model_type: str) -> dict[str, Any]:
    """Return what a configuration says of a draft: as DeepSeek-V4's does, or as DeepSpec's."""
    return STAGES if model_type == "deepseek_v4" else {"dspark_config": DRAFT}


COLUMNS = (
    Column("Sequence parallelism", SP, parallel=True),
    Column("Expert parallelism", EP, parallel=True),
    Column("Multi-token prediction", MTP, lambda _: {"num_nextn_predict_layers": 1}),
    Column("DSpark", MTP, draft_fields),
    Column("Router losses", {"moe.aux_loss_coeff": 0.01, "moe.z_loss_coeff": 0.001}),
    Column(
        "Block diffusion", {"diffusion.cap_lambda": 2.0}, lambda _: {"is_diffusion_model": True, "mask_token_id": 5}
    ),
)


WORDS = {
    "DecoderLayer: a layer without attention under Transformers' AttentionInterface": (
        "some of its layers are not attention (linear attention), and would see a part of each sequence alone"
    ),
    "the model has no extra heads: none are known for this kind of model": "the family has no such heads",
    "the model has no extra heads: its family has none for multi-token prediction, and nothing says which DSpark draft it"
    " is to get": "the family has no such heads",
}
"""What a launch says, in the words of a page about families."""


class Refusal(NamedTuple):
    """Why a family does not go with something."""

    what: str
    reason: str


llada2.register()


def model_types() -> dict[str, str]:
    """Return the families of all registries, by model type: a name for each."""
    registries: Any = (families.FAMILIES, experts.FAMILIES, routers.ROUTERS)
    rows = [(row.model_type, row.name) for registry in registries for row in registry]
    rows += [(row.model_type, row.family) for row in MODELS.values()]
    rows += [(row.model_type, row.name.partition(",")[0]) for row in layouts.LAYOUTS]
    named: dict[str, str] = {}
    for model_type, name in rows:
        named.setdefault(model_type, name)
    return named | DENSE


def make(model_type: str, fields: dict[str, Any]) -> Any:
    """Return a family's model without weights: a few of its layers, of their default sizes."""
    config = AutoConfig.for_model(model_type, **({"num_hidden_layers": LAYERS} | SIZES.get(model_type, {}) | fields))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@lru_cache(maxsize=len(COLUMNS))
def made(model_type: str, column: Column) -> Any:
    """Return the model for a column, made once for all that is asked of it; None where Transformers has no such model."""
    return make(model_type, column.fields(model_type)) if model_type in CONFIG_MAPPING else None


@cache
def configuration(*settings: tuple[str, Any]) -> EngineConfig:
    """Return a configuration with some keys set, as a command line sets them."""
    words = [f"{KEYS[path].cli}={str(value).lower()}" for path, value in settings]
    return build_from_args(parse_torchturbo_args(words)[0], environ={})


def refusals(model_type: str, column: Column, *others: Column) -> list[str]:
    """Return what a launch on two ranks says against a family with a column's keys, and others', set."""
    model = made(model_type, column)
    if model is None:
        return ["Transformers has no model of this kind"]
    settings = {path: value for one in (column, *others) for path, value in one.settings.items()}
    engine = Engine(configuration(*settings.items()), Context(world_size=2, rank=0))
    stem = re.match(r"(\w+?)(ForCausalLM|LMHeadModel|ModelLM)", type(model).__name__)
    assert stem is not None, type(model)
    found = []
    for problem in engine.problems(model):
        message = problem.message.replace(stem[0], "the model").replace(f" ({model_type})", "")
        message = re.sub(rf"\b{stem[1]}(?=[A-Z])", "", message)  # of the names of its classes
        message = message.removesuffix(f", and not on {model_type}")
        found.append(WORDS.get(message, message))
    return list(dict.fromkeys(found))


def cell(model_type: str, column: Column) -> tuple[str, list[Refusal]]:
    """Return what stands in a cell, and the reasons that belong to it."""
    alone = refusals(model_type, column)
    if alone:
        return "no", [Refusal(column.title, reason) for reason in alone]
    without, reasons = [], []
    for other in COLUMNS[:2] if not column.parallel else ():
        if refusals(model_type, other):
            continue  # said in the other's own column
        if both := refusals(model_type, column, other):
            without.append(other.title.lower())
            reasons += [Refusal(f"{column.title} with {other.title.lower()}", reason) for reason in both]
    return (f"yes, without {' and '.join(without)}" if without else "yes"), reasons


HEAD = """\
# Which model trains with what

Each row is a family of models; a "no" has its reason [below](#why-not). The page is written by
`docs/tables/support.py`, which makes each family without weights and asks the checks that every launch begins with, on two ranks.
So the page says what a launch of that family says; a model with other sizes or settings can be told more. Numbers are
held by the tests: of [sequence](guides/sequence-parallelism.md#which-models) and
[expert parallelism](guides/expert-parallelism.md#which-models) for the families that their guides list, of router losses for every
family here, of multi-token prediction and DSpark for each layout, and of block diffusion for Qwen3, Qwen3-MoE and LLaDA2.

An objective's "yes" holds with FSDP2 on any number of ranks, with gradient accumulation, activation checkpointing,
chunked loss, and with sequence and expert parallelism where the family has a "yes" for them, unless the cell says otherwise.
"""


def rows() -> Iterator[tuple[list[str], list[tuple[str, Refusal]]]]:
    """Yield the cells of each family, and why it is refused what."""
    for model_type, name in sorted(model_types().items(), key=lambda item: item[1].lower()):
        cells, reasons = [name, f"`{model_type}`"], []
        for column in COLUMNS:
            words, why = cell(model_type, column)
            cells.append(words)
            reasons += [(model_type, refusal) for refusal in why]
        yield cells, reasons


def page() -> str:
    """Return the page."""
    found = list(rows())
    lines = [HEAD, _line("Family", "`model_type`", *(column.title for column in COLUMNS)), _rule(2 + len(COLUMNS))]
    lines += [_line(*cells) for cells, _ in found]
    grouped: dict[Refusal, list[str]] = {}
    for _, reasons in found:
        for model_type, refusal in reasons:
            grouped.setdefault(refusal, []).append(model_type)
    lines += ["\n## Why not\n", _line("Not", "Because", "`model_type`"), _rule(3)]
    order = [column.title for column in COLUMNS]
    for refusal, types in sorted(
        grouped.items(), key=lambda item: (_place(order, item[0].what), -len(item[1]), item[0].reason)
    ):
        lines.append(_line(refusal.what, refusal.reason, ", ".join(f"`{name}`" for name in types)))
    return "\n".join([*lines, ""])


def _place(order: list[str], what: str) -> int:
    return next(at for at, title in enumerate(order) if what.startswith(title))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _rule(count: int) -> str:
    return f"|{' --- |' * count}"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
