# Generated from schema/torchturbo.schema.json by `nox -s codegen`. Do not edit.
"""The flat arguments of a command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torchturbo.config.launch import Launch
from torchturbo.config.values import FrozenValues, frozen
from torchturbo.logging import LogLevel


@frozen
class CPUOffloadConfig(FrozenValues):
    """Host-memory offload: trades step time for device memory."""

    enabled: bool = False
    """Keep part of the training state in host memory instead of on the device."""
    mode: Literal["all", "optimizer"] = "all"
    """Which part of the training state moves to host memory."""
    optimizer_memory_fraction: float = 1.0
    """Share of the optimizer state's bytes that lives in host memory; 1 moves all of it, 0 none."""


@dataclass(kw_only=True, eq=False, repr=False)
class TorchTurboArgs(Launch):
    """What the command line said; None means that an option was not given."""

    config_path: str | None = None
    """Configuration file to read, YAML or JSON."""
    backend: Literal["fsdp2"] | None = None
    """Distributed backend that shards the model."""
    mixed_precision: Literal["bf16", "fp32"] | None = None
    """Precision of forward and backward. Trainable parameters are held in fp32 whatever the checkpoint's own type."""
    op_policy: Literal["auto", "native", "custom"] | None = None
    """Which implementation an operator gets (normalisation, rotary embedding, attention, experts, cross-entropy)."""
    optimizer_name: Literal["muon"] | None = None
    """Optimizer that the engine builds in place of the framework's."""
    use_deterministic_algorithms: bool = False
    """Require deterministic algorithms: torch's strict mode and what the device's libraries need in the environment. Slower; an operation that has no deterministic form raises."""
    sp_size: int | None = None
    """Ranks of a sequence-parallel group: they share one sequence (Ulysses), so its attention heads must divide."""
    ep_size: int | None = None
    """Ranks of an expert-parallel group: they share one set of experts."""
    gbs: int | None = None
    """Global batch size in micro-batches, each of the framework's batch size per device. Accumulation steps are gbs x sp_size / world size and replace the framework's."""
    gradient_checkpointing: bool = True
    """Let the engine recompute each layer's activations in backward. It replaces the framework's own gradient checkpointing."""
    ac_use_reentrant: bool = False
    """Use the reentrant form of torch.utils.checkpoint. It frees recomputed intermediates inside the step, which lowers the peak over several steps for mixture-of-experts and linear-attention models."""
    cpu_offload: CPUOffloadConfig = field(default_factory=CPUOffloadConfig)
    cpu_offload_enabled: bool | None = None
    """Keep part of the training state in host memory instead of on the device."""
    prefetch_strategy: Literal["native", "auto", "expert_with_layer", "expert_lookahead"] = "auto"
    """Which FSDP units are gathered ahead of the layer that needs them."""
    prefetch_direction: Literal["forward", "forward_backward"] = "forward_backward"
    """Passes in which explicit prefetch is set up."""
    forward_prefetch_depth: int = 1
    """Following layers that a layer gathers ahead in forward; 1 is the next layer. More overlap, higher peak memory."""
    backward_prefetch_depth: int = 1
    """Earlier layers that a layer gathers ahead in backward; 1 is the one before it."""
    enable_mtp: bool = False
    """Build the multi-token-prediction heads, load their weights, run them and add their loss. Off sets num_nextn_predict_layers to 0, in exports too."""
    mtp_loss_scaling_factor: float | None = 0.1
    """Weight of the heads' losses: total = main + weight x sum over depths. Megatron-LM, whose default this is, divides the sum by the number of depths. 0 runs and logs the heads but leaves the gradients alone."""
    enable_dspark: bool = True
    """Run the DSpark branch when MTP is on and the model's config has DSpark fields. Off leaves its modules in place and adds no loss."""
    dspark_loss_scaling_factor: float = 0.1
    """Weight of the DSpark loss in the total; 0 runs its forward without gradients."""
    dspark_num_anchors: int | None = None
    """Largest number of anchor blocks drawn from one sequence."""
    dspark_loss_decay_gamma: float | None = None
    """Decay constant of the loss weight over the positions of a block, in positions; 0 gives every position the same weight."""
    dspark_ce_loss_alpha: float | None = None
    """Weight of the draft's cross-entropy against the real next tokens."""
    dspark_l1_loss_alpha: float | None = None
    """Weight of the L1 distance between the draft's and the model's distributions."""
    dspark_confidence_loss_alpha: float | None = None
    """Weight of the confidence head's binary cross-entropy."""
    moe_token_dispatcher: Literal["alltoall"] | None = None
    """How tokens travel to the ranks that hold their experts."""
    moe_aux_loss_coeff: float = 0.0
    """Coefficient of the load-balancing loss over the tokens of a micro-batch; 0 leaves the model's own auxiliary loss as it is."""
    moe_z_loss_coeff: float = 0.0
    """Coefficient of the router z-loss, which keeps router logits small."""
    mtp_log_loss: bool = False
    """Log the unweighted loss of each head at info level."""
    enable_chunk_loss: bool = False
    """Compute the head and the cross-entropy chunk by chunk during training."""
    loss_chunk_size: int | None = None
    """Flattened tokens of one chunk. Smaller chunks hold fewer logits and take longer."""
    freeze_vision_tower: bool = False
    """Do not train the vision encoder, nor the audio encoder of a model that has one."""
    freeze_multi_modal_projector: bool = False
    """Do not train the projector between the encoders and the language model."""
    freeze_language_model: bool = False
    """Do not train the language model. With DSpark this trains the draft against a fixed target."""
    cap_lambda: float = 0.0
    """Weight of the CAP confidence loss, the entropy on tokens that are predicted correctly. 0 switches it off; 2.0 is the recommended value."""
    bd_mask_low: float = 0.3
    """Lower bound of the noise ratio sigma that is drawn for each sample."""
    bd_mask_high: float = 0.8
    """Upper bound of the noise ratio sigma that is drawn for each sample."""
    bd_block_size: int = 32
    """Tokens of one block: the grain of the attention mask, and the unit to which the cut-off length is rounded up."""
    profiling: bool = False
    """Profile the second optimizer step; traces go to the profiling folder of the output directory."""
    memory_snapshot_steps: int | None = None
    """Optimizer steps, counted from the first, whose memory history is captured into the memory_snapshot folder of the output directory."""
    log_level: LogLevel = LogLevel.INFO
    """Level of TorchTurbo's own log lines."""
    hf_export: Literal["final", "every"] | None = None
    """Which training checkpoints also export Hugging Face safetensors. The exact training state is saved natively every time."""
    plugins: list[str] = field(default_factory=list)
    """Plugin to load, code that runs inside the training process: a Python file, or the name under which an installed package offers one. A YAML or JSON file behind a colon is handed to it as its settings: PATH.py:CONFIG or NAME:CONFIG. May be given several times; plugins are called in the order given."""
    config_overrides: dict[str, Any] = field(default_factory=dict)
    """Options given on the command line, by their name without dashes; inputs of the launch left out."""
