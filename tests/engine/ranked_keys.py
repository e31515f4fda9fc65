"""The live keys that show only on several ranks: two values of each, and what two ranks then do differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import tiny
from ranks import run_ranks


def settings(path: str, value: Any, **others: Any) -> Any:
    """Return a configuration with one key set by its path, beside other sections."""
    tree: Any = value
    for name in reversed(path.split(".")):
        tree = {name: tree}
    return parity.config(**_merged(others, tree))


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {name: _merged(one[name], other[name]) for name in one.keys() & other.keys() if isinstance(one[name], dict)}
    return one | other | both


def on_two_ranks(path: str, look: Callable[..., Any], **others: Any) -> Callable[[Any, Path], Any]:
    """Return an observation of what ``look(rank, configuration)`` sees on two ranks."""

    def observe(value: Any, folder: Path) -> Any:
        return run_ranks(2, look, settings(path, value, **others))

    return observe


def gathered_after_forward(rank: int, configuration: Any) -> bool:
    """Return whether a layer's parameters are whole after a forward pass."""
    from torch.distributed.tensor import DTensor

    model = tiny.model()
    parity.prepared(model, configuration, 2, rank)
    loss = model(**parity.batches(1)[0]).loss
    whole = not isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
    loss.backward()
    return whole


def experts_of_a_rank(rank: int, configuration: Any) -> set[int]:
    """Return how many experts of a layer a rank computes."""
    model = tiny.model("qwen3_moe")
    parity.prepared(model, configuration, 2, rank)
    seen: set[int] = set()
    experts = model.model.layers[0].mlp.experts
    experts.act_fn.register_forward_hook(lambda *args: seen.add(experts.num_experts))
    model(**parity.batches(1)[0]).loss.backward()
    return seen


def tokens_of_a_rank(rank: int, configuration: Any) -> set[int]:
    """Return how many of a sequence's tokens a rank computes."""
    model = tiny.model()
    parity.prepared(model, configuration, 2, rank)
    seen: set[int] = set()
    model.model.layers[0].register_forward_hook(lambda _, args, __: seen.add(args[0].shape[1]))
    model(**parity.batches(1)[0]).loss.backward()
    return seen


def prefetch_lists(rank: int, configuration: Any) -> list[int]:
    """Return how long the lists of the first, a middle and the last layer are, forward and backward."""
    model = tiny.model("qwen3_moe", num_hidden_layers=5)
    parity.prepared(model, configuration, 2, rank)
    states = [model.model.layers[at]._get_fsdp_state() for at in (0, 2, 4)]
    return [
        len(units)
        for state in states
        for units in (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
    ]


def prefetch(key: str, **others: Any) -> Callable[[Any, Path], Any]:
    """Return an observation of the prefetch lists of five layers with experts."""
    return on_two_ranks(f"backend_config.{key}", prefetch_lists, backend_config=others)


def offload_of(rank: int, configuration: Any) -> tuple[int, str]:
    """Return how many parameters have their optimizer state in host memory, and where sharded parameters are kept."""
    import torch
    from offloading import Device

    from torchturbo.engine.backends.fsdp2.offload import offloaded

    model = tiny.model()
    parity.prepared(model, configuration, 2, rank)
    optimizer = offloaded(torch.optim.AdamW(model.parameters()), configuration, Device())
    policy = model.model.layers[0]._get_fsdp_state()._fsdp_param_groups[0].offload_policy
    return len(getattr(optimizer, "_sizes", ())), type(policy).__name__


def offload(key: str, **others: Any) -> Callable[[Any, Path], Any]:
    """Return an observation of what CPU offload moves."""
    section = {"cpu_offload": {"enabled": True, "mode": "optimizer", **others}}
    return on_two_ranks(f"backend_config.cpu_offload.{key}", offload_of, backend_config=section)


RANKED: dict[str, tuple[Any, Any, Callable[[Any, Path], Any]]] = {
    "backend_config.reshard_after_forward": (
        True,
        False,
        on_two_ranks("backend_config.reshard_after_forward", gathered_after_forward),
    ),
    "parallel_plan.sp_size": (1, 2, on_two_ranks("parallel_plan.sp_size", tokens_of_a_rank)),
    "parallel_plan.ep_size": (1, 2, on_two_ranks("parallel_plan.ep_size", experts_of_a_rank)),
    "backend_config.prefetch_strategy": ("expert_with_layer", "expert_lookahead", prefetch("prefetch_strategy")),
    "backend_config.prefetch_direction": (
        "forward",
        "forward_backward",
        prefetch("prefetch_direction", prefetch_strategy="expert_with_layer"),
    ),
    "backend_config.forward_prefetch_depth": (1, 2, prefetch("forward_prefetch_depth")),
    "backend_config.backward_prefetch_depth": (1, 2, prefetch("backward_prefetch_depth")),
    "backend_config.cpu_offload.enabled": (True, False, offload("enabled")),
    "backend_config.cpu_offload.mode": ("optimizer", "all", offload("mode")),
    "backend_config.cpu_offload.optimizer_memory_fraction": (0.2, 0.8, offload("optimizer_memory_fraction")),
}
