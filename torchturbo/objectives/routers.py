"""Routers as data: which module of a family chooses experts, where its raw logits are, and how it scores them.

Add a family: one row of :data:`ROUTERS`, or :func:`register` from a program or a plugin. A router without a row is
probed: its own code runs once on small random numbers, and is believed where its weights are a known score of its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from torchturbo.ops import find
from torchturbo.parallel.experts import find_experts, number_of_experts

Score = Callable[[Tensor], Tensor]


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    return functional.softplus(logits).sqrt()


SCORES: Mapping[str, Score] = {"softmax": _softmax, "sigmoid": torch.sigmoid, "sqrtsoftplus": _sqrtsoftplus}
"""Functions from logits [T, E] to scores [T, E], of which the k highest choose the experts of a token."""
HASH = "hash"
"""Score of a router that looks experts up by the token's number: there is nothing to balance, and no loss of it."""
WRAPPED = ".base_layer"
"""How the name of a module ends that one of PEFT's adapters wraps."""
TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
"""Names under which configurations say how many experts a token meets."""


class Family(NamedTuple):
    """Models whose routers' losses are held by a test to be those of the formula."""

    name: str
    model_type: str
    """Transformers' name of the (text) model."""
    router: str
    """Class of the router; a subclass of it is meant, too."""
    score: str
    """A name in :data:`SCORES`, :data:`HASH`, or the router's attribute that holds such a name or the function."""
    logits: int | str = 0
    """Which output of the router the raw logits are, or the name of the linear map inside it that computes them."""


ROUTERS: list[Family] = [
    Family("AFMoE (Trinity)", "afmoe", "AfmoeTokenChoiceRouter", "sigmoid"),
    Family("Cohere2 MoE", "cohere2_moe", "Cohere2MoeTopKRouter", "expert_selection_fn"),
    Family("DeepSeek-V2", "deepseek_v2", "DeepseekV2TopkRouter", "softmax"),
    Family("DeepSeek-V3 and R1", "deepseek_v3", "DeepseekV3TopkRouter", "sigmoid"),
    Family("DeepSeek-V3.2", "deepseek_v32", "DeepseekV32TopkRouter", "sigmoid"),
    Family("DeepSeek-V4", "deepseek_v4", "DeepseekV4TopKRouter", "score_fn"),
    Family("DeepSeek-V4, first layers", "deepseek_v4", "DeepseekV4HashRouter", HASH),
    Family("dots.llm1", "dots1", "Dots1TopkRouter", "sigmoid"),
    Family("ERNIE 4.5 MoE", "ernie4_5_moe", "Ernie4_5_MoeTopKRouter", "softmax"),
    Family("EXAONE MoE", "exaone_moe", "ExaoneMoeTopkRouter", "sigmoid"),
    Family("FlexOlmo", "flex_olmo", "FlexOlmoTopKRouter", "softmax"),
    Family("Gemma 4", "gemma4_text", "Gemma4TextRouter", "softmax", "proj"),  # its first output are scores
    Family("GLM-4.5 and 4.6", "glm4_moe", "Glm4MoeTopkRouter", "sigmoid"),
    Family("GLM-4 MoE Lite", "glm4_moe_lite", "Glm4MoeLiteTopkRouter", "sigmoid"),
    Family("GLM MoE DSA", "glm_moe_dsa", "GlmMoeDsaTopkRouter", "sigmoid"),
    Family("gpt-oss", "gpt_oss", "GptOssTopKRouter", "softmax"),
    Family("Granite MoE", "granitemoe", "GraniteMoeTopKRouter", "softmax"),
    Family("Granite MoE with shared experts", "granitemoeshared", "GraniteMoeSharedTopKRouter", "softmax"),
    Family("Hunyuan V1 MoE", "hunyuan_v1_moe", "HunYuanMoEV1Gate", "softmax"),
    Family("HY V3", "hy_v3", "HYV3TopKRouter", "sigmoid"),
    Family("Laguna", "laguna", "LagunaTopKRouter", "sigmoid"),
    Family("LLaDA2.0 and 2.1", "llada2_moe", "LLaDA2MoeTopkRouter", "sigmoid"),
    Family("MiMo-V2-Flash", "mimo_v2_flash", "MiMoV2FlashTopkRouter", "sigmoid"),
    Family("MiniMax-01", "minimax", "MiniMaxTopKRouter", "softmax"),
    Family("MiniMax-M2", "minimax_m2", "MiniMaxM2TopKRouter", "sigmoid"),
    Family("Mixtral", "mixtral", "MixtralTopKRouter", "softmax"),
    Family("OLMoE", "olmoe", "OlmoeTopKRouter", "softmax"),
    Family("Phi-3.5 MoE", "phimoe", "PhimoeTopKRouter", "softmax"),
    Family("Qwen2-MoE", "qwen2_moe", "Qwen2MoeTopKRouter", "softmax"),
    Family("Qwen3-MoE", "qwen3_moe", "Qwen3MoeTopKRouter", "softmax"),
    Family("Qwen3-Next", "qwen3_next", "Qwen3NextTopKRouter", "softmax"),
    Family("Qwen3.5-MoE", "qwen3_5_moe_text", "Qwen3_5MoeTopKRouter", "softmax"),
    Family("Solar Open", "solar_open", "SolarOpenTopkRouter", "sigmoid"),
]
"""A row for each router; what has none is probed."""
OLDER: tuple[Family, ...] = (
    Family("Granite MoE", "granitemoe", "GraniteMoeTopKGating", "softmax", "layer"),
    Family("Granite MoE with shared experts", "granitemoeshared", "GraniteMoeSharedTopKGating", "softmax", "layer"),
)
"""Routers that Transformers had under other names before."""


class Router(NamedTuple):
    """A router of one model."""

    name: str
    """The module's dotted name."""
    module: nn.Module
    """What is called, and whose output the logits are in."""
    output: int
    """Which output, where it returns several."""
    score: Score
    top_k: int


class Routers(NamedTuple):
    """The routers of one model."""

    found: list[Router]
    hashed: list[str]
    """Names of those that have nothing to balance."""
    unknown: list[str]
    """Why others can't be read."""


def register(name: str, router: str, score: str, logits: int | str = 0, model_type: str = "") -> None:
    """Make a family's router known to the router losses: see :class:`Family`.

    ``router`` may also be the class of the block around a plain linear gate; ``logits`` is then the gate's name in it.

    Raises
    ------
    ValueError
        A router class of this name has a row already.

    """
    if any(row.router == router for row in ROUTERS):
        raise ValueError(f"{router} has a row already")
    ROUTERS.append(Family(name, model_type, router, score, logits))


def family_of(module: nn.Module) -> Family | None:
    """Return the row of a router; None where the table has none."""
    classes = [kind.__name__ for kind in type(module).__mro__]  # FSDP2 and adapters put classes of their own in front
    return next((row for kind in classes for row in (*ROUTERS, *OLDER) if row.router == kind), None)


def find_routers(base: nn.Module) -> Routers:
    """Return the routers of a Transformers model, known or probed, on any device; its weights are not looked at."""
    result = Routers([], [], [])
    rows = {
        name: row
        for name, module in base.named_modules()
        if not name.endswith("original_module") and (row := family_of(module)) is not None  # a copy that PEFT keeps
    }
    for name, row in rows.items():
        if row.score == HASH:
            result.hashed.append(name)
        else:
            result.found.append(_known(base, name, row))
    probed: dict[type, str | Mapping[str, Any]] = {}
    for block in _blocks(base):
        if not any(_inside(name, block) for name in rows):
            _probe_block(base, block, probed, result)
    order = {name: at for at, (name, _) in enumerate(base.named_modules())}
    result.found.sort(key=lambda router: order[router.name])
    return result


def _known(base: nn.Module, name: str, row: Family) -> Router:
    module = base.get_submodule(name)
    called = getattr(module, row.logits) if isinstance(row.logits, str) else module
    score: Any = SCORES.get(row.score)
    if score is None:
        score = getattr(module, row.score)
        score = SCORES[score] if isinstance(score, str) else score
    output = row.logits if isinstance(row.logits, int) else 0
    return Router(name, called, output, score, _top_k(base, name))


def _top_k(base: nn.Module, name: str) -> int:
    """Return how many experts a token meets: the router, what is around it, or a configuration says so."""
    module, around = base.get_submodule(name), base.get_submodule(_unwrapped(name).rpartition(".")[0])
    for owner in (module, around):
        if isinstance(found := getattr(owner, "top_k", None), int):
            return found
    whole: Any = getattr(base, "config", None)
    text = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    for config in (getattr(module, "config", None), getattr(around, "config", None), text):
        for attribute in TOP_K:
            if isinstance(found := getattr(config, attribute, None), int):
                return found
    raise ValueError(f"{name}: neither it nor the configuration says how many experts a token meets")


def _blocks(base: nn.Module) -> Iterator[str]:
    """Return the names of the modules that hold experts, each once."""
    fused, seen = find_experts(base), set[str]()
    for name, module in base.named_modules():
        kind, parent = type(module).__name__, _unwrapped(name).rpartition(".")[0]
        listed = isinstance(module, nn.ModuleList) and name.endswith(".experts")
        alike = kind.endswith("Experts") and "Shared" not in kind and not any(_inside(name, one) for one in fused)
        if (name in fused or listed or alike) and parent not in seen:
            seen.add(parent)
            yield parent


def _unwrapped(name: str) -> str:
    """Return where a module stood before PEFT put an adapter around it, or several: ``experts.base_layer`` was ``experts``."""
    while name.endswith(WRAPPED):
        name = name.removesuffix(WRAPPED)
    return name


def _inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _probe_block(base: nn.Module, block: str, probed: dict[type, str | Mapping[str, Any]], result: Routers) -> None:
    """Look for the router among what is in a block beside its experts."""
    around = base.get_submodule(block)
    experts, reasons = number_of_experts(around), list[str]()
    for child, module in around.named_children():
        if "expert" in child or not any(_is_gate(value, experts) for value in module.parameters()):
            continue
        while isinstance(inner := getattr(module, WRAPPED[1:], None), nn.Module):
            child, module = f"{child}{WRAPPED}", inner
        kind = type(module)
        if kind not in probed:
            probed[kind] = find.tried(partial(_probe, experts), module)
        facts = probed[kind]
        if isinstance(facts, str):
            reasons.append(f"{child} ({kind.__name__}) {facts}")
            continue
        name = f"{block}.{child}" if block else child
        result.found.append(Router(name, module, facts["output"], SCORES[facts["score"]], facts["top_k"]))
        return
    what = f": {'; '.join(reasons)}" if reasons else ""
    reason = f"{type(around).__name__} has no router of a known family{what}"
    if reason not in result.unknown:
        result.unknown.append(reason)


def _is_gate(parameter: Tensor, experts: int) -> bool:
    """Return whether a parameter may make a logit for each of so many experts; 0 of an unknown number."""
    return parameter.dim() == 2 and experts in (0, len(parameter))


def _probe(experts: int, module: nn.Module) -> dict[str, Any] | str:
    """Return which output of a router the logits are, and which score of them its weights are proportional to."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return "is a plain linear map, which does not tell how its logits are scored"
    values = {name: torch.randn(value.shape) / 5 for name, value in module.named_parameters()}
    values |= {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in module.named_buffers()}
    rows = torch.randn(6, next(len(value[0]) for value in module.parameters() if _is_gate(value, experts)))
    try:
        outputs = functional_call(module, values, (rows,))
    except ValueError:  # it takes its tokens apart, [B, S, H]
        outputs = functional_call(module, values, (rows[None],))
    return _read(outputs, len(rows))


def _read(outputs: Any, tokens: int) -> dict[str, Any] | str:
    if not isinstance(outputs, tuple):
        return "returns its logits alone, which does not tell how they are scored"
    flat = [value.reshape(tokens, -1) for value in outputs if isinstance(value, Tensor) and value.numel() % tokens == 0]
    chosen = next((value for value in flat if not value.is_floating_point()), None)
    if chosen is None or len(flat) != len(outputs):
        return "does not return which experts it chose"
    scores = [value for value in flat if value.is_floating_point()]
    weights = next((value for value in scores if value.shape == chosen.shape), None)
    at = next((i for i, value in enumerate(flat) if value.is_floating_point() and value is not weights), None)
    if weights is None or at is None or chosen.shape[1] < 2:
        return "does not return the logits of all experts and the weights of those that it chose, two or more"
    logits = flat[at].float()
    for name, score in SCORES.items():
        picked = score(logits).gather(1, chosen.long())
        if torch.allclose(_shares(picked), _shares(weights.float()), 1e-3, 1e-4):
            return {"output": at, "score": name, "top_k": chosen.shape[1]}
    return f"weighs experts by none of {', '.join(SCORES)} of its logits"


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def logits_of(output: Any, at: int) -> Tensor:
    """Return the raw logits in what a router returned: alone, or one of several outputs."""
    found: Tensor = output if isinstance(output, Tensor) else output[at]
    return found
