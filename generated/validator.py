# Generated from schema/torchturbo.schema.json by `nox -s codegen`. Do not edit.
"""What each value has to be, and how values have to agree; needs nothing but the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchturbo.config.checks import Check, boolean, integer, number, one_of, string, strings
from torchturbo.config.keys import Rule
from torchturbo.generated.keys import RULES

CHECKS: dict[str, Check] = {
    "backend": one_of("fsdp2"),
    "backend_config.cpu_offload.enabled": boolean(),
    "backend_config.cpu_offload.mode": one_of("all", "optimizer"),
    "backend_config.cpu_offload.optimizer_memory_fraction": number(minimum=0, maximum=1),
    "backend_config.reshard_after_forward": boolean(),
    "backend_config.prefetch_strategy": one_of("native", "auto", "expert_with_layer", "expert_lookahead"),
    "backend_config.prefetch_direction": one_of("forward", "forward_backward"),
    "backend_config.forward_prefetch_depth": integer(minimum=1, maximum=2147483647),
    "backend_config.backward_prefetch_depth": integer(minimum=1, maximum=2147483647),
    "mixed_precision": one_of("bf16", "fp32", nullable=True),
    "gbs": integer(minimum=1, maximum=2147483647, nullable=True),
    "use_deterministic_algorithms": boolean(),
    "ops.policy": one_of("auto", "native", "custom"),
    "optimizer.name": one_of("muon", nullable=True),
    "parallel_plan.sp_size": integer(minimum=1, maximum=2147483647),
    "parallel_plan.ep_size": integer(minimum=1, maximum=2147483647),
    "activation_checkpointing.enabled": boolean(),
    "activation_checkpointing.use_reentrant": boolean(),
    "mtp.enabled": boolean(),
    "mtp.loss_scaling_factor": number(minimum=0, nullable=True),
    "mtp.log_loss": boolean(),
    "dspark.enabled": boolean(),
    "dspark.loss_scaling_factor": number(minimum=0),
    "dspark.num_anchors": integer(minimum=1, maximum=2147483647, nullable=True),
    "dspark.loss_decay_gamma": number(minimum=0, nullable=True),
    "dspark.ce_loss_alpha": number(minimum=0, nullable=True),
    "dspark.l1_loss_alpha": number(minimum=0, nullable=True),
    "dspark.confidence_loss_alpha": number(minimum=0, nullable=True),
    "moe.token_dispatcher": one_of("alltoall"),
    "moe.aux_loss_coeff": number(minimum=0),
    "moe.z_loss_coeff": number(minimum=0),
    "loss_chunk.enabled": boolean(),
    "loss_chunk.chunk_size": integer(minimum=1, maximum=2147483647, nullable=True),
    "freeze_policy.vision_tower": boolean(),
    "freeze_policy.multi_modal_projector": boolean(),
    "freeze_policy.language_model": boolean(),
    "diffusion.cap_lambda": number(minimum=0),
    "diffusion.bd_mask_low": number(minimum=0, maximum=1),
    "diffusion.bd_mask_high": number(minimum=0, maximum=1),
    "diffusion.bd_block_size": integer(minimum=1, maximum=2147483647),
    "mfu.enabled": boolean(),
    "mfu.card": one_of(
        "910b",
        "910c",
        "h20",
        "h100",
        "h200",
        "a100",
        "910b1",
        "910b3",
        "910b4",
        "h100-pcie",
        "h100-nvl",
        "h200-nvl",
        "b200",
        "gb200",
        nullable=True,
    ),
    "checkpoint.hf_export": one_of("final", "every"),
    "config_path": string(nullable=True),
    "profiling": boolean(),
    "memory_snapshot_steps": integer(minimum=1, maximum=2147483647, nullable=True),
    "log_level": one_of("DEBUG", "INFO", "WARNING", "ERROR"),
    "plugins": strings(
        pattern="\\.py(:.+)?$|^(?!([nN]ull|NULL|[nN]one|[tT]rue|[fF]alse)(:|$))[A-Za-z][A-Za-z0-9_-]+(:.+)?$",
        form="PATH.py or PATH.py:CONFIG, or an installed plugin's NAME or NAME:CONFIG",
    ),
    "resume_allow": strings(),
}


def broken_rules(values: Mapping[str, Any]) -> list[Rule]:
    """Return the cross-key rules that a whole configuration breaks; null on either side keeps a rule."""
    broken = []
    left, right = values["diffusion.bd_mask_low"], values["diffusion.bd_mask_high"]
    if left is not None and right is not None and not left <= right:
        broken.append(RULES[0])
    return broken
