"""Experts: what a module of fused experts is, which families are known to be divisible, and how they are divided.

Transformers stacks the experts of a layer, ``[E, ., .]``, in one module that is called with the tokens and with what
the router chose for them: ``experts(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K])``. Expert
parallelism gives each rank the parameters of E / n experts and leaves the module's own code to compute with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from torchturbo.ops import find

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Family(NamedTuple):
    """Models whose experts are held by a test to compute the same when they are divided."""

    name: str
    model_type: str
    """Transformers' name of the (text) model."""
    experts: str
    """Class of the experts module; a subclass of it is meant, too."""


FAMILIES: tuple[Family, ...] = (
    Family("AFMoE (Trinity)", "afmoe", "AfmoeExperts"),
    Family("Cohere2 MoE", "cohere2_moe", "Cohere2MoeExperts"),
    Family("DeepSeek-V2", "deepseek_v2", "DeepseekV2Experts"),
    Family("DeepSeek-V3 and R1", "deepseek_v3", "DeepseekV3Experts"),
    Family("DeepSeek-V3.2", "deepseek_v32", "DeepseekV32Experts"),
    Family("DeepSeek-V4", "deepseek_v4", "DeepseekV4Experts"),
    Family("dots.llm1", "dots1", "Dots1Experts"),
    Family("ERNIE 4.5 MoE", "ernie4_5_moe", "Ernie4_5_MoeExperts"),
    Family("EXAONE MoE", "exaone_moe", "ExaoneMoeExperts"),
    Family("FlexOlmo", "flex_olmo", "FlexOlmoExperts"),
    Family("Gemma 4", "gemma4_text", "Gemma4TextExperts"),
    Family("GLM-4.5 and 4.6", "glm4_moe", "Glm4MoeExperts"),
    Family("GLM-4 MoE Lite", "glm4_moe_lite", "Glm4MoeLiteExperts"),
    Family("GLM MoE DSA", "glm_moe_dsa", "GlmMoeDsaExperts"),
    Family("gpt-oss", "gpt_oss", "GptOssExperts"),
    Family("Granite MoE", "granitemoe", "GraniteMoeExperts"),
    Family("Granite MoE with shared experts", "granitemoeshared", "GraniteMoeSharedExperts"),
    Family("Hunyuan V1 MoE", "hunyuan_v1_moe", "HunYuanMoEV1Experts"),
    Family("HY V3", "hy_v3", "HYV3Experts"),
    Family("Laguna", "laguna", "LagunaExperts"),
    Family("LLaDA2.0 and 2.1", "llada2_moe", "LLaDA2MoeExperts"),
    Family("MiMo-V2-Flash", "mimo_v2_flash", "MiMoV2FlashExperts"),
    Family("MiniMax-01", "minimax", "MiniMaxExperts"),
    Family("MiniMax-M2", "minimax_m2", "MiniMaxM2Experts"),
    Family("Mixtral", "mixtral", "MixtralExperts"),
    Family("OLMoE", "olmoe", "OlmoeExperts"),
    Family("Phi-3.5 MoE", "phimoe", "PhimoeExperts"),
    Family("Qwen2-MoE", "qwen2_moe", "Qwen2MoeExperts"),
    Family("Qwen3-MoE", "qwen3_moe", "Qwen3MoeExperts"),
    Family("Qwen3-Next", "qwen3_next", "Qwen3NextExperts"),
    Family("Qwen3.5-MoE", "qwen3_5_moe_text", "Qwen3_5MoeExperts"),
    Family("Solar Open", "solar_open", "SolarOpenExperts"),
)
"""A row for each family; a class that has none is probed (:func:`refusal`)."""

NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Attributes under which a module knows how many experts it holds."""
ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of fused experts in a model by name: sharded or not, known or not, on any device."""
    return {name: module for name, module in model.named_modules() if _is_experts(module)}


def _is_experts(module: nn.Module) -> bool:
    own = _own(module)
    if not any(parameter.dim() == 3 for parameter in own.values()) or len({len(value) for value in own.values()}) != 1:
        return False
    positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    parameters = inspect.signature(type(module).forward).parameters.values()
    return sum(parameter.kind in positional for parameter in parameters) == 1 + len(ARGUMENTS)


def number_of_experts(module: nn.Module) -> int:
    """Return the most experts among which a token chooses anywhere inside a module; 0 where it does not choose."""
    fused = [len(next(iter(_own(experts).values()))) for experts in find_experts(module).values()]
    lists = [
        len(child)
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and name.rpartition(".")[2] == "experts"
    ]
    return max([*fused, *lists], default=0)


def lookalikes(model: nn.Module) -> list[str]:
    """Return the classes that are called experts and are none that can be divided."""
    names = (type(module).__name__ for module in model.modules() if not _is_experts(module))
    return sorted({name for name in names if name.endswith("Experts") and "Shared" not in name})


def family_of(module: nn.Module) -> Family | None:
    """Return the family of an experts module; None where the table has none."""
    classes = {kind.__name__ for kind in type(module).__mro__}  # FSDP2 puts a class of its own in front
    return next((family for family in FAMILIES if family.experts in classes), None)


def refusal(name: str, module: nn.Module) -> str | None:
    """Return why an experts module can't be divided, or None; its weights are not looked at.

    One of a known family is taken at its word. Of another, a small copy with random weights has to compute the same
    with all experts at once as with the two halves of them one after the other.
    """
    kind = type(module).__name__
    if name.rpartition(".")[2] == "base_layer":
        return f"{name} is wrapped in an adapter, whose own weights would have to be divided, too"
    own = _own(module)
    experts = len(next(iter(own.values())))
    for path, value in module.named_parameters():
        if path not in own or len(value) != experts:
            return f"{kind} holds {path}, which all of its experts share"
    if family_of(module) is not None:
        return None
    outcome = find.tried(_probe, module)
    return None if not isinstance(outcome, str) else f"{kind} is of no known family, and {outcome}"


def _probe(module: nn.Module, experts: int = 4, tokens: int = 6) -> dict[str, Any] | str:
    """Compare all experts with the two halves of them, in a shallow copy that has small weights."""
    small = _small_sizes(module)
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = small.get(getattr(text, "hidden_size", 0))
    if width is None:
        return "none of its sizes is the configuration's hidden_size"
    weights = {
        name: torch.randn(experts, *(small[size] for size in value.shape[1:])) / 2
        for name, value in _own(module).items()
    }
    rows, scores = torch.randn(tokens, width), torch.rand(tokens, 2)
    chosen = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)])
    expected = _resized(module, weights, small)(rows, chosen, scores)
    result, half = torch.zeros_like(expected), experts // 2
    for first in (0, half):
        part = _resized(module, {name: value[first : first + half] for name, value in weights.items()}, small)
        token, at = torch.where((chosen >= first) & (chosen < first + half))
        alone = part(rows[token], chosen[token, at].unsqueeze(1) - first, torch.ones(len(token), 1))
        result.index_add_(0, token, alone * scores[token, at].unsqueeze(1))
    if not torch.allclose(expected, result, 1e-4, 1e-5):
        return "computes something else with half of its experts"
    return {}


def _small_sizes(module: nn.Module) -> dict[int, int]:
    """Return a small number for each size of a module's matrices; what was double another one still is."""
    small: dict[int, int] = {}
    for size in sorted({size for value in _own(module).values() for size in value.shape[1:]}):
        half = small.get(size // 2) if size % 2 == 0 else None
        small[size] = 2 * half if half else 8 + 4 * len(small)
    return small


def _resized(module: nn.Module, weights: dict[str, Tensor], small: dict[int, int]) -> Any:
    stand_in = find.shallow_copy(module, weights, {})
    if isinstance(own := vars(module).get("forward"), MethodType):
        vars(stand_in)["forward"] = MethodType(own.__func__, stand_in)
    for name, value in list(vars(stand_in).items()):
        if name in NUMBERS:
            vars(stand_in)[name] = len(next(iter(weights.values())))
        elif isinstance(value, int) and not isinstance(value, bool) and "expert" not in name:
            vars(stand_in)[name] = small.get(value, value)
    return stand_in


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module._parameters.items() if value is not None and value.dim() > 0}


def divide(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give this rank its experts: each parameter becomes a DTensor on the ``ep`` mesh, ``Shard(0)``.

    Every rank has the whole parameters (or they are on the meta device), so nothing is sent. Whether they are trained,
    and what was noted on them, stays. What a rank keeps is a copy: a view would keep the other experts in memory.
    """
    ranks, rank = mesh.size(), mesh.get_local_rank()
    for name, whole in _own(module).items():
        mine = whole.detach().chunk(ranks)[rank].clone()
        sharded = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        parameter = nn.Parameter(sharded, requires_grad=whole.requires_grad)
        vars(parameter).update(vars(whole))
        module._parameters[name] = parameter


def unite(module: nn.Module) -> None:
    """Give every rank all experts again. A collective; what FSDP2 has taken over is left to it."""
    for name, part in _own(module).items():
        if isinstance(part, DTensor) and part.device_mesh.ndim == 1:
            whole = part.new_empty(part.shape) if part.is_meta else part.full_tensor()
            parameter = nn.Parameter(whole.detach(), requires_grad=part.requires_grad)
            vars(parameter).update(vars(part))
            module._parameters[name] = parameter


@contextmanager
def local_experts(module: nn.Module) -> Iterator[None]:
    """Let a module be one of this rank's experts alone while its own code runs, gradients included.

    Its dictionary of parameters is another one for the time: code that reads ``self.down_proj``, ``parameters()`` or
    ``num_experts`` sees plain tensors of E / n experts.
    """
    parameters, attributes = module._parameters, vars(module)
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in parameters.items()}
    experts = len(next(value for value in local.values() if value is not None))
    numbers = {name: attributes[name] for name in NUMBERS if name in attributes}
    attributes["_parameters"] = local
    attributes.update(dict.fromkeys(numbers, experts))
    try:
        yield
    finally:
        attributes["_parameters"] = parameters
        attributes.update(numbers)
