"""Where a model's operators are: found by their structure, and believed when a numeric probe agrees with the formula.

A probe runs the module's own code on small random tensors of the CPU, in a shallow copy that has stand-ins for its
weights. So it costs nothing that counts, works on the meta device, and changes neither weights nor random state.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchturbo.objectives.normalise import own_loss_function
from torchturbo.ops.replace import innermost

ROTARY = "apply_rotary_pos_emb"
"""The function that Transformers' attention calls by this global name."""
PROJECTIONS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
WIDTH, INNER = 8, 12


@dataclass(frozen=True)
class Site:
    """One place of a model where an operator is computed."""

    op: str
    name: str
    """The module's dotted name."""
    module: Any
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the probe found: how the operator is computed there."""


@dataclass
class Found:
    """The operators of a model."""

    sites: list[Site] = field(default_factory=list)
    unproven: dict[str, list[str]] = field(default_factory=dict)
    """For each operator what looks like it but isn't believed: ``class: why``."""

    def of(self, op: str) -> list[Site]:
        """Return the sites of one operator."""
        return [site for site in self.sites if site.op == op]


Probe = Callable[[Any], "Mapping[str, Any] | str"]
"""Returns the facts of a module, or the reason why it isn't what it looks like."""


def find(base: nn.Module) -> Found:
    """Return the operators of a Transformers model (of what PEFT wraps, not of the wrapper)."""
    found = Found()
    probed: dict[Any, Mapping[str, Any] | str] = {}
    for name, module in base.named_modules():
        for op, probe, key in _candidates(module):
            if "forward" in vars(module):
                facts: Mapping[str, Any] | str = "has a forward of its own already"
            else:
                if key not in probed:
                    probed[key] = tried(probe, module)
                facts = probed[key]
            if isinstance(facts, str):
                reasons = found.unproven.setdefault(op, [])
                if (reason := f"{type(module).__name__} {facts}") not in reasons:
                    reasons.append(reason)
            else:
                found.sites.append(Site(op, name, module, facts))
    if _has_causal_cross_entropy(base):
        found.sites.append(Site("cross_entropy", "loss_function", base))
    return found


def _candidates(module: nn.Module) -> Iterator[tuple[str, Probe, Any]]:
    """Yield what a module may be by its structure: operator, probe, and what modules of one probe have in common."""
    kind = type(module)
    children = module._modules
    if "RMSNorm" in kind.__name__ and isinstance(module._parameters.get("weight"), Tensor) and not children:
        yield "rms_norm", _rms_norm, (kind, "norm", _numbers(module))
    if "down_proj" in children and ({"gate_proj", "up_proj"} <= children.keys() or "gate_up_proj" in children):
        parts = tuple((name, type(child)) for name, child in children.items() if name not in PROJECTIONS)
        yield "swiglu", _swiglu, (kind, "mlp", *children, parts, *module._parameters)
    if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and isinstance(module.down_proj, nn.Parameter):
        yield "grouped_mm", _experts, (kind, "experts")
    names = _global_names(kind)
    if "ALL_ATTENTION_FUNCTIONS" in names:
        yield "attention", _attention, (kind, "attention")
    if ROTARY in names:
        yield "rope", _rope, (kind, "rope")


def _global_names(kind: type) -> frozenset[str]:
    code = getattr(innermost(kind.forward), "__code__", None)  # type: ignore[attr-defined]
    return frozenset(code.co_names) if code is not None else frozenset()


def tried(probe: Probe, module: nn.Module) -> Mapping[str, Any] | str:
    """Run a probe without leaving a trace in the random state; what it can't compute is not what it looks like."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every accelerator, too
        try:
            return probe(module)
        except Exception as error:
            return f"can't be probed ({type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''})"


def shallow_copy(module: nn.Module, parameters: Mapping[str, Tensor], children: Mapping[str, nn.Module]) -> Any:
    """Return a shallow copy of a module with other weights and children, in evaluation mode and without hooks."""
    stand_in = copy.copy(module)
    for group in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_buffers"):
        vars(stand_in)[group] = type(vars(module)[group])()
    vars(stand_in)["_parameters"] = {name: nn.Parameter(value) for name, value in parameters.items()}
    vars(stand_in)["_modules"] = {**module._modules, **children}
    vars(stand_in)["training"] = False
    return stand_in


def _numbers(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return the settings in a module that its code may depend on."""
    return tuple((name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str)))


def epsilon(module: nn.Module) -> float | None:
    """Return a norm's epsilon, under whichever name it stands."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(value := getattr(module, name, None), float):
            return value
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool) -> Tensor:
    """Return RMSNorm of x [..., H] with weight [H], as Transformers' models compute it: https://arxiv.org/abs/1910.07467.

    Statistics are float32. ``offset`` 1 is Gemma's ``(1 + w)``. ``cast_first`` rounds to the input's format before the
    weight is applied (Llama), so that a float32 weight makes a float32 result; otherwise the result is rounded (Gemma).
    """
    normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if cast_first:
        return (offset + weight if offset else weight) * normal.to(x.dtype)
    return (normal * (offset + weight.float())).to(x.dtype)


def _rms_norm(module: nn.Module) -> Mapping[str, Any] | str:
    eps = epsilon(module)
    weight = module._parameters["weight"]
    assert weight is not None
    if eps is None or weight.dim() != 1 or len(module._parameters) != 1:
        return "is not one weight [H] and an epsilon"
    values = torch.randn(len(weight))
    stand_in = shallow_copy(module, {"weight": values}, {})
    x = torch.randn(3, 2, len(weight)) * 3
    result = stand_in(x)
    offset = next(
        (at for at in (0.0, 1.0) if torch.allclose(rms_norm(x, values, eps, at, False), result, 1e-5, 1e-5)), None
    )
    if offset is None:
        return "computes something else than RMSNorm"
    halves = stand_in(x.bfloat16())
    cast_first = halves.dtype == torch.float32
    if not torch.allclose(rms_norm(x.bfloat16(), values, eps, offset, cast_first).float(), halves.float(), 2e-2, 2e-2):
        return "computes something else than RMSNorm in bfloat16"
    return {"eps": eps, "offset": offset, "cast_first": cast_first}


def _swiglu(module: nn.Module) -> Mapping[str, Any] | str:
    fused = "gate_up_proj" in module._modules
    names = {"gate_up_proj": (WIDTH, 2 * INNER)} if fused else {"gate_proj": (WIDTH, INNER), "up_proj": (WIDTH, INNER)}
    children = {name: nn.Linear(*shape) for name, shape in (names | {"down_proj": (INNER, WIDTH)}).items()}
    others = [name for name in module._modules if name not in children and not name.startswith("act")]
    if module._parameters or others:
        return f"has other parts than gate, up, down and an activation ({', '.join([*module._parameters, *others])})"
    x = torch.randn(2, 3, WIDTH)
    gate, up = children["gate_up_proj"](x).chunk(2, -1) if fused else (children["gate_proj"](x), children["up_proj"](x))
    if not torch.allclose(
        children["down_proj"](functional.silu(gate) * up), shallow_copy(module, {}, children)(x), 1e-5, 1e-6
    ):
        return "computes something else than down(silu(gate) * up)"
    return {"fused": fused}


def rotate_half(x: Tensor) -> Tensor:
    """Return (-x2, x1) of the two halves of x [..., D]: https://arxiv.org/abs/2104.09864 in GPT-NeoX's layout."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [B, N, T, D] and k [B, K, T, D] by cos, sin [B or 1, T, D]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def _rope(module: nn.Module) -> Mapping[str, Any] | str:
    function = innermost(type(module).forward)
    others = [name for name in function.__code__.co_names if "rotary" in name and name.startswith("apply")]
    if others != [ROTARY]:
        return f"rotates in several ways ({', '.join(others)})"
    native = function.__globals__[ROTARY]
    if list(inspect.signature(native).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return f"calls {ROTARY} with other arguments than q, k, cos, sin"
    q, k = torch.randn(2, 2, 3, WIDTH), torch.randn(2, 1, 3, WIDTH)
    angles = torch.randn(2, 3, WIDTH // 2)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    expected, result = rotary(q, k, cos, sin), native(q, k, cos, sin)
    if not all(torch.allclose(*pair, 1e-5, 1e-6) for pair in zip(expected, result, strict=True)):
        return "rotates otherwise than by halves"
    return {"native": native}


def _experts(module: nn.Module) -> Mapping[str, Any] | str:
    config = getattr(module, "config", None)
    if not hasattr(config, "_experts_implementation") or not hasattr(type(module).forward, "__wrapped__"):
        return "is not under Transformers' experts interface"
    return {}


def _attention(module: nn.Module) -> Mapping[str, Any] | str:
    if not hasattr(getattr(module, "config", None), "_attn_implementation"):
        return "is not under Transformers' attention interface"
    return {}


def _has_causal_cross_entropy(base: nn.Module) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss = own_loss_function(base)
    return getattr(loss, "replaces", loss) is ForCausalLMLoss  # one of ours that was taken out under a normaliser
