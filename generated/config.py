# Generated from schema/torchturbo.schema.json by `nox -s codegen`. Do not edit.
"""The configuration as nested dataclasses."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from torchturbo.config.values import FrozenValues, frozen
from torchturbo.generated.args import CPUOffloadConfig
from torchturbo.logging import LogLevel


@frozen
class BackendConfig(FrozenValues):
    """How the distributed backend shards, gathers and offloads the model."""

    cpu_offload: CPUOffloadConfig = field(default_factory=CPUOffloadConfig)
    reshard_after_forward: bool = True
    """Free a unit's gathered parameters after its forward and gather them again for backward. Off is faster and holds every gathered unit until backward."""
    prefetch_strategy: Literal["native", "auto", "expert_with_layer", "expert_lookahead"] = "auto"
    """Which FSDP units are gathered ahead of the layer that needs them."""
    prefetch_direction: Literal["forward", "forward_backward"] = "forward_backward"
    """Passes in which explicit prefetch is set up."""
    forward_prefetch_depth: int = 1
    """Following layers that a layer gathers ahead in forward; 1 is the next layer. More overlap, higher peak memory."""
    backward_prefetch_depth: int = 1
    """Earlier layers that a layer gathers ahead in backward; 1 is the one before it."""


@frozen
class OpsConfig(FrozenValues):
    """Operator implementations."""

    policy: Literal["auto", "native", "custom"] = "auto"
    """Which implementation an operator gets (normalisation, rotary embedding, attention, experts, cross-entropy)."""


@frozen
class OptimizerConfig(FrozenValues):
    """The optimizer that the engine manages itself."""

    name: Literal["muon"] | None = None
    """Optimizer that the engine builds in place of the framework's."""


@frozen
class ParallelPlan(FrozenValues):
    """Sizes of the mesh axes; what remains of the world is data parallel."""

    sp_size: int = 1
    """Ranks of a sequence-parallel group: they share one sequence (Ulysses), so its attention heads must divide."""
    ep_size: int = 1
    """Ranks of an expert-parallel group: they share one set of experts."""


@frozen
class ActivationCheckpointingConfig(FrozenValues):
    """Recompute activations in backward instead of keeping them."""

    enabled: bool = True
    """Let the engine recompute each layer's activations in backward. It replaces the framework's own gradient checkpointing."""
    use_reentrant: bool = False
    """Use the reentrant form of torch.utils.checkpoint. It frees recomputed intermediates inside the step, which lowers the peak over several steps for mixture-of-experts and linear-attention models."""


@frozen
class MTPConfig(FrozenValues):
    """Multi-token prediction: extra heads that learn to predict further tokens ahead."""

    enabled: bool = False
    """Build the multi-token-prediction heads, load their weights, run them and add their loss. Off sets num_nextn_predict_layers to 0, in exports too."""
    loss_scaling_factor: float | None = 0.1
    """Weight of the heads' losses: total = main + weight x sum over depths. Megatron-LM, whose default this is, divides the sum by the number of depths. 0 runs and logs the heads but leaves the gradients alone."""
    log_loss: bool = False
    """Log the unweighted loss of each head at info level."""


@frozen
class DSparkConfig(FrozenValues):
    """DSpark: a draft branch trained beside the model for speculative decoding, as DeepSpec trains it."""

    enabled: bool = True
    """Run the DSpark branch when MTP is on and the model's config has DSpark fields. Off leaves its modules in place and adds no loss."""
    loss_scaling_factor: float = 0.1
    """Weight of the DSpark loss in the total; 0 runs its forward without gradients."""
    num_anchors: int | None = 512
    """Largest number of anchor blocks drawn from one sequence."""
    loss_decay_gamma: float | None = 4.0
    """Decay constant of the loss weight over the positions of a block, in positions; 0 gives every position the same weight."""
    ce_loss_alpha: float | None = 0.1
    """Weight of the draft's cross-entropy against the real next tokens."""
    l1_loss_alpha: float | None = 0.9
    """Weight of the L1 distance between the draft's and the model's distributions."""
    confidence_loss_alpha: float | None = 1.0
    """Weight of the confidence head's binary cross-entropy."""


@frozen
class MoEConfig(FrozenValues):
    """Mixture-of-experts models: token dispatch and router losses."""

    token_dispatcher: Literal["alltoall"] = "alltoall"
    """How tokens travel to the ranks that hold their experts."""
    aux_loss_coeff: float = 0.0
    """Coefficient of the load-balancing loss over the tokens of a micro-batch; 0 leaves the model's own auxiliary loss as it is."""
    z_loss_coeff: float = 0.0
    """Coefficient of the router z-loss, which keeps router logits small."""


@frozen
class LossChunkConfig(FrozenValues):
    """Output head and cross-entropy computed in pieces, so that the full logits never exist."""

    enabled: bool = False
    """Compute the head and the cross-entropy chunk by chunk during training."""
    chunk_size: int | None = 1024
    """Flattened tokens of one chunk. Smaller chunks hold fewer logits and take longer."""


@frozen
class FreezePolicy(FrozenValues):
    """Parts of a vision-language model whose parameters are not trained."""

    vision_tower: bool = False
    """Do not train the vision encoder, nor the audio encoder of a model that has one."""
    multi_modal_projector: bool = False
    """Do not train the projector between the encoders and the language model."""
    language_model: bool = False
    """Do not train the language model. With DSpark this trains the draft against a fixed target."""


@frozen
class DiffusionConfig(FrozenValues):
    """Block diffusion: noise, block size and the CAP confidence loss. Read for diffusion models only."""

    cap_lambda: float = 0.0
    """Weight of the CAP confidence loss, the entropy on tokens that are predicted correctly. 0 switches it off; 2.0 is the recommended value."""
    bd_mask_low: float = 0.3
    """Lower bound of the noise ratio sigma that is drawn for each sample."""
    bd_mask_high: float = 0.8
    """Upper bound of the noise ratio sigma that is drawn for each sample."""
    bd_block_size: int = 32
    """Tokens of one block: the grain of the attention mask, and the unit to which the cut-off length is rounded up."""


@frozen
class MFUConfig(FrozenValues):
    """Model and hardware flops utilisation in the logs."""

    enabled: bool = False
    """Log MFU and HFU beside the loss."""
    card: (
        Literal[
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
        ]
        | None
    ) = None
    """Chip family whose peak throughput is the denominator: a row of the peak table."""


@frozen
class CheckpointConfig(FrozenValues):
    """What is written with each training checkpoint."""

    hf_export: Literal["final", "every"] = "every"
    """Which training checkpoints also export Hugging Face safetensors. The exact training state is saved natively every time."""


@frozen
class RuntimeArgs(FrozenValues):
    """Inputs that belong to one launch. They are no part of the configuration file."""

    config_path: str | None = None
    """Configuration file to read, YAML or JSON."""
    profiling: bool = False
    """Profile the second optimizer step; traces go to the profiling folder of the output directory."""
    memory_snapshot_steps: int | None = None
    """Optimizer steps, counted from the first, whose memory history is captured into the memory_snapshot folder of the output directory."""
    log_level: LogLevel = LogLevel.INFO
    """Level of TorchTurbo's own log lines."""
    plugins: tuple[str, ...] = ()
    """Plugin to load, code that runs inside the training process: a Python file, or the name under which an installed package offers one. A YAML or JSON file behind a colon is handed to it as its settings: PATH.py:CONFIG or NAME:CONFIG. May be given several times; plugins are called in the order given."""
    resume_allow: tuple[str, ...] = ()
    """Setting that may differ from the resumed checkpoint's although it changes the data order or the schedule. May be given several times."""


@frozen
class EngineOptions(FrozenValues):
    """Configuration of the TorchTurbo training engine."""

    backend: Literal["fsdp2"] = "fsdp2"
    """Distributed backend that shards the model."""
    backend_config: BackendConfig = field(default_factory=BackendConfig)
    mixed_precision: Literal["bf16", "fp32"] | None = None
    """Precision of forward and backward. Trainable parameters are held in fp32 whatever the checkpoint's own type."""
    gbs: int | None = None
    """Global batch size in micro-batches, each of the framework's batch size per device. Accumulation steps are gbs x sp_size / world size and replace the framework's."""
    use_deterministic_algorithms: bool = False
    """Require deterministic algorithms: torch's strict mode and what the device's libraries need in the environment. Slower; an operation that has no deterministic form raises."""
    ops: OpsConfig = field(default_factory=OpsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel_plan: ParallelPlan = field(default_factory=ParallelPlan)
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    dspark: DSparkConfig = field(default_factory=DSparkConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    loss_chunk: LossChunkConfig = field(default_factory=LossChunkConfig)
    freeze_policy: FreezePolicy = field(default_factory=FreezePolicy)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    mfu: MFUConfig = field(default_factory=MFUConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


SECTION_CLASSES: dict[str, type[Any]] = {
    "": EngineOptions,
    "backend_config": BackendConfig,
    "backend_config.cpu_offload": CPUOffloadConfig,
    "ops": OpsConfig,
    "optimizer": OptimizerConfig,
    "parallel_plan": ParallelPlan,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "mtp": MTPConfig,
    "dspark": DSparkConfig,
    "moe": MoEConfig,
    "loss_chunk": LossChunkConfig,
    "freeze_policy": FreezePolicy,
    "diffusion": DiffusionConfig,
    "mfu": MFUConfig,
    "checkpoint": CheckpointConfig,
}
"""Class of each section by its path."""
